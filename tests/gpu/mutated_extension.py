"""The CUDA backend of an extension, without the package and torch, for processes of their own.

The extension's path is taken off sys.argv[1]. See driver_process.py.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys

_spec = importlib.util.spec_from_file_location("_C", sys.argv.pop(1))
assert _spec is not None and _spec.loader is not None
_C = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_C)
cuda = _C.cuda


def stand_in() -> ctypes.CDLL:
    """For its control functions, see fakecuda/control.cpp."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("take_log", "live"):
        getattr(library, f"fakecuda_{name}").restype = ctypes.c_char_p
    return library
