"""PTX text to kernels: parameters, shared memory, registers, instructions, labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import PtxError

SHARED = re.compile(
    r"(\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.[bus](\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?"
)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.S)
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.[busf](\d+)\s+"
    r"(?:\.ptr(?:\s+\.(?:global|shared|const|local))?(?:\s+\.align\s+\d+)?\s+)?"
    r"([\w$]+)(?:\[(\d+)\])?"
)
REGISTERS = re.compile(r"\.reg\s+\.(pred|[busf]\d+)\s+(.*)", re.S)
LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
STATEMENT = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
NAME = re.compile(r"[%A-Za-z_$][\w$]*")
IGNORED_DIRECTIVES = (".pragma", ".loc")


@dataclass(frozen=True)
class Instruction:
    """`@guard opcode operands;`, operands as text."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None
    guard_negated: bool
    text: str


@dataclass(frozen=True)
class Space:
    """Named places in the parameter or shared memory of a kernel: offsets in bytes."""

    offsets: dict[str, int]
    size: int


@dataclass(eq=False)
class Kernel:
    """One `.entry`. A label is an index into the instructions. A kernel equals itself only."""

    name: str
    parameters: Space
    parameter_sizes: list[int]
    shared: Space
    max_threads: int
    register_types: dict[str, str] = field(default_factory=dict)
    register_ranges: dict[str, tuple[str, int]] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_tables: dict[str, list[str]] = field(default_factory=dict)

    def register_type(self, name: str) -> str | None:
        """`pred`, `b32`...; None if no register has this name."""
        if name in self.register_types:
            return self.register_types[name]
        match = re.fullmatch(r"(.*?[^\d])(\d+)", name)
        if match is None or match[1] not in self.register_ranges:
            return None
        register_type, count = self.register_ranges[match[1]]
        return register_type if int(match[2]) < count else None


def parse(text: str) -> dict[str, Kernel]:
    """The kernels of a PTX module by name.

    Raises:
        PtxError: a statement has no known form.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    entries = [(match, _end_of_scope(text, match.end())) for match in ENTRY.finditer(text)]
    module_level, at = "", 0
    for match, end in entries:
        module_level += text[at : match.start()]
        at = end
    module_shared = _shared_variables(module_level + text[at:])
    return {
        match[1]: _parse_kernel(match, text[match.end() : end - 1], module_shared)
        for match, end in entries
    }


def split_operands(text: str) -> list[str]:
    """At commas that are not inside brackets."""
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current.strip()] if current.strip() else parts


def _end_of_scope(text: str, start: int) -> int:
    """Just after the brace that closes the scope whose first character is at `start`."""
    depth, at = 1, start
    while depth:
        brace = re.compile(r"[{}]").search(text, at)
        if brace is None:
            raise PtxError("a kernel's body does not end")
        depth += 1 if brace[0] == "{" else -1
        at = brace.end()
    return at


def _parse_kernel(entry: re.Match[str], body: str, module_shared: list[_Variable]) -> Kernel:
    parameters = [_parameter(text) for text in split_operands(entry[2])]
    shared = _used(module_shared, body) + _shared_variables(body)
    shared.sort(key=lambda variable: variable.size == 0)  # dynamic memory follows the static
    threads = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)(?:\s*,\s*1)*\s*(?:\.|$)", entry[3].strip())
    kernel = Kernel(
        name=entry[1],
        parameters=_lay_out(parameters),
        parameter_sizes=[variable.size for variable in parameters],
        shared=_lay_out(shared),
        max_threads=int(threads[1]) if threads else 1024,
    )
    _parse_body(kernel, body)
    return kernel


@dataclass(frozen=True)
class _Variable:
    name: str
    align: int
    size: int


def _parameter(text: str) -> _Variable:
    match = PARAMETER.fullmatch(text.strip())
    if match is None:
        raise PtxError(f"cannot parse the parameter {text!r}")
    element = int(match[2]) // 8
    return _Variable(match[3], int(match[1] or element), element * int(match[4] or 1))


def _shared_variables(text: str) -> list[_Variable]:
    """Dynamic shared memory is the one of size 0."""
    return [
        _Variable(match[4], int(match[2]), _shared_bytes(match)) for match in SHARED.finditer(text)
    ]


def _shared_bytes(match: re.Match[str]) -> int:
    is_dynamic = match[1] is not None
    return 0 if is_dynamic else int(match[3]) // 8 * int(match[5] or 1)


def _used(variables: list[_Variable], body: str) -> list[_Variable]:
    names = set(NAME.findall(body))
    return [variable for variable in variables if variable.name in names]


def _lay_out(variables: list[_Variable]) -> Space:
    offsets, size = {}, 0
    for variable in variables:
        size = -(-size // variable.align) * variable.align
        offsets[variable.name] = size
        size += variable.size
    return Space(offsets, size)


def _parse_body(kernel: Kernel, body: str) -> None:
    label = ""
    for kind, text, renamed in _statements(body):
        if kind == "label":
            label = text
            kernel.labels[label] = len(kernel.instructions)
        elif text.startswith(".reg"):
            _declare(kernel, text, renamed)
        elif text.startswith(".branchtargets"):
            kernel.branch_tables[label] = split_operands(text.removeprefix(".branchtargets"))
            del kernel.labels[label]
        elif SHARED.match(text) is None and not text.startswith(IGNORED_DIRECTIVES):
            kernel.instructions.append(_instruction(text, renamed))


def _statements(body: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(kind, text, new names of the registers of inner scopes), one statement after the other.

    Inline assembly declares registers in scopes of its own, so a name may occur in several.
    """
    scopes: list[dict[str, str]] = [{}]
    scope_count, at = 0, 0
    while at < len(body):
        if body[at].isspace() or body[at] == ";":
            at += 1
        elif body[at] == "{":
            scope_count += 1
            scopes.append(dict(scopes[-1]))
            at += 1
        elif body[at] == "}":
            scopes.pop()
            at += 1
        elif label := LABEL.match(body, at):
            yield "label", label[1], scopes[-1]
            at = label.end()
        else:
            end = body.find(";", at)
            if end < 0:
                raise PtxError(f"a statement does not end: {body[at : at + 80]!r}")
            text = " ".join(body[at:end].split())
            if len(scopes) > 1 and (registers := REGISTERS.fullmatch(text)):
                for name in split_operands(registers[2]):
                    scopes[-1][name] = f"{name}$scope{scope_count}"
            yield "statement", text, scopes[-1]
            at = end + 1


def _declare(kernel: Kernel, text: str, renamed: dict[str, str]) -> None:
    match = REGISTERS.fullmatch(text)
    if match is None:
        raise PtxError(f"cannot parse {text!r}")
    for name in split_operands(match[2]):
        if numbered := re.fullmatch(r"(.*)<(\d+)>", name):
            kernel.register_ranges[numbered[1]] = (match[1], int(numbered[2]))
        else:
            kernel.register_types[renamed.get(name, name)] = match[1]


def _instruction(text: str, renamed: dict[str, str]) -> Instruction:
    match = STATEMENT.fullmatch(text)
    if match is None:
        raise PtxError(f"cannot parse {text!r}")
    negated, guard, opcode, operands = match.groups()
    if renamed:
        operands = NAME.sub(lambda name: renamed.get(name[0], name[0]), operands)
        guard = renamed.get(guard, guard)
    return Instruction(opcode, tuple(split_operands(operands)), guard, negated == "!", text)
