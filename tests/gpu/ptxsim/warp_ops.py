"""Instructions that the lanes of a warp execute together: shuffles, votes, ldmatrix, mma."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from . import fragments
from .convert_ops import TO_F32
from .errors import PtxError
from .float_ops import F32, canonical
from .fragments import FragmentMap
from .lanes import WARP, Lanes, Values
from .opcodes import opcode
from .operands import PREDICATE, Execute, Operands, Source

if TYPE_CHECKING:
    from .machine import Machine

Match = re.Match[str]
U16, U32 = np.dtype("u2"), np.dtype("u4")


@opcode(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
def _shuffle(match: Match, operands: Operands) -> Execute:
    """The ISA's own pseudocode for the source lane; `c` packs the clamp and the segment mask."""
    operands.expect(5)
    names = operands.text(0).split("|")
    target = operands.target_named(names[0], U32)
    in_range = operands.target_named(names[1], PREDICATE) if len(names) == 2 else None
    value, amount, packed = (operands.source(i, U32) for i in (1, 2, 3))
    mode = match[1]

    def execute(machine: Machine, lanes: Lanes) -> None:
        lane = (lanes.threads % WARP).astype(int)
        by = np.asarray(amount(machine, lanes)).astype(int) & 31
        clamp = np.asarray(packed(machine, lanes)).astype(int)
        segment = clamp >> 8 & 31
        first = lane & segment
        last = first | (clamp & 31 & ~segment)
        if mode == "up":
            source = lane - by
            valid = source >= last
        else:
            source = {"down": lane + by, "bfly": lane ^ by, "idx": first | (by & ~segment)}[mode]
            valid = source <= last
        source = np.where(valid, source, lane)
        values = np.broadcast_to(value(machine, lanes), (len(lanes),))
        target(machine, lanes, values[_positions(lanes, lanes.threads - lane + source)])
        if in_range is not None:
            in_range(machine, lanes, valid)

    return execute


