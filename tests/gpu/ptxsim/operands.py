"""Operands of an instruction, decoded once into functions that read or write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .lanes import Lanes, Values
from .parser import Instruction, Kernel, split_operands
from .registers import STORAGE, width_of

if TYPE_CHECKING:
    from .machine import Machine

Source = Callable[["Machine", Lanes], Values]
"""Gives one value per lane, or a scalar for all of them."""
Target = Callable[["Machine", Lanes, Values], None]
Execute = Callable[["Machine", Lanes], None]

ADDRESS = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
SPECIAL_REGISTERS = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid")
PREDICATE = np.dtype(bool)
DISCARDED = "_"


def dtype_of(ptx_type: str) -> np.dtype[Any]:
    """`s32`, `b64`, `f32`, `pred`...; bits are unsigned. There is no 16-bit float."""
    if ptx_type == "pred":
        return PREDICATE
    kind, width = ptx_type[0], int(ptx_type[1:])
    if kind == "f" and width not in (32, 64):
        raise PtxError(f"arithmetic on .{ptx_type} is not modelled")
    return np.dtype(f"{ {'s': 'i', 'f': 'f'}.get(kind, 'u') }{width // 8}")


@dataclass
class RegisterTable:
    """The registers that a kernel's instructions use, numbered as they come."""

    kernel: Kernel
    names: list[str] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def find(self, name: str) -> int | None:
        if name not in self.numbers:
            register_type = self.kernel.register_type(name)
            if register_type is None:
                return None
            self.numbers[name] = len(self.names)
            self.names.append(name)
            self.widths.append(width_of(register_type))
        return self.numbers[name]


