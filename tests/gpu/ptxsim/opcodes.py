"""The table of modelled instructions. Each entry matches whole opcodes, modifiers included."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from .errors import PtxError
from .operands import Execute, Operands

Build = Callable[["re.Match[str]", Operands], Execute]

_TABLE: list[tuple[re.Pattern[str], Build]] = []


def opcode(pattern: str) -> Callable[[Build], Build]:
    """Registers the decoder of all opcodes that match `pattern` from end to end."""

    def register(build: Build) -> Build:
        _TABLE.append((re.compile(pattern), build))
        return build

    return register


def build(operands: Operands) -> Execute:
    """The decoded instruction.

    Raises:
        PtxError: no entry knows its opcode, or one does not know its operands.
    """
    name = operands.instruction.opcode
    make, match = _find(name)
    return make(match, operands)


@cache
def _find(name: str) -> tuple[Build, re.Match[str]]:
    found = [(make, match) for pattern, make in _TABLE if (match := pattern.fullmatch(name))]
    if len(found) != 1:
        raise PtxError(f"opcode {name} is {'modelled twice' if found else 'not modelled'}")
    return found[0]
