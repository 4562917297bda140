"""Plans: equal ones have equal digests; they can be saved, restricted, inverted and read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers import run_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.errors import LayoutMismatch
from lora_refit.plan import Block, Buffer, Plan
from lora_refit.plan.plan import offsets

ROWS, COLS = 4, 3


def copy(src: int, dst_row: int, **changes: object) -> Block:
    """Two rows of source `src` to destination rows `dst_row`, ..., transposed in the source."""
    block = Block(
        src=src,
        dst=0,
        src_offset=0,
        dst_offset=dst_row * COLS,
        size=(1, 2, COLS),
        src_stride=(0, 1, 2),
        dst_stride=(0, COLS, 1),
        scale=1.0,
    )
    return dataclasses.replace(block, **changes)  # type: ignore[arg-type]


SOURCES = [Buffer("layer.a", 0, "float32", 6), Buffer("layer.b", 1, "float32", 6)]
DESTINATIONS = [Buffer("slot", 0, "float32", ROWS * COLS)]
BLOCKS = [copy(0, dst_row=0), copy(1, dst_row=2)]


def plan(blocks: list[Block] = BLOCKS) -> Plan:
    return Plan.build(SOURCES, DESTINATIONS, blocks)


def test_a_plan_moves_what_it_says() -> None:
    sources = [torch.arange(6.0), torch.arange(10.0, 16.0)]
    (found,) = run_plan(plan(), sources, poison=float("nan"))
    expected = torch.cat([source.reshape(3, 2).t() for source in sources])
    assert torch.equal(found.reshape(ROWS, COLS), expected)


def test_equal_plans_are_equal() -> None:
    assert plan() == plan()
    assert hash(plan()) == hash(plan())
    assert plan().to_bytes() == plan().to_bytes()


def test_the_digest_is_the_same_in_every_process_and_version() -> None:
    assert plan().digest == "63562b1a6026be8fbe7558dbd951983e"


CHANGES: dict[str, object] = {
    "src": 1,
    "src_offset": 1,
    "dst_offset": 1,
    "size": (1, 2, 2),
    "src_stride": (0, 1, 1),
    "dst_stride": (0, COLS, 2),
    "scale": float(np.nextafter(np.float32(1), np.float32(2))),
    "flags": 1,
}


@pytest.mark.parametrize("field", CHANGES)
def test_the_digest_sees_every_field(field: str) -> None:
    changed = plan([dataclasses.replace(BLOCKS[0], **{field: CHANGES[field]}), BLOCKS[1]])
    assert changed.digest != plan().digest
    assert changed != plan()


def test_the_digest_sees_buffers_and_order() -> None:
    renamed = [msgspec.structs.replace(SOURCES[0], name="layer.c"), SOURCES[1]]
    others = [
        Plan.build(renamed, DESTINATIONS, BLOCKS),
        Plan.build(SOURCES, [Buffer("slot", 0, "bfloat16", ROWS * COLS)], BLOCKS),
        plan(BLOCKS[::-1]),
    ]
    assert len({plan().digest, *(other.digest for other in others)}) == 4


def test_save_and_load(tmp_path: Path) -> None:
    plan().save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan") == plan()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a saved plan"),
        (b"hello", "not a saved plan"),
        (plan().to_bytes()[:-1], "not a saved plan"),
        (msgspec.msgpack.encode([1, 2, 3]), "not a saved plan"),
        (msgspec.msgpack.encode(msgspec.structs.replace(plan(), format=2)), "plan format 2"),
        (
            msgspec.msgpack.encode(msgspec.structs.replace(plan(), packed_blocks=b"12345")),
            "ends within a block",
        ),
    ],
)
def test_other_bytes_are_no_plan(data: bytes, message: str) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        Plan.from_bytes(data)


@given(st.integers(0, len(plan().to_bytes()) - 1), st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_altered_bytes_are_refused_or_give_another_digest(position: int, flip: int) -> None:
    data = bytearray(plan().to_bytes())
    data[position] ^= flip
    try:
        altered = Plan.from_bytes(bytes(data))
    except LayoutMismatch:
        return
    assert altered.digest != plan().digest


def test_a_block_outside_its_buffer_is_refused() -> None:
    with pytest.raises(LayoutMismatch, match="block 1"):
        plan([BLOCKS[0], copy(1, dst_row=3)]).kernel()


def test_for_rank_is_a_partition() -> None:
    parts = [plan().for_rank(rank) for rank in range(3)]
    assert [len(part.blocks) for part in parts] == [1, 1, 0]
    assert b"".join(part.packed_blocks for part in parts) == plan().packed_blocks
    assert all(
        (part.sources, part.destinations) == (plan().sources, plan().destinations) for part in parts
    )


@given(st.permutations(range(24)), st.integers(0, 2**31))
@settings(max_examples=10, deadline=None)
def test_the_inverse_restores_every_bit(order: list[int], seed: int) -> None:
    blocks = [
        Block(0, 0, src, dst, (1, 1, 1), (0, 0, 1), (0, 0, 1), 1.0) for dst, src in enumerate(order)
    ]
    forward = Plan.build([Buffer("a", 0, "float32", 24)], [Buffer("b", 0, "float32", 24)], blocks)
    generator = torch.Generator().manual_seed(seed)
    source = torch.randint(-(2**31), 2**31, (24,), generator=generator).int().view(torch.float32)
    moved = run_plan(forward, [source])
    (back,) = run_plan(forward.inverse(), moved)
    assert torch.equal(back.view(torch.int32), source.view(torch.int32))
    assert forward.inverse().inverse() == forward


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ([copy(0, 0), copy(1, 2, scale=2.0)], "slot: scaled by 2.0"),
        ([copy(0, 0), copy(0, 2)], r"layer.a \(rank 0\): the plan reads some of its elements more"),
        ([copy(0, 0, src_stride=(0, 0, 1))], r"layer.a \(rank 0\): the plan reads"),
        ([copy(0, 0), copy(1, 1)], r"slot \(rank 0\): the plan writes"),
    ],
)
def test_plans_without_an_inverse_are_refused(blocks: list[Block], message: str) -> None:
    plan().inverse()
    with pytest.raises(LayoutMismatch, match=message):
        plan(blocks).inverse()


def test_offsets_are_listed_in_loop_order() -> None:
    (block,) = plan([copy(0, dst_row=1)]).blocks
    assert offsets(block, "src").tolist() == [0, 2, 4, 1, 3, 5]
    assert offsets(block, "dst").tolist() == [3, 4, 5, 6, 7, 8]


def test_inspect_reads_well() -> None:
    text = plan([BLOCKS[0], copy(1, dst_row=2, scale=0.3)]).inspect()
    head, *lines = text.splitlines()
    assert head.endswith(": 2 blocks move 12 elements from 2 buffers to 1")
    assert lines == [
        "  slot[0] strides [0, 3, 1] <- rank 0 layer.a[0] strides [0, 1, 2]  1 x 2 x 3",
        "  slot[6] strides [0, 3, 1] <- rank 1 layer.b[0] strides [0, 1, 2]  1 x 2 x 3"
        "  * 0.300000012",
    ]
    assert plan().inspect(limit=1).splitlines()[-1] == "... and 1 more blocks"
    assert "0 blocks move 0 elements" in plan([]).inspect()
