"""The loop of a launch: takes threads that are at one instruction and executes it."""

from __future__ import annotations

import numpy as np

from .errors import PtxError
from .lanes import WARP, Lanes
from .machine import Machine
from .program import FULL_MASK, Program, Step


def run(machine: Machine, program: Program, name: str) -> list[int]:
    """Runs all threads to their end. Returns how many threads executed each step."""
    executed = [0] * len(program.steps)
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
            return executed
        machine.shared.pass_barrier(opened)


def _run_straight(
    machine: Machine, program: Program, executed: list[int], name: str, pc: int, lanes: Lanes
) -> None:
    """Runs `lanes` from `pc` on, until they branch or meet others."""
    steps, schedule = program.steps, machine.schedule
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
                    if len(active):
                        step.control(machine, active, pc)
                    return
                lanes = lanes if step.mask is None else active.joined(others)
            pc += 1
            if pc >= schedule.lowest:
                schedule.add(pc, lanes)
                return
    except PtxError as error:
        raise PtxError(f"{name}: `{steps[pc].instruction.text}`: {error}") from error


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
