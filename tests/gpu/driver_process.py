"""Python processes that use the CUDA backend of an extension, without the package and torch.

Scripts find the extension as `_C`, its `_C.cuda` as `cuda`, and numpy as `np`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from lora_refit import _C

_PRELUDE = """
import importlib.util, os, sys
import numpy as np
spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
_C = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_C)
cuda = _C.cuda
sys.argv = sys.argv[1:]
"""


def start(
    script: str,
    *arguments: str,
    environment: dict[str, str],
    extension: str = _C.__file__,
    inherit: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Reads and writes text through its standard streams.

    `arguments` are its sys.argv[1:], `inherit` descriptors that it has too.
    """
    return subprocess.Popen(
        [sys.executable, "-c", _PRELUDE + script, extension, *arguments],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=inherit,
    )


def run(
    script: str, *arguments: str, environment: dict[str, str], extension: str = _C.__file__
) -> str:
    """What it prints, once it has ended well."""
    process = start(script, *arguments, environment=environment, extension=extension)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, f"exit {process.returncode}: {output}{errors}"
    return output
