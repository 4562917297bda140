"""cvt, cvta and mov: conversions, address spaces, packing."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .float_ops import F32, F64, canonical
from .lanes import Lanes, Values
from .memory_windows import PARAMETER_WINDOW, SHARED_WINDOW
from .opcodes import opcode
from .operands import Execute, Operands, Source, dtype_of, elementwise

if TYPE_CHECKING:
    from .machine import Machine

Match = re.Match[str]
U16, U32, U64 = np.dtype("u2"), np.dtype("u4"), np.dtype("u8")
INTEGER = r"([us](?:8|16|32|64))"


def bf16_to_f32(bits: Values) -> Values:
    return (np.asarray(bits).astype(U32) << np.uint32(16)).view(F32)


def f16_to_f32(bits: Values) -> Values:
    return np.ascontiguousarray(bits).view(np.float16).astype(F32)


def f32_to_bf16(values: Values) -> Values:
    bits = np.ascontiguousarray(values, F32).view(U32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(U16)
    return np.where(np.isnan(values), U16.type(0x7FFF), rounded)


def f32_to_f16(values: Values) -> Values:
    rounded = np.ascontiguousarray(values, F32).astype(np.float16).view(U16)
    return np.where(np.isnan(values), U16.type(0x7FFF), rounded)


def f32_to_tf32(values: Values) -> Values:
    """To 10 fraction bits; ties go away from zero, which is what `.rna` means."""
    bits = np.ascontiguousarray(values, F32).view(U32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    special = np.where(np.isnan(values), np.uint32(0x7FFFE000), bits)
    return np.where(np.isfinite(values), rounded, special)


TO_F32: dict[str, Callable[[Values], Values]] = {"bf16": bf16_to_f32, "f16": f16_to_f32}
FROM_F32: dict[str, Callable[[Values], Values]] = {"bf16": f32_to_bf16, "f16": f32_to_f16}


def _converted(
    operands: Operands,
    to: np.dtype[Any],
    source: np.dtype[Any],
    function: Callable[[Values], Values],
) -> Execute:
    """Both registers may be wider than their types."""
    operands.expect(2)
    read = operands.source_named(operands.text(1), source, may_be_wider=True)
    write = operands.target_named(operands.text(0), to, may_be_wider=True)

    def execute(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, function(np.atleast_1d(read(machine, lanes))))

    return execute


@opcode(rf"cvt\.{INTEGER}\.{INTEGER}")
def _integer_to_integer(match: Match, operands: Operands) -> Execute:
    to, source = dtype_of(match[1]), dtype_of(match[2])
    return _converted(operands, to, source, lambda values: values.astype(to))


@opcode(rf"cvt\.rn\.(f32|f64)\.{INTEGER}")
def _integer_to_float(match: Match, operands: Operands) -> Execute:
    to, source = dtype_of(match[1]), dtype_of(match[2])
    return _converted(operands, to, source, lambda values: values.astype(to))


@opcode(r"cvt\.f64\.f32|cvt\.rn\.f32\.f64")
def _between_floats(match: Match, operands: Operands) -> Execute:
    to, source = (F64, F32) if match[0] == "cvt.f64.f32" else (F32, F64)
    return _converted(operands, to, source, lambda values: canonical(values.astype(to)))


@opcode(r"cvt\.f32\.(bf16|f16)")
def _widen(match: Match, operands: Operands) -> Execute:
    function = TO_F32[match[1]]
    return _converted(operands, F32, U16, lambda values: canonical(function(values)))


@opcode(r"cvt\.rn\.(bf16|f16)\.f32")
def _narrow(match: Match, operands: Operands) -> Execute:
    return _converted(operands, U16, F32, FROM_F32[match[1]])


@opcode(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _narrow_pair(match: Match, operands: Operands) -> Execute:
    """The first source becomes the upper half."""
    operands.expect(3)
    narrow = FROM_F32[match[1]]
    upper, lower = operands.source(1, F32), operands.source(2, F32)
    target = operands.target(0, U32)

    def execute(machine: Machine, lanes: Lanes) -> None:
        high = narrow(np.atleast_1d(upper(machine, lanes))).astype(U32)
        low = narrow(np.atleast_1d(lower(machine, lanes))).astype(U32)
        target(machine, lanes, high << np.uint32(16) | low)

    return execute


@opcode(r"cvt\.rna\.tf32\.f32")
def _to_tf32(match: Match, operands: Operands) -> Execute:
    return _converted(operands, U32, F32, f32_to_tf32)


@opcode(r"cvta(\.to)?\.(global|shared|param)\.u64")
def _address_space(match: Match, operands: Operands) -> Execute:
    """Shared and parameter memory are windows of the generic address space."""
    operands.expect(2)
    window = {"global": 0, "shared": SHARED_WINDOW, "param": PARAMETER_WINDOW}[match[2]]
    offset = np.uint64(-window % 2**64 if match[1] else window)
    return elementwise(operands, U64, lambda address: address + offset)


@opcode(r"mov\.([bus](?:16|32|64)|f32|f64|pred)")
def _move(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    dtype = dtype_of(match[1])
    if operands.text(0).startswith("{"):
        return _unpack(operands, dtype)
    source = _packed(operands, dtype) if operands.text(1).startswith("{") else None
    read = source or operands.source(1, dtype)
    write = operands.target(0, dtype)
    return lambda machine, lanes: write(machine, lanes, read(machine, lanes))


def _part_dtype(dtype: np.dtype[Any], parts: int) -> np.dtype[Any]:
    if dtype.kind != "u" or parts not in (2, 4) or dtype.itemsize // parts < 2:
        raise PtxError(f"{parts} parts of {dtype.itemsize} bytes are not modelled")
    return np.dtype(f"u{dtype.itemsize // parts}")


def _packed(operands: Operands, dtype: np.dtype[Any]) -> Source:
    """The first part is the lowest."""
    names = operands.vector(1)
    part = _part_dtype(dtype, len(names))
    sources = [operands.source_named(name, part) for name in names]

    def read(machine: Machine, lanes: Lanes) -> Values:
        whole = np.zeros(len(lanes), dtype)
        for place, source in enumerate(sources):
            bits = np.asarray(source(machine, lanes)).astype(dtype)
            whole |= bits << dtype.type(place * part.itemsize * 8)
        return whole

    return read


def _unpack(operands: Operands, dtype: np.dtype[Any]) -> Execute:
    names = operands.vector(0)
    part = _part_dtype(dtype, len(names))
    targets = [operands.target_named(name, part) for name in names]
    source = operands.source(1, dtype)

    def execute(machine: Machine, lanes: Lanes) -> None:
        whole = source(machine, lanes)
        for place, target in enumerate(targets):
            bits = whole >> dtype.type(place * part.itemsize * 8)
            target(machine, lanes, np.asarray(bits).astype(part))

    return execute
