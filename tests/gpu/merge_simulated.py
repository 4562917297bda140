"""Runs merge programs on the PTX simulator."""

from __future__ import annotations

import struct
from collections import Counter

import numpy as np
import ptxsim
from block_reference import addresses_of
from merge_cases import Program
from merge_emulated import Launch
from merge_plan import strips
from merge_reference import Result
from numpy.typing import NDArray

from lora_refit.kernels import DTYPE_CODES
from lora_refit.kernels.records import MERGE_SUMS_DTYPE

THREADS = 256
SHARED_BYTES = 2 * 34816
"""merge_shared_bytes() of csrc/cuda/merge_shape.h, the same for all adapter dtypes."""


def run(kernel: ptxsim.Kernel, program: Program, launch: Launch) -> Result:
    """Merges in one launch. The simulator has one schedule: `launch.seed` is not used."""
    return counted_run(kernel, program, launch)[0]


def counted_run(
    kernel: ptxsim.Kernel, program: Program, launch: Launch
) -> tuple[Result, Counter[str]]:
    """`run`, and how often each opcode was executed, in threads."""
    destinations = program.fresh_destinations()
    digests = np.zeros(len(destinations), np.uint64)
    sums = np.zeros(program.modules, MERGE_SUMS_DTYPE)
    table = strips(program, launch.thread_blocks)
    inputs = [
        table,
        program.blocks,
        program.segments,
        *(
            np.array([DTYPE_CODES[buffer.tensor.dtype] for buffer in side], np.int32)
            for side in (program.sources, destinations)
        ),
        addresses_of(program.sources),
        addresses_of(destinations),
        digests,
        sums,
    ]
    pointers = [_address(array) for array in inputs]
    arguments = struct.pack("<Qq8Q", pointers[0], len(table), *pointers[1:])
    memories = [buffer.memory for buffer in (*program.sources, *destinations)]
    used = [array for array in (*inputs, *memories) if array.nbytes]
    opcodes = ptxsim.launch(kernel, launch.grid, THREADS, [arguments], used, SHARED_BYTES)
    return Result(destinations, digests.tolist(), sums), opcodes


def _address(array: NDArray[np.generic]) -> int:
    return array.ctypes.data
