"""A kernel decoded: one step per instruction, and how each may be run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from . import convert_ops, float_ops, integer_ops, memory_ops, opcodes, warp_ops
from .control import Control, build_control
from .errors import PtxError
from .operands import PREDICATE, Execute, Operands, RegisterTable, Source
from .parser import Instruction, Kernel

if TYPE_CHECKING:
    from .lanes import Lanes
    from .machine import Machine

MODELLED_BY = (convert_ops, float_ops, integer_ops, memory_ops, warp_ops)
"""Modules that fill the opcode table when they are imported."""

FULL_MASK = np.uint32(0xFFFFFFFF)
WITH_MASK = re.compile(r"(shfl|vote)\.sync\..*|bar\.warp\.sync")
ALIGNED = re.compile(r"(ldmatrix|mma)\.sync\.aligned\..*|bar\.sync")


@dataclass(frozen=True)
class Step:
    """One instruction: `execute` changes registers and memory, `control` moves the lanes."""

    instruction: Instruction
    guard: Source | None
    execute: Execute
    control: Control | None
    mask: Source | None
    """The lanes that must execute it together, as bits; None if each goes for itself."""
    is_plain: bool
    """Whether all lanes that reach it execute it and go on to the next."""


@dataclass(frozen=True)
class Program:
    steps: list[Step]
    registers: RegisterTable
    global_granule: int
    shared_granule: int


@lru_cache(maxsize=16)
def decode(kernel: Kernel) -> Program:
    """All instructions, at the first launch of a kernel.

    Raises:
        PtxError: an instruction is not modelled in the form that it has.
    """
    registers = RegisterTable(kernel)
    steps = []
    for instruction in kernel.instructions:
        try:
            steps.append(_step(instruction, registers))
        except PtxError as error:
            raise PtxError(f"{kernel.name}: `{instruction.text}`: {error}") from error
    _refuse_open_contraction(kernel)
    if not steps or steps[-1].guard is not None or steps[-1].control is None:
        raise PtxError(f"{kernel.name}: threads may run past its end")
    return Program(steps, registers, _global_granule(kernel), _shared_granule(kernel))


def _step(instruction: Instruction, registers: RegisterTable) -> Step:
    operands = Operands(instruction, registers)
    guard = None
    if instruction.guard is not None:
        guard = _guard(operands, instruction.guard, instruction.guard_negated)
    control = build_control(operands)
    execute = _nothing if control else opcodes.build(operands)
    mask = _mask(operands)
    is_plain = guard is None and control is None and mask is None
    return Step(instruction, guard, execute, control, mask, is_plain)


def _nothing(machine: Machine, lanes: Lanes) -> None:
    """What a branch does to registers and memory."""


def _guard(operands: Operands, name: str, negated: bool) -> Source:
    plain = operands.source_named(name, PREDICATE)
    return (lambda machine, lanes: ~plain(machine, lanes)) if negated else plain


def _mask(operands: Operands) -> Source | None:
    opcode = operands.instruction.opcode
    if ALIGNED.fullmatch(opcode):
        return lambda machine, lanes: FULL_MASK
    if WITH_MASK.fullmatch(opcode):
        return operands.source(len(operands) - 1, np.dtype("u4"))
    return None


MEMORY_ACCESS = re.compile(r"(ld|st|atom|red)(?:\..*?)?(?:\.(v2|v4))?\.[busf](8|16|32|64)")
LOAD_PARAMETER = re.compile(r"ld(\.weak|\.volatile)?\.param\..*")


def _access_size(instruction: Instruction) -> int:
    """Bytes that one lane moves at once; 16 for instructions that are not smaller anywhere."""
    opcode = instruction.opcode
    if access := MEMORY_ACCESS.fullmatch(opcode):
        return int((access[2] or "v1")[1:]) * int(access[3]) // 8
    if opcode.startswith("cp.async.ca."):
        return int(instruction.operands[2])
    return 16


def _global_granule(kernel: Kernel) -> int:
    """Size in bytes of the smallest store to global memory: what ownership is kept for."""
    return min(
        (
            _access_size(instruction)
            for instruction in kernel.instructions
            if instruction.opcode.startswith(("st.", "atom.", "red."))
            and ".shared" not in instruction.opcode
        ),
        default=16,
    )


def _shared_granule(kernel: Kernel) -> int:
    """Size in bytes of the smallest access to shared memory: what the race check is kept for."""
    return min(
        (
            _access_size(instruction)
            for instruction in kernel.instructions
            if ".global" not in instruction.opcode.replace(".shared.global", "")
            and not LOAD_PARAMETER.fullmatch(instruction.opcode)
        ),
        default=16,
    )


def _refuse_open_contraction(kernel: Kernel) -> None:
    """ptxas may fuse a product into a sum where neither says `.rn`: its result is not defined."""
    products = {
        instruction.operands[0]
        for instruction in kernel.instructions
        if re.fullmatch(r"mul\.(f32|f64)", instruction.opcode)
    }
    for instruction in kernel.instructions:
        is_sum = re.fullmatch(r"(add|sub)\.(f32|f64)", instruction.opcode)
        if is_sum and products.intersection(instruction.operands[1:]):
            raise PtxError(
                f"{kernel.name}: `{instruction.text}`: ptxas may fuse the product into this sum; "
                "write __fmul_rn or __fmaf_rn"
            )
