"""Runs a kernel over a grid."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .lanes import WARP, Lanes
from .machine import Machine
from .parser import Kernel
from .program import FULL_MASK, Program, Step, decode

MAX_SHARED_BYTES = 227 * 1024
_programs: dict[int, tuple[Kernel, Program]] = {}


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
    program = _program(kernel)
    _check_shape(kernel, grid, threads, args)
    parameters = _parameter_bytes(kernel, args)
    shared_bytes = kernel.shared.size + dynamic_shared
    if shared_bytes > MAX_SHARED_BYTES:
        raise PtxError(f"{shared_bytes} bytes of shared memory, of at most {MAX_SHARED_BYTES}")
    machine = Machine(program, grid, threads, parameters, buffers, shared_bytes)
    executed = [0] * len(program.steps)
    try:
        with np.errstate(all="ignore"):
            _run(machine, program, executed, kernel.name)
    finally:
        machine.memory.write_back()
    counts: Counter[str] = Counter()
    for step, count in zip(program.steps, executed, strict=True):
        counts[step.instruction.opcode] += count
    return +counts


def _program(kernel: Kernel) -> Program:
    """Decoded at the first launch of the kernel, which is kept so that its id stays its own."""
    if id(kernel) not in _programs:
        _programs[id(kernel)] = (kernel, decode(kernel))
    return _programs[id(kernel)][1]


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


def _run(machine: Machine, program: Program, executed: list[int], name: str) -> None:
    while True:
        turn = machine.schedule.take()
        if turn is not None:
            _run_straight(machine, program, executed, name, *turn)
            continue
        try:
            opened = machine.schedule.open_barriers()
        except PtxError as error:
            raise PtxError(f"{name}: {error}") from error
        if opened is None:
            return
        machine.shared.pass_barrier(opened)


def _run_straight(
    machine: Machine, program: Program, executed: list[int], name: str, pc: int, lanes: Lanes
) -> None:
    """Runs `lanes` from `pc` on, until they branch or meet others."""
    steps, schedule = program.steps, machine.schedule
    step = steps[pc]
    try:
        while len(lanes):
            step = steps[pc]
            if step.is_plain:
                executed[pc] += len(lanes)
                step.execute(machine, lanes)
            else:
                active, others = _active(machine, step, pc, lanes)
                executed[pc] += len(active)
                if len(active):
                    step.execute(machine, active)
                if step.control is not None:
                    schedule.add(pc + 1, others)
                    step.control(machine, active, pc)
                    return
                lanes = lanes if step.mask is None else active.joined(others)
            pc += 1
            if pc >= schedule.lowest:
                schedule.add(pc, lanes)
                return
    except PtxError as error:
        raise PtxError(f"{name}: `{step.instruction.text}`: {error}") from error


def _active(machine: Machine, step: Step, pc: int, lanes: Lanes) -> tuple[Lanes, Lanes]:
    """The lanes that execute the step now, and those whose guard forbids it."""
    if step.mask is not None:
        lanes = machine.schedule.with_waiting(pc, lanes)
    active, others = lanes, lanes.none()
    if step.guard is not None:
        holds = step.guard(machine, lanes)
        active, others = lanes.where(holds), lanes.where(~holds)
    if step.mask is not None and len(active):
        active = _met(machine, step, pc, active)
    return active, others


def _met(machine: Machine, step: Step, pc: int, lanes: Lanes) -> Lanes:
    """Those whose warp is there as the mask says; the others wait."""
    assert step.mask is not None
    masks = step.mask(machine, lanes)
    if lanes.warps is not None and (masks == FULL_MASK).all():
        return lanes
    masks = np.broadcast_to(masks, (len(lanes),))
    own_bit = np.uint32(1) << (lanes.threads % WARP).astype(np.uint32)
    if ((masks & own_bit) == 0).any():
        raise PtxError("a lane executes a warp collective whose mask does not name it")
    present = lanes.active_masks
    if (present & ~masks).any():
        raise PtxError("lanes with different masks at one warp collective are not modelled")
    complete = masks == present
    machine.schedule.wait_for_warp(pc, lanes.where(~complete))
    return lanes.where(complete)
