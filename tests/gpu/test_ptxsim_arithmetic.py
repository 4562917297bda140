"""The PTX simulator's arithmetic against Python's integers and rationals, on random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import exact_floats
import numpy as np
import pytest
from exact_floats import Format, rounded
from numpy.typing import NDArray
from ptx_snippets import evaluate

COUNT = 2000


def random_integers(dtype: str, seed: int) -> NDArray[Any]:
    """Of every magnitude, with the limits of the type."""
    rng = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    values = rng.integers(limits.min, limits.max, COUNT, dtype, endpoint=True)
    values >>= rng.integers(0, limits.bits, COUNT).astype(dtype)
    values[:6] = [limits.min, limits.max, 0, 1, limits.max // 2, limits.min + 1]
    return rng.permutation(values)


def truncated(quotient: Fraction) -> int:
    return math.trunc(quotient)


def bits(value: int, width: int) -> int:
    return value % (1 << width)


def prmt(a: int, b: int, selector: int) -> int:
    source = (bits(b, 32) << 32 | bits(a, 32)).to_bytes(8, "little")
    result = []
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        result.append((0xFF if byte & 0x80 else 0) if nibble & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def lop3(table: int) -> Callable[[int, int, int], int]:
    def function(a: int, b: int, c: int) -> int:
        picks = ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1) for i in range(32))
        return sum((table >> pick & 1) << i for i, pick in enumerate(picks))

    return function


INTEGER_OPS: dict[str, tuple[str, str, Callable[..., int]]] = {
    # instruction: result dtype, input dtypes, meaning modulo the result's width
    "add.s64 {0}, {1}, {2};": ("i8", "i8 i8", lambda a, b: a + b),
    "sub.u32 {0}, {1}, {2};": ("u4", "u4 u4", lambda a, b: a - b),
    "mul.lo.s32 {0}, {1}, {2};": ("i4", "i4 i4", lambda a, b: a * b),
    "mul.lo.s64 {0}, {1}, {2};": ("i8", "i8 i8", lambda a, b: a * b),
    "mul.hi.u32 {0}, {1}, {2};": ("u4", "u4 u4", lambda a, b: a * b >> 32),
    "mul.hi.s32 {0}, {1}, {2};": ("i4", "i4 i4", lambda a, b: a * b >> 32),
    "mul.hi.u64 {0}, {1}, {2};": ("u8", "u8 u8", lambda a, b: a * b >> 64),
    "mul.hi.s64 {0}, {1}, {2};": ("i8", "i8 i8", lambda a, b: a * b >> 64),
    "mul.wide.u16 {0}, {1}, {2};": ("u4", "u2 u2", lambda a, b: a * b),
    "mul.wide.s32 {0}, {1}, {2};": ("i8", "i4 i4", lambda a, b: a * b),
    "mul.wide.u32 {0}, {1}, {2};": ("u8", "u4 u4", lambda a, b: a * b),
    "mad.lo.s32 {0}, {1}, {2}, {3};": ("i4", "i4 i4 i4", lambda a, b, c: a * b + c),
    "mad.wide.s32 {0}, {1}, {2}, {3};": ("i8", "i4 i4 i8", lambda a, b, c: a * b + c),
    "mad.wide.u32 {0}, {1}, {2}, {3};": ("u8", "u4 u4 u8", lambda a, b, c: a * b + c),
    "mad.hi.u32 {0}, {1}, {2}, {3};": ("u4", "u4 u4 u4", lambda a, b, c: (a * b >> 32) + c),
    "or.b32 %r9, {2}, 1; div.s32 {0}, {1}, %r9;": (
        "i4", "i4 i4", lambda a, b: truncated(Fraction(a, b | 1)),
    ),
    "or.b64 %d9, {2}, 1; div.u64 {0}, {1}, %d9;": ("u8", "u8 u8", lambda a, b: a // (b | 1)),
    "or.b64 %d9, {2}, 1; rem.s64 {0}, {1}, %d9;": (
        "i8", "i8 i8", lambda a, b: a - truncated(Fraction(a, b | 1)) * (b | 1),
    ),
    "min.s32 {0}, {1}, {2};": ("i4", "i4 i4", min),
    "max.u64 {0}, {1}, {2};": ("u8", "u8 u8", max),
    "neg.s32 {0}, {1};": ("i4", "i4", lambda a: -a),
    "not.b64 {0}, {1};": ("u8", "u8", lambda a: ~a),
    "xor.b16 {0}, {1}, {2};": ("u2", "u2 u2", lambda a, b: a ^ b),
    "and.b32 %r9, {2}, 127; shl.b32 {0}, {1}, %r9;": ("u4", "u4 u4", lambda a, b: a << (b & 127)),
    "and.b32 %r9, {2}, 127; shr.s64 {0}, {1}, %r9;": ("i8", "i8 u4", lambda a, b: a >> (b & 127)),
    "and.b32 %r9, {2}, 127; shr.u32 {0}, {1}, %r9;": ("u4", "u4 u4", lambda a, b: a >> (b & 127)),
    "shf.l.wrap.b32 {0}, {1}, {2}, {3};": (
        "u4", "u4 u4 u4", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32,
    ),
    "shf.r.clamp.b32 {0}, {1}, {2}, {3};": (
        "u4", "u4 u4 u4", lambda a, b, c: (b << 32 | a) >> min(c, 32),
    ),
    "prmt.b32 {0}, {1}, {2}, {3};": ("u4", "u4 u4 u4", prmt),
    "prmt.b32 {0}, {1}, {2}, 4180;": ("u4", "u4 u4", lambda a, b: prmt(a, b, 0x1054)),
    "lop3.b32 {0}, {1}, {2}, {3}, 0xE8;": ("u4", "u4 u4 u4", lop3(0xE8)),
    "lop3.b32 {0}, {1}, {2}, {3}, 0x1D;": ("u4", "u4 u4 u4", lop3(0x1D)),
    "bfe.u32 {0}, {1}, 5, 9;": ("u4", "u4", lambda a: a >> 5 & 511),
    "bfe.s64 {0}, {1}, 60, 4;": ("i8", "u8", lambda a: (a >> 60) - (16 if a >> 63 else 0)),
    "bfi.b32 {0}, {1}, {2}, 8, 16;": (
        "u4", "u4 u4", lambda a, b: b & ~0xFFFF00 | (a & 0xFFFF) << 8,
    ),
    "popc.b64 {0}, {1};": ("u4", "u8", lambda a: a.bit_count()),
    "clz.b32 {0}, {1};": ("u4", "u4", lambda a: 32 - a.bit_length()),
    "cvt.s64.s32 {0}, {1};": ("i8", "i4", lambda a: a),
    "cvt.u64.u32 {0}, {1};": ("u8", "u4", lambda a: a),
    "cvt.s32.s8 {0}, {1};": ("i4", "u4", lambda a: bits(a + 128, 8) - 128),
    "cvt.u16.u64 {0}, {1};": ("u2", "u8", lambda a: a),
    "cvt.u32.u16 {0}, {1};": ("u4", "u2", lambda a: a),
    "mov.b64 {0}, {{{1}, {2}}};": ("u8", "u4 u4", lambda a, b: b << 32 | a),
    "mov.b64 {{%r9, {0}}}, {1};": ("u4", "u8", lambda a: a >> 32),
    "setp.lt.s32 %p1, {1}, {2}; selp.b32 {0}, 7, 9, %p1;": (
        "u4", "i4 i4", lambda a, b: 7 if a < b else 9,
    ),
    "setp.ge.u64 %p1, {1}, {2}; selp.b32 {0}, 7, 9, %p1;": (
        "u4", "u8 u8", lambda a, b: 7 if a >= b else 9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("instruction", INTEGER_OPS)
def test_integer_instruction(instruction: str) -> None:
    result, input_dtypes, meaning = INTEGER_OPS[instruction]
    inputs = [random_integers(dtype, seed) for seed, dtype in enumerate(input_dtypes.split())]
    got = evaluate(instruction, np.dtype(result), inputs)
    width = got.itemsize * 8
    expected = [
        bits(meaning(*row), width) for row in zip(*(i.tolist() for i in inputs), strict=True)
    ]
    assert [bits(value, width) for value in got.tolist()] == expected


def random_floats(dtype: str, seed: int, spread: int) -> NDArray[Any]:
    """Signs, zeros, subnormals, infinities, NaNs, and exponents near one another."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(COUNT) * 2.0 ** rng.integers(-spread, spread, COUNT)
    values = values.astype(dtype)
    tiny = np.finfo(dtype).smallest_subnormal
    special = [0.0, -0.0, tiny, -3 * tiny, np.finfo(dtype).tiny, np.inf, -np.inf, np.nan, 1.0]
    special += [np.finfo(dtype).max, -np.finfo(dtype).max]
    picked = rng.choice(np.array(special, dtype), COUNT)
    return np.where(rng.random(COUNT) < 0.1, picked, values)


