"""The C++ planner's tile table: `CopyTile[n]` as bytes (csrc/cuda/kernels.h)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from block_reference import Blocks, Buffer
from numpy.typing import NDArray

from lora_refit.kernels import BLOCK_DTYPE, DTYPE_CODES

CSRC = Path(__file__).parents[2] / "csrc"
PLANNER = [CSRC / "plan" / f"{name}.cpp" for name in ("boxes", "loops")]
TILE_DTYPE = np.dtype([("box", BLOCK_DTYPE), ("variant", "<i4"), ("reserved", "<i4")])


def tile_table(
    blocks: Blocks, sources: list[Buffer], destinations: list[Buffer]
) -> NDArray[np.void]:
    """The tiles of a block list that fits its buffers."""
    assert blocks.dtype == BLOCK_DTYPE
    src, dst = _shapes(sources), _shapes(destinations)
    tiles = np.zeros(0, TILE_DTYPE)
    while True:
        count = _library().tile_table(
            _pointer(blocks), ctypes.c_int64(len(blocks)), *src, *dst, _pointer(tiles),
            ctypes.c_int64(len(tiles)),
        )  # fmt: skip
        if count <= len(tiles):
            return tiles
        tiles = np.zeros(count, TILE_DTYPE)


@cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/tile_table.so"
        compiler = os.environ.get("CXX", "g++")
        sources = [Path(__file__).with_suffix(".cpp"), *PLANNER]
        command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{CSRC}", "-o", library]
        subprocess.run([*command, *map(str, sources)], check=True)
        loaded = ctypes.CDLL(library)
    loaded.tile_table.restype = ctypes.c_int64
    return loaded


def _shapes(buffers: list[Buffer]) -> tuple[object, object, object]:
    """dtype codes, element counts, and how many; the arrays stay alive with their pointers."""
    dtypes = np.array([DTYPE_CODES[buffer.tensor.dtype] for buffer in buffers], np.int32)
    sizes = np.array([buffer.tensor.numel() for buffer in buffers], np.int64)
    return _pointer(dtypes), _pointer(sizes), ctypes.c_int64(len(buffers))


def _pointer(array: NDArray[np.generic]) -> object:
    """numpy's pointers keep their arrays alive."""
    return array.ctypes.data_as(ctypes.c_void_p)