class Operands:
    """The operands of one instruction."""

    def __init__(self, instruction: Instruction, registers: RegisterTable) -> None:
        self.instruction = instruction
        self._registers = registers
        self.kernel = registers.kernel

    def __len__(self) -> int:
        return len(self.instruction.operands)

    def text(self, index: int) -> str:
        if index >= len(self):
            raise PtxError("an operand is missing")
        return self.instruction.operands[index]

    def expect(self, *counts: int) -> None:
        if len(self) not in counts:
            raise PtxError(f"{len(self)} operands where {counts} are modelled")

    def source(self, index: int, dtype: np.dtype[Any]) -> Source:
        return self.source_named(self.text(index), dtype)

    def target(self, index: int, dtype: np.dtype[Any]) -> Target:
        return self.target_named(self.text(index), dtype)

    def vector(self, index: int) -> list[str]:
        """The names in `{a, b}`; one name for a scalar operand."""
        text = self.text(index)
        return split_operands(text[1:-1]) if text.startswith("{") else [text]

    def source_named(self, name: str, dtype: np.dtype[Any], may_be_wider: bool = False) -> Source:
        """Reads `name` as `dtype`; of a wider register, its low bits if that is allowed."""
        register = self._registers.find(name)
        if register is None:
            return self._constant_or_special(name, dtype)
        width = self._registers.widths[register]
        if may_be_wider and width > dtype.itemsize * 8 and width > 1:
            unsigned = np.dtype(f"u{dtype.itemsize}")
            return lambda machine, lanes: (
                machine.registers.read(register, lanes).astype(unsigned).view(dtype)
            )
        self._check_width(name, width, dtype)
        if dtype == STORAGE[width]:
            return lambda machine, lanes: machine.registers.read(register, lanes)
        return lambda machine, lanes: machine.registers.read(register, lanes).view(dtype)

    def target_named(self, name: str, dtype: np.dtype[Any], may_be_wider: bool = False) -> Target:
        """Writes `dtype` values to `name`; to a wider register extended, if that is allowed."""
        if name == DISCARDED:
            return lambda machine, lanes, values: None
        register = self._registers.find(name)
        if register is None:
            raise PtxError(f"{name} is not a register")
        width = self._registers.widths[register]
        storage = STORAGE[width]
        if may_be_wider and width > dtype.itemsize * 8 and width > 1:
            extended = np.dtype(f"{dtype.kind}{storage.itemsize}")

            def write_extended(machine: Machine, lanes: Lanes, values: Values) -> None:
                bits = np.asarray(values, dtype).astype(extended).view(storage)
                machine.registers.write(register, lanes, bits)

            return write_extended
        self._check_width(name, width, dtype)

        def write(machine: Machine, lanes: Lanes, values: Values) -> None:
            machine.registers.write(register, lanes, np.asarray(values, dtype).view(storage))

        return write

    def address(self, index: int) -> Source:
        """`[register + offset]` as 64-bit addresses, one per lane."""
        text = self.text(index)
        match = ADDRESS.fullmatch(text)
        if match is None:
            raise PtxError(f"the address {text} is not modelled")
        base = self._address_base(match[1])
        offset = np.uint64(int(match[2] or "0", 0) % 2**64)

        def read(machine: Machine, lanes: Lanes) -> Values:
            addresses = base(machine, lanes).astype(np.uint64) + offset
            return addresses if addresses.ndim else np.full(len(lanes), addresses)

        return read

    def _address_base(self, name: str) -> Source:
        register = self._registers.find(name)
        if register is None:
            return self._constant_or_special(name, np.dtype("u8"))
        return lambda machine, lanes: machine.registers.read(register, lanes)

    def _constant_or_special(self, name: str, dtype: np.dtype[Any]) -> Source:
        if name in SPECIAL_REGISTERS:
            if dtype.itemsize != 4:
                raise PtxError(f"{name} has 32 bits")
            return lambda machine, lanes: machine.special(name, lanes).view(dtype)
        constant = self._constant(name, dtype)
        return lambda machine, lanes: constant

    def _constant(self, name: str, dtype: np.dtype[Any]) -> Any:
        width = dtype.itemsize * 8
        for space in (self.kernel.shared, self.kernel.parameters):
            if name in space.offsets:
                return np.dtype(f"u{dtype.itemsize}").type(space.offsets[name]).view(dtype)
        if dtype == PREDICATE:
            if name not in ("0", "1", "-1"):
                raise PtxError(f"the predicate constant {name} is not modelled")
            return np.bool_(name != "0")
        if bits := re.fullmatch(r"0([fFdD])([0-9a-fA-F]+)", name):
            expected = 32 if bits[1] in "fF" else 64
            if width != expected or len(bits[2]) * 4 != expected:
                raise PtxError(f"the constant {name} is not of {width} bits")
            return np.dtype(f"u{dtype.itemsize}").type(int(bits[2], 16)).view(dtype)
        if re.fullmatch(r"-?(?:\d+|0[xX][0-9a-fA-F]+)U?", name) and dtype.kind in "ui":
            number = int(name.rstrip("U"), 0)
            return np.dtype(f"u{dtype.itemsize}").type(number % (1 << width)).view(dtype)
        raise PtxError(f"the operand {name} is not modelled")

    def _check_width(self, name: str, width: int, dtype: np.dtype[Any]) -> None:
        wanted = 1 if dtype == PREDICATE else dtype.itemsize * 8
        if width != wanted:
            raise PtxError(f"{name} has {width} bits, the instruction works on {wanted}")


def elementwise(operands: Operands, dtype: np.dtype[Any], function: Callable[..., Any]) -> Execute:
    """target = function(sources...), each lane for itself, all of one dtype."""
    target = operands.target(0, dtype)
    sources = [operands.source(i, dtype) for i in range(1, len(operands))]

    def unary(machine: Machine, lanes: Lanes) -> None:
        target(machine, lanes, function(sources[0](machine, lanes)))

    def binary(machine: Machine, lanes: Lanes) -> None:
        values = function(sources[0](machine, lanes), sources[1](machine, lanes))
        target(machine, lanes, values)

    def general(machine: Machine, lanes: Lanes) -> None:
        target(machine, lanes, function(*[source(machine, lanes) for source in sources]))

    return {1: unary, 2: binary}.get(len(sources), general)