def near_ties(seed: int) -> list[NDArray[Any]]:
    """fp32 a * b + c just below the middle of two numbers, but on it once rounded to fp64."""
    rng = np.random.default_rng(seed)
    step = rng.integers(1, 200, COUNT) * 2.0**-23
    a = (1 + step).astype("f4")
    b = (2.0**-24 * (1 - step)).astype("f4")
    c = (1 + rng.integers(0, 1 << 23, COUNT) / 2**23).astype("f4")
    sign = rng.choice(np.array([-1, 1], "f4"), COUNT)
    return [a, b * sign, c * sign]


def exact(meaning: Callable[..., Fraction], to: Format, inputs: tuple[float, ...]) -> float | None:
    """The correctly rounded result of finite inputs; None where it is up to special rules."""
    if not all(math.isfinite(value) for value in inputs):
        return None
    value = meaning(*(Fraction(value) for value in inputs))
    return rounded(value, to) if value else None


FLOAT_OPS: dict[str, tuple[str, int, Callable[..., Fraction]]] = {
    # instruction: dtype, number of inputs, meaning
    "add.f32 {0}, {1}, {2};": ("f4", 2, lambda a, b: a + b),
    "sub.rn.f32 {0}, {1}, {2};": ("f4", 2, lambda a, b: a - b),
    "mul.rn.f32 {0}, {1}, {2};": ("f4", 2, lambda a, b: a * b),
    "fma.rn.f32 {0}, {1}, {2}, {3};": ("f4", 3, lambda a, b, c: a * b + c),
    "add.rn.f64 {0}, {1}, {2};": ("f8", 2, lambda a, b: a + b),
    "mul.f64 {0}, {1}, {2};": ("f8", 2, lambda a, b: a * b),
    "fma.rn.f64 {0}, {1}, {2}, {3};": ("f8", 3, lambda a, b, c: a * b + c),
}


