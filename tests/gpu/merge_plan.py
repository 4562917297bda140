"""The C++ merge planner: the check of a program, and its strips as bytes (csrc/cuda/kernels.h)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from merge_cases import Program
from numpy.typing import NDArray

from lora_refit.kernels import DTYPE_CODES

CSRC = Path(__file__).parents[2] / "csrc"
PLANNER = [CSRC / "plan" / f"{name}.cpp" for name in ("checks", "merge_check", "strips")]
STRIP_DTYPE = np.dtype(
    [("block", "<i4"), ("rows", "<i4"), ("row", "<i8"), ("col", "<i8"), ("cols", "<i8")]
)
ERROR_BYTES = 1000


def check(program: Program) -> str:
    """Why the program is refused; empty if it is not."""
    error = ctypes.create_string_buffer(ERROR_BYTES)
    src_dtypes, src_sizes = _shapes(program.sources)
    dst_dtypes, dst_sizes = _shapes(program.destinations)
    _library().check_merge_program(
        _pointer(program.blocks), _count(program.blocks),
        _pointer(program.segments), _count(program.segments),
        _pointer(src_dtypes), _pointer(src_sizes), _count(src_sizes),
        _pointer(dst_dtypes), _pointer(dst_sizes), _count(dst_sizes),
        ctypes.c_int32(program.modules), error, ctypes.c_size_t(ERROR_BYTES),
    )  # fmt: skip
    return error.value.decode()


def strips(program: Program, thread_blocks: int) -> NDArray[np.void]:
    """`STRIP_DTYPE` [n]: the strips of a program that passes the check."""
    result = np.zeros(0, STRIP_DTYPE)
    while True:
        count = _library().cut_merge_strips(
            _pointer(program.blocks), _count(program.blocks), ctypes.c_int64(thread_blocks),
            _pointer(result), _count(result),
        )  # fmt: skip
        if count <= len(result):
            return result
        result = np.zeros(count, STRIP_DTYPE)


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/merge_plan.so"
        compiler = os.environ.get("CXX", "g++")
        sources = [Path(__file__).with_suffix(".cpp"), *PLANNER]
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", library]
        subprocess.run([*command, *map(str, sources)], check=True)
        loaded = ctypes.CDLL(library)
    loaded.cut_merge_strips.restype = ctypes.c_int64
    return loaded


def _shapes(buffers: list) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    dtypes = np.array([DTYPE_CODES[buffer.tensor.dtype] for buffer in buffers], np.int32)
    return dtypes, np.array([buffer.tensor.numel() for buffer in buffers], np.int64)


def _count(array: NDArray[np.generic]) -> ctypes.c_int64:
    return ctypes.c_int64(len(array))


def _pointer(array: NDArray[np.generic]) -> object:
    """numpy's pointers keep their arrays alive."""
    return array.ctypes.data_as(ctypes.c_void_p)
