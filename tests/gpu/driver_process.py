"""Python processes that use the CUDA backend of an extension, without the package and torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lora_refit import _C

_PRELUDE = """
import os
import sys
import numpy as np
from mutated_extension import cuda, stand_in
"""


def start(
    script: str | Path,
    *arguments: str,
    environment: dict[str, str],
    extension: str | Path = _C.__file__,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Reads and writes text through its standard streams.

    `script` is a file, or text that may use what the prelude imports; `arguments` are its
    sys.argv[1:], `inherit` descriptors that it has too.
    """
    code = ["-c", _PRELUDE + script] if isinstance(script, str) else [str(script)]
    path = os.pathsep.join([str(Path(__file__).parent), environment.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *code, str(extension), *arguments],
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=inherit,
    )


def run(
    script: str | Path,
    *arguments: str,
    environment: dict[str, str],
    extension: str | Path = _C.__file__,
) -> str:
    """What it prints, once it has ended well."""
    process = start(script, *arguments, environment=environment, extension=extension)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, f"exit {process.returncode}: {output}{errors}"
    return output
