"""ld, st, atom, red and cp.async."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import PtxError
from .lanes import Lanes, Values
from .memory_windows import PARAMETER_WINDOW, SHARED_WINDOW
from .opcodes import opcode
from .operands import DISCARDED, Execute, Operands, dtype_of

if TYPE_CHECKING:
    from .machine import Machine

Match = re.Match[str]
U32 = np.dtype("u4")

VECTOR_TYPE = r"(?:\.(v2|v4))?\.([busf](?:8|16|32|64))"
CACHE_HINT = r"(?:\.L1::no_allocate|\.L2::(?:64|128|256)B)*"
"""They change where data is kept, never what is read or written."""


def _element(ptx_type: str) -> np.dtype[Any]:
    """8-bit elements have registers of 16 bits and more; 16-bit floats are bits."""
    return dtype_of(ptx_type) if ptx_type != "f16" else np.dtype("u2")


@opcode(rf"ld(\.weak|\.volatile)?(\.param|\.shared|\.global)?(\.nc)?{CACHE_HINT}{VECTOR_TYPE}")
def _load(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    _, space, read_only, vector, ptx_type = match.groups()
    dtype, names = _element(ptx_type), operands.vector(0)
    _check_vector(vector, names)
    if read_only and space != ".global":
        raise PtxError("ld.nc reads global memory only")
    size = dtype.itemsize * len(names)
    address = operands.address(1)
    targets = [operands.target_named(name, dtype, may_be_wider=True) for name in names]

    def execute(machine: Machine, lanes: Lanes) -> None:
        data = _load_from(space, machine, lanes, address(machine, lanes), size, bool(read_only))
        words = np.ascontiguousarray(data).view(dtype)
        for column, target in enumerate(targets):
            target(machine, lanes, words[:, column])

    return execute


def _load_from(
    space: str | None,
    machine: Machine,
    lanes: Lanes,
    addresses: Values,
    size: int,
    read_only: bool,
) -> Values:
    if space is None:
        space, addresses = _generic(addresses)
    if space == ".shared":
        return machine.shared.load(lanes, addresses, size)
    if space == ".param":
        return machine.load_parameters(addresses, size)
    return machine.memory.load(lanes, machine.block_of, addresses, size, read_only)


@opcode(rf"st(\.weak|\.volatile)?(\.shared|\.global)?{CACHE_HINT}{VECTOR_TYPE}")
def _store(match: Match, operands: Operands) -> Execute:
    operands.expect(2)
    _, space, vector, ptx_type = match.groups()
    dtype, names = _element(ptx_type), operands.vector(1)
    _check_vector(vector, names)
    address = operands.address(0)
    sources = [operands.source_named(name, dtype, may_be_wider=True) for name in names]

    def execute(machine: Machine, lanes: Lanes) -> None:
        words = np.empty((len(lanes), len(sources)), dtype)
        for column, source in enumerate(sources):
            words[:, column] = source(machine, lanes)
        where, addresses = space, address(machine, lanes)
        if where is None:
            where, addresses = _generic(addresses)
        if where == ".param":
            raise PtxError("a store into the kernel's parameters")
        data = words.view(np.uint8)
        memory = machine.shared if where == ".shared" else machine.memory
        memory.store(lanes, addresses, data)

    return execute


def _check_vector(vector: str | None, names: list[str]) -> None:
    if len(names) != int((vector or "v1")[1:]):
        raise PtxError(f"{len(names)} registers in a {vector or 'scalar'} access")


def _generic(addresses: Values) -> tuple[str, Values]:
    """The memory that generic addresses are in, and the addresses there."""
    windows = addresses >> np.uint64(60)
    if (windows != windows[0]).any():
        raise PtxError("one generic access to several kinds of memory is not modelled")
    if windows[0] == SHARED_WINDOW >> 60:
        return ".shared", addresses - np.uint64(SHARED_WINDOW)
    if windows[0] == PARAMETER_WINDOW >> 60:
        return ".param", addresses - np.uint64(PARAMETER_WINDOW)
    return ".global", addresses


ATOMIC_TYPE = r"(?:\.relaxed)?(?:\.gpu|\.cta)?(\.global|\.shared)?\.add\.(u32|s32|u64|f32|f64)"


@opcode(rf"(atom|red){ATOMIC_TYPE}")
def _atomic_add(match: Match, operands: Operands) -> Execute:
    """Sums of floats round once per addition, in an order that the ISA leaves open."""
    returns = match[1] == "atom"
    operands.expect(3 if returns else 2)
    dtype = dtype_of(match[3])
    address = operands.address(1 if returns else 0)
    source = operands.source(2 if returns else 1, dtype)
    target = operands.target(0, dtype) if returns else None
    old_wanted = returns and operands.text(0) != DISCARDED

    def execute(machine: Machine, lanes: Lanes) -> None:
        space, addresses = match[2], address(machine, lanes)
        if space is None:
            space, addresses = _generic(addresses)
        if space == ".param":
            raise PtxError("an atomic on the kernel's parameters")
        values = np.broadcast_to(source(machine, lanes), (len(lanes),))
        memory = machine.shared if space == ".shared" else machine.memory
        old = memory.add(lanes, addresses, values, old_wanted)
        if target is not None:
            target(machine, lanes, old)

    return execute


@opcode(rf"cp\.async\.(ca|cg)\.shared\.global{CACHE_HINT}")
def _copy_async(match: Match, operands: Operands) -> Execute:
    """[shared], [global], size and optionally how many bytes to read; the others become zero."""
    operands.expect(3, 4)
    size = int(operands.text(2))
    if size not in ((16,) if match[1] == "cg" else (4, 8, 16)):
        raise PtxError(f"cp.async.{match[1]} does not copy {size} bytes")
    target, source = operands.address(0), operands.address(1)
    count = operands.source(3, U32) if len(operands) == 4 else None

    def execute(machine: Machine, lanes: Lanes) -> None:
        valid = np.full(len(lanes), size) if count is None else count(machine, lanes)
        valid = np.broadcast_to(valid, (len(lanes),)).astype(np.int64)
        if (valid > size).any():
            raise PtxError(f"cp.async reads more than its {size} bytes")
        to, start = target(machine, lanes), source(machine, lanes)
        machine.copies.issue(lanes, to, start, size, valid)

    return execute


@opcode(r"cp\.async\.(commit_group|wait_group|wait_all)")
def _copy_group(match: Match, operands: Operands) -> Execute:
    operands.expect(1 if match[1] == "wait_group" else 0)
    if match[1] == "commit_group":
        return lambda machine, lanes: machine.copies.commit(lanes)
    if match[1] == "wait_all":
        return lambda machine, lanes: machine.copies.wait_all(lanes)
    allowed = int(operands.text(0))
    return lambda machine, lanes: machine.copies.wait_group(lanes, allowed)