@pytest.mark.parametrize("spread", [8, 70])
@pytest.mark.parametrize("instruction", FLOAT_OPS)
def test_float_instruction(instruction: str, spread: int) -> None:
    """Finite results are the exact ones, rounded once; the others as IEEE 754 says."""
    dtype, count, meaning = FLOAT_OPS[instruction]
    inputs = [random_floats(dtype, seed, spread) for seed in range(count)]
    if instruction.startswith("fma.rn.f32"):
        inputs = [np.concatenate(p) for p in zip(inputs, near_ties(spread), strict=True)]
    storage = [values.view(f"u{values.itemsize}") for values in inputs]
    got = evaluate(instruction, storage[0].dtype, storage).view(dtype)
    to = exact_floats.F32 if dtype == "f4" else exact_floats.F64
    with np.errstate(all="ignore"):
        ieee = _ieee(instruction, *inputs)
    for index, row in enumerate(zip(*(v.tolist() for v in inputs), strict=True)):
        expected = exact(meaning, to, row)
        if expected is None:
            expected = float(ieee[index])
        assert got[index] == expected or (math.isnan(got[index]) and math.isnan(expected)), row
        assert math.isnan(expected) or math.copysign(1, got[index]) == math.copysign(1, expected)


def test_rounding_twice_would_be_caught() -> None:
    """The control of the fma test: its inputs tell a fused rounding from one through fp64."""
    a, b, c = near_ties(8)
    twice = (a.astype("f8") * b + c).astype("f4")
    storage = [values.view("u4") for values in (a, b, c)]
    once = evaluate("fma.rn.f32 {0}, {1}, {2}, {3};", storage[0].dtype, storage).view("f4")
    assert (once != twice).any()


