"""The copy and digest kernels launched on the PTX simulator."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import ptxsim
from block_reference import Buffer, addresses_of
from copy_cases import Case
from numpy.typing import NDArray
from tile_table import tile_table

THREADS = 256
WARPS = THREADS // 32
MOST_BLOCKS = 64
"""A persistent grid that is shorter than large plans, so warps take several tiles."""


def run_copy(
    kernel: ptxsim.Kernel, case: Case, destinations: list[Buffer]
) -> tuple[list[int], Counter[str]]:
    """Executes the plans into `destinations`: their digests, and the opcodes that were executed."""
    tiles = tile_table(case.blocks, case.sources, destinations)
    src_addresses, dst_addresses = addresses_of(case.sources), addresses_of(destinations)
    digests = np.zeros(len(destinations), np.uint64)
    tables = [tiles, src_addresses, dst_addresses, digests]
    arguments = struct.pack("<QqQQQ", _address(tiles), len(tiles), *map(_address, tables[1:]))
    blocks = max(1, min(MOST_BLOCKS, -(-len(tiles) // WARPS)))
    buffers = [*tables, *_memories(case.sources), *_memories(destinations)]
    opcodes = ptxsim.launch(kernel, blocks, THREADS, [arguments], buffers)
    return digests.tolist(), opcodes


def run_digest(kernel: ptxsim.Kernel, buffers: list[Buffer]) -> list[int]:
    """The digests of whole buffers."""
    sizes = np.array([len(buffer.memory) for buffer in buffers], np.int64)
    chunks = -(-sizes // 4096)
    table = np.stack([addresses_of(buffers).view(np.int64), sizes, np.cumsum(chunks) - chunks], 1)
    table = np.ascontiguousarray(table)
    digests = np.zeros(len(buffers), np.uint64)
    arguments = struct.pack(
        "<QqqQ", _address(table), len(buffers), int(chunks.sum()), _address(digests)
    )
    blocks = max(1, min(MOST_BLOCKS, -(-int(chunks.sum()) // WARPS)))
    ptxsim.launch(kernel, blocks, THREADS, [arguments], [table, digests, *_memories(buffers)])
    return digests.tolist()


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data


def _memories(buffers: list[Buffer]) -> list[NDArray[np.uint8]]:
    return [buffer.memory for buffer in buffers]