def _positions(lanes: Lanes, threads: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where threads stand among these lanes."""
    if lanes.warps is not None:
        return np.arange(len(lanes)) // WARP * WARP + threads % WARP
    position = np.searchsorted(lanes.threads, threads)
    inside = np.minimum(position, len(lanes) - 1)
    if (lanes.threads[inside] != threads).any():
        raise PtxError("a shuffle from a lane that does not take part")
    return inside


@opcode(r"bar\.warp\.sync")
def _warp_barrier(match: Match, operands: Operands) -> Execute:
    """The schedule has made the lanes of the mask meet. Whole warps also order their memory."""
    operands.expect(1)

    def execute(machine: Machine, lanes: Lanes) -> None:
        if lanes.warps is not None:
            machine.shared.pass_warp_barrier(lanes.warps)

    return execute


@opcode(r"vote\.sync\.(any|all|ballot)\.(pred|b32)")
def _vote(match: Match, operands: Operands) -> Execute:
    operands.expect(3)
    mode = match[1]
    if (mode == "ballot") != (match[2] == "b32"):
        raise PtxError(f"{match[0]} does not exist")
    condition = operands.source(1, PREDICATE)
    target = operands.target(0, U32 if mode == "ballot" else PREDICATE)

    def execute(machine: Machine, lanes: Lanes) -> None:
        holds = np.broadcast_to(condition(machine, lanes), (len(lanes),))
        table = np.zeros(lanes.launch_threads, bool)
        table[lanes.threads[holds]] = True
        bits = np.packbits(table.reshape(-1, WARP), axis=1, bitorder="little").view("<u4")
        ballot = bits.reshape(-1)[lanes.threads // WARP]
        results = {"ballot": ballot, "any": ballot != 0, "all": ballot == lanes.active_masks}
        target(machine, lanes, results[mode])

    return execute


@opcode(r"ldmatrix\.sync\.aligned\.m8n8\.x(1|2|4)(\.trans)?\.shared(?:::cta)?\.b16")
def _load_matrices(match: Match, operands: Operands) -> Execute:
    """Lane 8 * m + r gives the address of row r of matrix m."""
    operands.expect(2)
    count = int(match[1])
    names = operands.vector(0)
    if len(names) != count:
        raise PtxError(f"{len(names)} registers for {count} matrices")
    targets = [operands.target_named(name, U32) for name in names]
    address = operands.address(1)
    where = fragments.ldmatrix_map(count, transposed=bool(match[2]))

    def execute(machine: Machine, lanes: Lanes) -> None:
        rows = 8 * count
        used = lanes.threads.reshape(-1, WARP)[:, :rows].reshape(-1)
        addresses = address(machine, lanes).reshape(-1, WARP)[:, :rows].reshape(-1)
        data = machine.shared.load(Lanes(used, lanes.launch_threads), addresses, 16)
        elements = data.view(U16).reshape(-1, rows, 8)[:, where.rows, where.columns]
        words = np.ascontiguousarray(elements).view(U32).reshape(-1, count)
        for register, target in enumerate(targets):
            target(machine, lanes, words[:, register])

    return execute


@opcode(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32")
def _mma_16_bit(match: Match, operands: Operands) -> Execute:
    if match[1] != match[2]:
        raise PtxError("A and B of one mma have one dtype")
    return _mma(operands, fragments.A_16X16, fragments.B_16X8, _halves(TO_F32[match[1]]))


@opcode(r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32")
def _mma_tf32(match: Match, operands: Operands) -> Execute:
    return _mma(operands, fragments.A_TF32, fragments.B_TF32, _tf32)


Decode = Callable[[Values], Values]
"""Registers `u32[warp, lane, register]` to elements `[warp, lane, element]`."""


def _halves(widen: Callable[[Values], Values]) -> Decode:
    return lambda words: widen(np.ascontiguousarray(words).view(U16))


def _tf32(words: Values) -> Values:
    if (words & U32.type(0x1FFF)).any():
        raise PtxError("an operand of a tf32 mma was not rounded by cvt.rna.tf32")
    return np.ascontiguousarray(words).view(F32)


def _mma(operands: Operands, a_map: FragmentMap, b_map: FragmentMap, decode: Decode) -> Execute:
    """D = A * B + C, each element summed in fp64 and rounded once to fp32."""
    operands.expect(4)
    read_a = _fragment(operands, 1, a_map)
    read_b = _fragment(operands, 2, b_map)
    read_c = _fragment(operands, 3, fragments.ACCUMULATOR)
    targets = [operands.target_named(name, F32) for name in operands.vector(0)]

    def execute(machine: Machine, lanes: Lanes) -> None:
        a = _matrix(decode(read_a(machine, lanes)), a_map).astype(np.float64)
        b = _matrix(decode(read_b(machine, lanes)), b_map).astype(np.float64)
        where = fragments.ACCUMULATOR
        sums = np.matmul(a, b)[:, where.rows, where.columns] + read_c(machine, lanes).view(F32)
        rounded = canonical(sums.astype(F32)).reshape(len(lanes), -1)
        for register, target in enumerate(targets):
            target(machine, lanes, rounded[:, register])

    return execute


def _fragment(operands: Operands, index: int, where: FragmentMap) -> Source:
    names = operands.vector(index)
    if len(names) != where.registers:
        raise PtxError(f"{len(names)} registers where the fragment has {where.registers}")
    sources = [operands.source_named(name, U32) for name in names]

    def read(machine: Machine, lanes: Lanes) -> Values:
        words = np.empty((len(lanes), len(sources)), U32)
        for register, source in enumerate(sources):
            words[:, register] = source(machine, lanes)
        return words.reshape(-1, WARP, len(sources))

    return read


def _matrix(elements: Values, where: FragmentMap) -> Values:
    """`[warp, lane, element]` to `[warp, row, column]`."""
    matrix = np.empty((len(elements), *where.shape), elements.dtype)
    matrix[:, where.rows, where.columns] = elements
    return matrix
