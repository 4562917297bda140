"""Runs a kernel over a grid."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .execution import run
from .lanes import WARP
from .machine import Machine
from .parser import Kernel
from .program import decode

MAX_SHARED_BYTES = 227 * 1024


def launch(
    kernel: Kernel,
    grid: int,
    threads: int,
    args: list[bytes],
    buffers: list[NDArray[Any]],
    dynamic_shared: int = 0,
) -> Counter[str]:
    """Runs all threads to their end and writes the results into `buffers`.

    Args:
        grid, threads: blocks, and threads per block, a multiple of 32. One dimension.
        args: the bytes of each kernel parameter.
        buffers: all global memory that the kernel may touch, at the arrays' own addresses.
        dynamic_shared: bytes per block after the static shared memory.

    Returns:
        How often each opcode was executed, counted in threads.

    Raises:
        PtxError: see the package; `buffers` then hold what was stored so far.
    """
    program = decode(kernel)
    _check_shape(kernel, grid, threads, args)
    parameters = _parameter_bytes(kernel, args)
    shared_bytes = kernel.shared.size + dynamic_shared
    if shared_bytes > MAX_SHARED_BYTES:
        raise PtxError(f"{shared_bytes} bytes of shared memory, of at most {MAX_SHARED_BYTES}")
    machine = Machine(program, grid, threads, parameters, buffers, shared_bytes)
    try:
        with np.errstate(all="ignore"):
            executed = run(machine, program, kernel.name)
    finally:
        machine.memory.write_back()
    counts: Counter[str] = Counter()
    for step, count in zip(program.steps, executed, strict=True):
        counts[step.instruction.opcode] += count
    return +counts


def _check_shape(kernel: Kernel, grid: int, threads: int, args: list[bytes]) -> None:
    if grid < 1 or threads < 1 or threads % WARP:
        raise PtxError(f"a grid of {grid} blocks of {threads} threads is not modelled")
    if threads > kernel.max_threads:
        raise PtxError(f"{threads} threads in a block; the kernel allows {kernel.max_threads}")
    sizes = [len(argument) for argument in args]
    if sizes != kernel.parameter_sizes:
        raise PtxError(f"arguments of {sizes} bytes; the kernel takes {kernel.parameter_sizes}")


def _parameter_bytes(kernel: Kernel, args: list[bytes]) -> bytes:
    parameters = bytearray(kernel.parameters.size)
    for offset, argument in zip(kernel.parameters.offsets.values(), args, strict=True):
        parameters[offset : offset + len(argument)] = argument
    return bytes(parameters)
