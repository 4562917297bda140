"""Branches, barriers and exits: what decides where threads go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .errors import PtxError
from .lanes import Lanes
from .operands import Operands

if TYPE_CHECKING:
    from .machine import Machine

Control = Callable[["Machine", Lanes, int], None]
"""Moves the lanes that execute the instruction at a program counter."""


def build_control(operands: Operands) -> Control | None:
    """The decoded instruction; None if it does not steer threads."""
    opcode = operands.instruction.opcode
    if opcode in ("bra", "bra.uni"):
        operands.expect(1)
        return _branch(_target(operands, operands.text(0)))
    if opcode in ("brx.idx", "brx.idx.uni"):
        operands.expect(2)
        return _indexed_branch(operands)
    if opcode in ("ret", "exit"):
        return lambda machine, lanes, pc: None
    if opcode == "bar.sync":
        if operands.instruction.operands != ("0",):
            raise PtxError("only barrier 0, for all threads of the block, is modelled")
        return lambda machine, lanes, pc: machine.schedule.wait_at_barrier(pc, lanes)
    if opcode == "trap":
        return _trap
    return None


def _target(operands: Operands, label: str) -> int:
    if label not in operands.kernel.labels:
        raise PtxError(f"there is no label {label}")
    return operands.kernel.labels[label]


def _branch(target: int) -> Control:
    return lambda machine, lanes, pc: machine.schedule.add(target, lanes)


def _indexed_branch(operands: Operands) -> Control:
    table = operands.kernel.branch_tables.get(operands.text(1))
    if table is None:
        raise PtxError(f"there is no branch table {operands.text(1)}")
    targets = np.array([_target(operands, label) for label in table])
    index = operands.source(0, np.dtype("u4"))

    def control(machine: Machine, lanes: Lanes, pc: int) -> None:
        chosen = np.broadcast_to(index(machine, lanes), (len(lanes),))
        if (chosen >= len(targets)).any():
            raise PtxError(f"index {int(chosen.max())} of a branch table of {len(targets)}")
        goes_to = targets[chosen]
        for target in np.unique(goes_to).tolist():
            machine.schedule.add(target, lanes.where(goes_to == target))

    return control


def _trap(machine: Machine, lanes: Lanes, pc: int) -> None:
    raise PtxError("the kernel trapped")