def _ieee(instruction: str, a: Any, b: Any, c: Any = 0) -> NDArray[Any]:
    """For infinities, NaNs and zeros, where one rounding or two are the same."""
    operation = instruction.split(".")[0]
    return {"add": a + b, "sub": a - b, "mul": a * b, "fma": a * b + c}[operation]


CONVERSIONS: dict[str, tuple[str, str, Format, bool]] = {
    "cvt.rn.bf16.f32 {0}, {1};": ("f4", "u2", exact_floats.BF16, False),
    "cvt.rn.f16.f32 {0}, {1};": ("f4", "u2", exact_floats.F16, False),
    "cvt.rna.tf32.f32 {0}, {1};": ("f4", "u4", exact_floats.TF32, True),
    "cvt.rn.f32.f64 {0}, {1};": ("f8", "u4", exact_floats.F32, False),
    "cvt.f64.f32 {0}, {1};": ("f4", "u8", exact_floats.F64, False),
}


def as_floats(values: NDArray[Any], to: Format) -> NDArray[np.float64]:
    if to is exact_floats.BF16:
        values = values.astype("u4") << 16
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.view(f"f{values.itemsize}").astype("f8")


@pytest.mark.parametrize("instruction", CONVERSIONS)
def test_conversion(instruction: str) -> None:
    """Random values, and values at and beside the midpoints of the narrower format."""
    source, result, to, ties_away = CONVERSIONS[instruction]
    values = random_floats(source, 1, 30)
    if source == "f4":
        patterns = values.view("u4") & 0xFFFF0000
        near = np.random.default_rng(2).choice([0, 1, 0x1000, 0xFFF, 0x7FFF, 0x8000, 0x8001], COUNT)
        values = np.concatenate([values, (patterns + near.astype("u4")).view("f4")])
    got = as_floats(
        evaluate(instruction, np.dtype(result), [values.view(f"u{values.itemsize}")]), to
    )
    for value, out in zip(values.tolist(), got.tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(out)
        else:
            wanted = value if math.isinf(value) else rounded(Fraction(value), to, ties_away)
            assert out == wanted
            assert math.copysign(1, out) == math.copysign(1, value)


def test_packed_conversion_puts_the_first_source_on_top() -> None:
    a, b = (random_floats("f4", seed, 4).view("u4") for seed in (1, 2))
    for dtype in ("bf16", "f16"):
        pair = evaluate(f"cvt.rn.{dtype}x2.f32 {{0}}, {{1}}, {{2}};", np.dtype("u4"), [a, b])
        high, low = (
            evaluate(f"cvt.rn.{dtype}.f32 {{0}}, {{1}};", np.dtype("u2"), [v]) for v in (a, b)
        )
        assert np.array_equal(pair >> 16, high)
        assert np.array_equal(pair & 0xFFFF, low)


def test_all_halves_widen_exactly() -> None:
    patterns = np.arange(1 << 16).astype("u2")
    for dtype, to in (("bf16", exact_floats.BF16), ("f16", exact_floats.F16)):
        wide = evaluate(f"cvt.f32.{dtype} {{0}}, {{1}};", np.dtype("u4"), [patterns]).view("f4")
        assert np.array_equal(wide.astype("f8"), as_floats(patterns, to), equal_nan=True)


def test_comparisons_of_floats() -> None:
    """Plain comparisons fail on NaN, those that end in u hold, num and nan tell it."""
    a, b = random_floats("f4", 1, 2), random_floats("f4", 2, 2)
    b = np.where(np.arange(COUNT) % 3 == 0, a, b)
    unordered = np.isnan(a) | np.isnan(b)
    with np.errstate(all="ignore"):
        plain = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}
    expected = {name: holds & ~unordered for name, holds in plain.items()}
    expected |= {f"{name}u": holds | unordered for name, holds in plain.items()}
    expected |= {"num": ~unordered, "nan": unordered}
    for name, holds in expected.items():
        text = f"setp.{name}.f32 %p1, {{1}}, {{2}}; selp.b32 {{0}}, 1, 0, %p1;"
        got = evaluate(text, np.dtype("u4"), [a.view("u4"), b.view("u4")])
        assert np.array_equal(got == 1, holds), name
