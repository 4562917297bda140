"""Integer arithmetic, logic and comparison (PTX ISA, "Integer Arithmetic Instructions" and on)."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .lanes import Lanes, Values
from .opcodes import opcode
from .operands import PREDICATE, Execute, Operands, dtype_of, elementwise

if TYPE_CHECKING:
    from .machine import Machine

Match = re.Match[str]
U32, U64, S32 = np.dtype("u4"), np.dtype("u8"), np.dtype("i4")

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul.lo": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}


@opcode(r"(add|sub|mul\.lo|min|max)\.([us](?:16|32|64))|(and|or|xor)\.(b(?:16|32|64)|pred)")
def _binary(match: Match, operands: Operands) -> Execute:
    operands.expect(3)
    return elementwise(operands, dtype_of(match[2] or match[4]), BINARY[match[1] or match[3]])


@opcode(r"not\.(b16|b32|b64|pred)")
def _not(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    return elementwise(operands, dtype_of(match[1]), np.invert)


@opcode(r"(neg|abs)\.(s16|s32|s64)")
def _sign(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    return elementwise(operands, dtype_of(match[2]), np.negative if match[1] == "neg" else np.abs)


@opcode(r"mad\.lo\.([us](?:16|32|64))")
def _mad(match: Match, operands: Operands) -> Execute:
    operands.expect(4)
    return elementwise(operands, dtype_of(match[1]), lambda a, b, c: a * b + c)


@opcode(r"(mul|mad)\.wide\.([us])(16|32)")
def _wide(match: Match, operands: Operands) -> Execute:
    narrow = dtype_of(match[2] + match[3])
    wide = dtype_of(f"{match[2]}{2 * int(match[3])}")
    operands.expect(4 if match[1] == "mad" else 3)
    a, b = operands.source(1, narrow), operands.source(2, narrow)
    c = operands.source(3, wide) if match[1] == "mad" else None
    target = operands.target(0, wide)

    def execute(machine: Machine, lanes: Lanes) -> None:
        product = a(machine, lanes).astype(wide) * b(machine, lanes).astype(wide)
        target(machine, lanes, product if c is None else product + c(machine, lanes))

    return execute


@opcode(r"(mul|mad)\.hi\.([us](?:32|64))")
def _high(match: Match, operands: Operands) -> Execute:
    dtype = dtype_of(match[2])
    operands.expect(4 if match[1] == "mad" else 3)

    def high(a: Values, b: Values, *c: Values) -> Values:
        product = high_half(np.asarray(a), np.asarray(b))
        return product + c[0] if c else product

    return elementwise(operands, dtype, high)


def high_half(a: Values, b: Values) -> Values:
    """The upper half of the double-width product of two integers of one dtype."""
    if a.dtype.itemsize == 4:
        wide = np.dtype(f"{a.dtype.kind}8")
        return (a.astype(wide) * b.astype(wide) >> wide.type(32)).astype(a.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    ua, ub = a.view(U64), b.view(U64)
    a0, a1, b0, b1 = ua & low, ua >> half, ub & low, ub >> half
    middle = a1 * b0 + (a0 * b0 >> half)
    carry = (middle & low) + a0 * b1
    high = a1 * b1 + (middle >> half) + (carry >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, ub, np.uint64(0)) - np.where(b < 0, ua, np.uint64(0))
    return high.view(a.dtype)


@opcode(r"(div|rem)\.([us](?:16|32|64))")
def _divide(match: Match, operands: Operands) -> Execute:
    operands.expect(3)
    return elementwise(operands, dtype_of(match[2]), quotient if match[1] == "div" else remainder)


def quotient(a: Values, b: Values) -> Values:
    """Rounded towards zero."""
    a, b = np.asarray(a), np.asarray(b)
    if (b == 0).any():
        raise PtxError("integer division by zero")
    floor = a // b
    return floor + ((a % b != 0) & ((a < 0) != (b < 0)))


def remainder(a: Values, b: Values) -> Values:
    """With the sign of `a`."""
    return a - quotient(a, b) * b


@opcode(r"(shl|shr)\.([bus])(16|32|64)")
def _shift(match: Match, operands: Operands) -> Execute:
    """Shift amounts are 32-bit and saturate at the width."""
    operands.expect(3)
    width = int(match[3])
    dtype = dtype_of(match[2] + match[3])
    value, amount = operands.source(1, dtype), operands.source(2, U32)
    target = operands.target(0, dtype)
    shift = np.left_shift if match[1] == "shl" else np.right_shift
    fills_with_sign = match[1] == "shr" and match[2] == "s"

    def execute(machine: Machine, lanes: Lanes) -> None:
        bits, by = value(machine, lanes), amount(machine, lanes)
        within = np.minimum(by, width - 1).astype(dtype)
        shifted = shift(bits, within)
        if not fills_with_sign:
            shifted = np.where(by < width, shifted, dtype.type(0))
        target(machine, lanes, shifted)

    return execute


@opcode(r"shf\.([lr])\.(wrap|clamp)\.b32")
def _funnel_shift(match: Match, operands: Operands) -> Execute:
    """The 64 bits {b, a} shifted left or right: the upper or the lower word of the result."""
    operands.expect(4)

    def funnel(low: Values, high: Values, amount: Values) -> Values:
        by = amount & U32.type(31) if match[2] == "wrap" else np.minimum(amount, U32.type(32))
        both = np.asarray(high).astype(U64) << np.uint64(32) | np.asarray(low).astype(U64)
        by64 = np.asarray(by).astype(U64)
        if match[1] == "r":
            return (both >> by64).astype(U32)
        return (both << by64 >> np.uint64(32)).astype(U32)

    return elementwise(operands, U32, funnel)


@opcode(r"prmt\.b32")
def _permute(match: Match, operands: Operands) -> Execute:
    """Picks four of the eight bytes {b, a}; bit 3 of a selector replicates the byte's sign."""
    operands.expect(4)

    def permute(a: Values, b: Values, selector: Values) -> Values:
        both = np.asarray(b).astype(U64) << np.uint64(32) | np.asarray(a).astype(U64)
        result = np.zeros(np.broadcast(a, b, selector).shape, U64)
        for place in range(4):
            nibble = np.asarray(selector).astype(U64) >> np.uint64(4 * place) & np.uint64(15)
            byte = both >> ((nibble & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte & np.uint64(0x80), np.uint64(0xFF), np.uint64(0))
            byte = np.where(nibble & np.uint64(8), sign, byte)
            result |= byte << np.uint64(8 * place)
        return result.astype(U32)

    return elementwise(operands, U32, permute)


@opcode(r"lop3\.b32")
def _lop3(match: Match, operands: Operands) -> Execute:
    """Any function of three bits, given by its truth table."""
    operands.expect(5)
    table = int(operands.text(4), 0)
    a, b, c = (operands.source(i, U32) for i in (1, 2, 3))
    target = operands.target(0, U32)

    def execute(machine: Machine, lanes: Lanes) -> None:
        bits = [source(machine, lanes) for source in (a, b, c)]
        result = np.zeros(len(lanes), U32)
        for row in range(8):
            if table >> row & 1:
                chosen = [v if row >> (2 - i) & 1 else ~v for i, v in enumerate(bits)]
                result |= chosen[0] & chosen[1] & chosen[2]
        target(machine, lanes, result)

    return execute


@opcode(r"bfe\.([us])(32|64)")
def _extract_field(match: Match, operands: Operands) -> Execute:
    operands.expect(4)
    width = int(match[2])
    unsigned, signed = dtype_of(f"u{width}"), dtype_of(f"s{width}")
    value = operands.source(1, unsigned)
    position, length = operands.source(2, U32), operands.source(3, U32)
    target = operands.target(0, unsigned)

    def execute(machine: Machine, lanes: Lanes) -> None:
        first = position(machine, lanes) & U32.type(0xFF)
        count = length(machine, lanes) & U32.type(0xFF)
        if ((count == 0) | (first.astype(int) + count > width)).any():
            raise PtxError("bfe of no bits, or beyond the register, is not modelled")
        to_top = (width - first.astype(int) - count).astype(unsigned)
        down = (width - count.astype(int)).astype(unsigned)
        moved = value(machine, lanes) << to_top
        if match[1] == "s":
            field = (moved.view(signed) >> down.view(signed)).view(unsigned)
        else:
            field = moved >> down
        target(machine, lanes, field)

    return execute


@opcode(r"bfi\.b(32|64)")
def _insert_field(match: Match, operands: Operands) -> Execute:
    """Bits of the first source into the second, at a position, for a length."""
    operands.expect(5)
    width = int(match[1])
    dtype = dtype_of(f"u{width}")
    a, b = operands.source(1, dtype), operands.source(2, dtype)
    position, length = operands.source(3, U32), operands.source(4, U32)
    target = operands.target(0, dtype)

    def execute(machine: Machine, lanes: Lanes) -> None:
        first = (position(machine, lanes) & U32.type(0xFF)).astype(int)
        count = (length(machine, lanes) & U32.type(0xFF)).astype(int)
        if ((count == 0) | (first + count > width)).any():
            raise PtxError("bfi of no bits, or beyond the register, is not modelled")
        ones = dtype.type(2**width - 1) >> (width - count).astype(dtype)
        mask = ones << first.astype(dtype)
        inserted = (a(machine, lanes) << first.astype(dtype)) & mask
        target(machine, lanes, inserted | (b(machine, lanes) & ~mask))

    return execute


@opcode(r"(popc|clz)\.b(32|64)")
def _count_bits(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    width = int(match[2])
    value, target = operands.source(1, dtype_of(f"u{width}")), operands.target(0, U32)

    def execute(machine: Machine, lanes: Lanes) -> None:
        bits = np.asarray(value(machine, lanes))
        if match[1] == "clz":
            for step in (1, 2, 4, 8, 16, 32)[: 5 + (width == 64)]:
                bits = bits | bits >> bits.dtype.type(step)
            target(machine, lanes, U32.type(width) - np.bitwise_count(bits).astype(U32))
        else:
            target(machine, lanes, np.bitwise_count(bits).astype(U32))

    return execute


COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
}


def set_predicate(
    operands: Operands, dtype: np.dtype[Any], compare: Callable[[Any, Any], Any], combine: str
) -> Execute:
    """setp: `p` or `p|q` = the comparison and its opposite, each combined with a predicate."""
    operands.expect(4 if combine else 3)
    names = operands.text(0).split("|")
    targets = [operands.target_named(name.strip(), PREDICATE) for name in names]
    a, b = operands.source(1, dtype), operands.source(2, dtype)
    other = _predicate(operands, 3) if combine else None

    def execute(machine: Machine, lanes: Lanes) -> None:
        holds = compare(a(machine, lanes), b(machine, lanes))
        results = [holds, np.logical_not(holds)][: len(targets)]
        if other is not None:
            condition = other(machine, lanes)
            results = [COMBINE[combine](result, condition) for result in results]
        for target, result in zip(targets, results, strict=True):
            target(machine, lanes, result)

    return execute


def _predicate(operands: Operands, index: int) -> Callable[[Machine, Lanes], Values]:
    text = operands.text(index)
    if text.startswith("!"):
        plain = operands.source_named(text[1:], PREDICATE)
        return lambda machine, lanes: ~plain(machine, lanes)
    return operands.source_named(text, PREDICATE)


@opcode(r"setp\.(eq|ne|lt|le|gt|ge)(?:\.(and|or|xor))?\.([us](?:16|32|64)|b(?:16|32|64))")
def _setp(match: Match, operands: Operands) -> Execute:
    if match[3][0] == "b" and match[1] not in ("eq", "ne"):
        raise PtxError("bits have no order")
    return set_predicate(operands, dtype_of(match[3]), COMPARE[match[1]], match[2] or "")


@opcode(r"selp\.([busf](?:16|32|64))")
def _select(match: Match, operands: Operands) -> Execute:
    operands.expect(4)
    dtype = dtype_of(match[1])
    a, b = operands.source(1, dtype), operands.source(2, dtype)
    choice, target = operands.source(3, PREDICATE), operands.target(0, dtype)

    def execute(machine: Machine, lanes: Lanes) -> None:
        chosen = np.where(choice(machine, lanes), a(machine, lanes), b(machine, lanes))
        target(machine, lanes, chosen)

    return execute
