"""Specs and tickets: they survive the wire, and altered or foreign bytes are refused."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.errors import LayoutMismatch
from lora_refit.messages import ArenaHandle
from lora_refit.spec import FORMAT, Layout, Spec, Ticket
from lora_refit.trace.axis import AxisMap
from lora_refit.trace.export import ExportMap, Parameter
from lora_refit.trace.movement import Cell, TensorMap

CELL = Cell(
    slab=0,
    row=0,
    col=0,
    tensor=1,
    transposed=False,
    along_rows=AxisMap.from_coordinates(np.arange(4)),
    along_cols=AxisMap.from_coordinates([2, 0, 1]),
)
LAYOUT = Layout(
    format=FORMAT,
    dtype="bfloat16",
    scale_folded=False,
    peft_config={"r": 4, "lora_alpha": 8.0, "target_modules": ["proj"], "rank_pattern": {}},
    export_map=ExportMap(
        parameters=(
            Parameter(0, "0.adapter.weight", (4, 3), "float32"),
            Parameter(1, "0.adapter.weight", (4, 3), "float32"),
        ),
        factors=(TensorMap("base_model.model.proj.lora_A.weight", (4, 3), (CELL,)),),
        replicas=((0, 1),),
    ),
)
ARENA = ArenaHandle(
    rank=0, pid=1, fd=2, token=b"\x00\xff" * 8, total_bytes=4096, entry_bytes=(24, 24)
)
SPEC = Spec(layout=LAYOUT, layout_digest=LAYOUT.digest(), arenas=(ARENA,))
TICKET = Ticket(
    version=-3,
    sequence=9,
    layout_digest=LAYOUT.digest(),
    publisher=SPEC.publisher,
    rank=1,
    pack_ms=0.25,
)

Message = Spec | Ticket


@pytest.mark.parametrize("message", [SPEC, TICKET])
def test_round_trip(message: Message) -> None:
    assert type(message).from_bytes(message.to_bytes()) == message


@pytest.mark.parametrize("kind", [Spec, Ticket])
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"not msgpack", msgspec.msgpack.encode({}), msgspec.msgpack.encode([1])]
)
def test_foreign_bytes_are_refused(kind: type[Message], data: bytes) -> None:
    with pytest.raises(LayoutMismatch, match=f"not a {kind.__name__.lower()}"):
        kind.from_bytes(data)


@pytest.mark.parametrize("message", [SPEC, TICKET])
def test_truncated_bytes_are_refused(message: Message) -> None:
    data = message.to_bytes()
    for length in range(len(data)):
        with pytest.raises(LayoutMismatch):
            type(message).from_bytes(data[:length])


@given(st.integers(0, len(SPEC.to_bytes()) - 1), st.integers(1, 255))
@settings(deadline=None)
def test_no_altered_byte_changes_a_layout_unnoticed(position: int, flip: int) -> None:
    data = bytearray(SPEC.to_bytes())
    data[position] ^= flip
    try:
        altered = Spec.from_bytes(bytes(data))
    except LayoutMismatch:
        return
    # Arena handles are outside the digest; a wrong one fails by its token when it is opened.
    assert altered.layout == LAYOUT
    assert altered.layout_digest == SPEC.layout_digest


def with_layout(**changes: object) -> bytes:
    layout = msgspec.structs.replace(LAYOUT, **changes)
    return msgspec.structs.replace(SPEC, layout=layout).to_bytes()


def test_altered_layouts_are_refused() -> None:
    assert Spec.from_bytes(with_layout()) == SPEC
    for changes in (
        {"dtype": "float16"},
        {"scale_folded": True},
        {"peft_config": LAYOUT.peft_config | {"lora_alpha": 8.5}},
        {"export_map": msgspec.structs.replace(LAYOUT.export_map, replicas=())},
    ):
        with pytest.raises(LayoutMismatch, match="was altered"):
            Spec.from_bytes(with_layout(**changes))


def test_other_formats_are_refused() -> None:
    with pytest.raises(LayoutMismatch, match=r"spec format 99 .* \(format 2\); use the same"):
        Spec.from_bytes(with_layout(format=99))


def reordered(config: dict[str, object]) -> dict[str, object]:
    return dict(reversed(config.items()))


@pytest.mark.parametrize(
    ("change", "same"), [(dict, True), (reordered, True), (lambda c: {}, False)]
)
def test_the_layout_digest_ignores_only_the_order_of_the_config(
    change: Callable[[dict[str, object]], dict[str, object]], same: bool
) -> None:
    other = msgspec.structs.replace(LAYOUT, peft_config=change(LAYOUT.peft_config))
    assert (other.digest() == LAYOUT.digest()) is same
    assert len(other.digest()) == 32


def test_the_layout_digest_is_the_same_in_every_process() -> None:
    assert LAYOUT.digest().hex()[:32] == "f684b750a4c7a0da7c07919c6ff2b319"


def test_inspect_reads_well() -> None:
    assert SPEC.inspect() == (
        "spec f684b750a4c7a0da7c07919c6ff2b319: 1 factors from 2 parameters of 1 trainer ranks, bfloat16\n"
        "  base_model.model.proj.lora_A.weight [4, 3] <- trainer rank 1, 0.adapter.weight"
    )
    assert SPEC.inspect(limit=0).endswith("... and 1 more factors")
