"""GPU 0 of the stand-in driver of tests/gpu, for the processes of a real trainer and engine."""

from __future__ import annotations

import contextlib
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "gpu"))
_for_good = contextlib.ExitStack()


@cache
def pretend_gpu() -> Any:
    """From now on this process's tensors lie on GPU 0. Returns the stand-in driver."""
    from cpu_as_gpu import pretend

    return _for_good.enter_context(pretend())
