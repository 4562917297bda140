"""Rounding of rationals to floating-point formats, from the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Format:
    fraction_bits: int
    min_exponent: int  # of the smallest normal number
    max_exponent: int


F64 = Format(52, -1022, 1023)
F32 = Format(23, -126, 127)
BF16 = Format(7, -126, 127)
F16 = Format(10, -14, 15)
TF32 = Format(10, -126, 127)


def rounded(value: Fraction, to: Format, ties_away: bool = False) -> float:
    """The nearest number of the format; halfway to the even one, or to the larger magnitude."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(_exponent(magnitude), to.min_exponent)
    unit = Fraction(2) ** (exponent - to.fraction_bits)
    units = magnitude / unit
    whole = math.floor(units)
    rest = units - whole
    if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and (ties_away or whole % 2)):
        whole += 1
    result = whole * unit
    if result >= Fraction(2) ** (to.max_exponent + 1):
        return math.inf if value > 0 else -math.inf
    return float(result) if value > 0 else -float(result)


def _exponent(magnitude: Fraction) -> int:
    """The e with 2^e <= magnitude < 2^(e + 1)."""
    estimate = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return estimate if Fraction(2) ** estimate <= magnitude else estimate - 1
