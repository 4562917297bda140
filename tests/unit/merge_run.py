"""Runs a merge program with the CPU kernel, of this build or of another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from block_reference import Buffer, addresses_of
from merge_cases import Program
from merge_reference import Result

from lora_refit import _C
from lora_refit.kernels import DTYPE_CODES
from lora_refit.kernels.records import MERGE_SUMS_DTYPE


def run(program: Program, threads: int = 1, make: Callable[..., Any] = _C.MergeProgram) -> Result:
    """Merges into fresh, poisoned destinations. Results hold garbage before."""
    destinations = program.fresh_destinations()
    digests = np.full(len(destinations), 99, np.uint64)
    sums = np.full(program.modules, 99, MERGE_SUMS_DTYPE)
    compiled = make(
        program.blocks.tobytes(),
        program.segments.tobytes(),
        *shapes(program.sources),
        *shapes(destinations),
        program.modules,
    )
    compiled.run(addresses_of(program.sources), addresses_of(destinations), digests, sums, threads)
    return Result(destinations, digests.tolist(), sums)


def shapes(buffers: list[Buffer]) -> tuple[list[int], list[int]]:
    """dtype codes and sizes in elements."""
    dtypes = [DTYPE_CODES[buffer.tensor.dtype] for buffer in buffers]
    return dtypes, [buffer.tensor.numel() for buffer in buffers]
