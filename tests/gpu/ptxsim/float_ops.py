"""fp32 and fp64 arithmetic, rounded to nearest even exactly once, subnormals kept.

A NaN result is the canonical NaN, whatever the operands' payloads are (PTX ISA, "Floating Point
Instructions"). `.ftz`, `.sat` and `.approx` forms are not modelled.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from .integer_ops import COMPARE, set_predicate
from .lanes import Values
from .opcodes import opcode
from .operands import Execute, Operands, dtype_of, elementwise

Match = re.Match[str]
F32, F64 = np.dtype("f4"), np.dtype("f8")
CANONICAL_NAN = {
    F32: np.array(0x7FFFFFFF, "u4").view(F32)[()],
    F64: np.array(0x7FFFFFFFFFFFFFFF, "u8").view(F64)[()],
}


def canonical(values: Values) -> Values:
    values = np.asarray(values)
    return np.where(np.isnan(values), CANONICAL_NAN[values.dtype], values)


ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
}


@opcode(r"(add|sub|mul)(?:\.rn)?\.(f32|f64)|(div)\.rn\.(f32|f64)")
def _arithmetic(match: Match, operands: Operands) -> Execute:
    operands.expect(3)
    function = ARITHMETIC[match[1] or match[3]]
    return elementwise(
        operands, dtype_of(match[2] or match[4]), lambda a, b: canonical(function(a, b))
    )


@opcode(r"sqrt\.rn\.(f32|f64)")
def _square_root(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    return elementwise(operands, dtype_of(match[1]), lambda a: canonical(np.sqrt(a)))


@opcode(r"fma\.rn\.(f32|f64)")
def _fma(match: Match, operands: Operands) -> Execute:
    operands.expect(4)
    return elementwise(operands, dtype_of(match[1]), fma32 if match[1] == "f32" else fma64)


def fma32(a: Values, b: Values, c: Values) -> Values:
    """round(a * b + c) for fp32.

    The product of two fp32 is exact in fp64. Their sum with c is rounded to odd there, which keeps
    enough to round correctly to fp32 afterwards.
    """
    product = np.multiply(a, b, dtype=F64)
    addend = np.asarray(c, F64)
    total = product + addend
    error = _sum_error(product, addend, total)
    is_even = (np.asarray(total).view("u8") & np.uint64(1)) == 0
    inexact = np.isfinite(total) & (error != 0) & is_even
    odd = np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)
    return canonical(odd.astype(F32))


def _sum_error(a: Values, b: Values, total: Values) -> Values:
    """a + b - total, exactly (Knuth's TwoSum); of no meaning where it is not finite."""
    b_part = total - a
    return (a - (total - b_part)) + (b - b_part)


def fma64(a: Values, b: Values, c: Values) -> Values:
    """round(a * b + c) for fp64; in rationals where the product alone would be rounded."""
    a, b, c = (np.asarray(v, F64) for v in np.broadcast_arrays(a, b, c))
    product = a * b
    result = np.asarray(product + c)
    for index in np.flatnonzero(_may_be_rounded(a, b, product)):
        result.flat[index] = _exact_fma(a.flat[index], b.flat[index], c.flat[index])
    return canonical(result)


def _may_be_rounded(a: Values, b: Values, product: Values) -> Values:
    """Whether a product of finite factors may not be exact: too many bits, or out of range."""
    low_bits = np.uint64((1 << 27) - 1)
    many_bits = ((a.copy().view("u8") | b.copy().view("u8")) & low_bits) != 0
    out_of_range = np.isinf(product) | (np.abs(product) < 1e-280)
    is_finite = np.isfinite(a) & np.isfinite(b)
    return (many_bits | out_of_range) & is_finite & (a != 0) & (b != 0)


def _exact_fma(a: float, b: float, c: float) -> float:
    if not np.isfinite(c):
        return float(c)
    total = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
    if total == 0:
        return 0.0
    try:
        return total.numerator / total.denominator
    except OverflowError:
        return float("inf") if total > 0 else float("-inf")


@opcode(r"(neg|abs)\.(f32|f64)")
def _sign(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    function = np.negative if match[1] == "neg" else np.abs
    return elementwise(operands, dtype_of(match[2]), function)


@opcode(r"(min|max)\.(f32|f64)")
def _extreme(match: Match, operands: Operands) -> Execute:
    """The other operand where one is NaN; -0 is less than +0."""
    operands.expect(3)
    wants_less = match[1] == "min"

    def extreme(a: Values, b: Values) -> Values:
        first_is_less = (a < b) | ((a == b) & np.signbit(a))
        chosen = np.where(first_is_less == wants_less, a, b)
        return canonical(np.where(np.isnan(a), b, np.where(np.isnan(b), a, chosen)))

    return elementwise(operands, dtype_of(match[2]), extreme)


def _ordered(comparison: str) -> Callable[[Any, Any], Any]:
    """Where one operand is NaN the plain comparisons fail and those that end in `u` hold."""
    if comparison == "num":
        return lambda a, b: ~(np.isnan(a) | np.isnan(b))
    if comparison == "nan":
        return lambda a, b: np.isnan(a) | np.isnan(b)
    compare = COMPARE[comparison.removesuffix("u")]
    if comparison.endswith("u"):
        return lambda a, b: compare(a, b) | np.isnan(a) | np.isnan(b)
    return lambda a, b: compare(a, b) & ~(np.isnan(a) | np.isnan(b))


@opcode(r"setp\.((?:eq|ne|lt|le|gt|ge)u?|num|nan)(?:\.(and|or|xor))?\.(f32|f64)")
def _setp(match: Match, operands: Operands) -> Execute:
    return set_predicate(operands, dtype_of(match[3]), _ordered(match[1]), match[2] or "")
