"""Disassembled machine code: what each kernel's instructions are, and what it occupies."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import shipped

FUNCTION = re.compile(r"Function : (\w+)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.M)
USAGE = re.compile(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class MachineKernel:
    """One kernel of a cubin."""

    name: str
    opcodes: list[str]
    registers: int
    stack_bytes: int
    local_bytes: int

    def count(self, pattern: str) -> int:
        """Instructions whose opcode is like `pattern` from its start on."""
        return sum(re.match(pattern, opcode) is not None for opcode in self.opcodes)


@cache
def disassemble(cubin: Path) -> dict[str, MachineKernel]:
    """The kernels of a cubin by name."""
    usage = {match[1]: match for match in USAGE.finditer(_cuobjdump("-res-usage", cubin))}
    kernels = {}
    pieces = FUNCTION.split(_cuobjdump("-sass", cubin))
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        registers, stack, _, local = (int(usage[name][i]) for i in range(2, 6))
        kernels[name] = MachineKernel(name, INSTRUCTION.findall(text), registers, stack, local)
    return kernels


def _cuobjdump(option: str, cubin: Path) -> str:
    command = [shipped.cuobjdump(), option, str(cubin)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
