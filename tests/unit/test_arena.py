"""One process, both sides: the arena's layout and its protocol step by step."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter
from lora_refit.errors import (
    LayoutMismatch,
    ReaderTimeout,
    StaleArena,
    TransportUnavailable,
    WriterTimeout,
)

LAYOUT = ArenaLayout((1000, 2, 4096))
SPEC = bytes(range(32))
RANK = 3


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    with contextlib.closing(ArenaWriter(LAYOUT, RANK, SPEC, timeout_s=0.02)) as writer:
        yield writer


@pytest.fixture
def reader(writer: ArenaWriter) -> Iterator[ArenaReader]:
    with contextlib.closing(ArenaReader(writer.handle, SPEC, timeout_s=0.02)) as reader:
        yield reader


def digests_for(sequence: int) -> np.ndarray:
    return np.array([sequence, 2**64 - sequence, 7], dtype=np.uint64)


def publish(writer: ArenaWriter, sequence: int, version: int) -> None:
    """Fill every entry with the sequence number and publish."""
    half = writer.begin(sequence)
    for address, size in zip(writer.entry_addresses(half), LAYOUT.entry_bytes, strict=True):
        ctypes.memset(int(address), sequence, size)
    writer.publish(sequence, version, digests_for(sequence))


def entries(arena: ArenaReader, half: int) -> list[bytes]:
    sizes = LAYOUT.entry_bytes
    return [
        ctypes.string_at(int(address), size)
        for address, size in zip(arena.entry_addresses(half), sizes, strict=True)
    ]


def filled_with(sequence: int) -> list[bytes]:
    return [bytes([sequence]) * size for size in LAYOUT.entry_bytes]


# Layout


@given(st.lists(st.integers(0, 20_000), max_size=40))
def test_layout_is_aligned_and_its_entries_do_not_overlap(sizes: list[int]) -> None:
    layout = ArenaLayout(tuple(sizes))
    assert all(offset % 256 == 0 for offset in layout.offsets)
    assert layout.half_bytes % 4096 == layout.control_bytes % 4096 == 0
    ends = [offset + size for offset, size in zip(layout.offsets, sizes, strict=True)]
    assert all(end <= start for end, start in zip(ends, layout.offsets[1:], strict=False))
    assert max(ends, default=0) <= layout.half_bytes
    assert layout.control_bytes >= 256 + 64 * 64 + 2 * 8 * len(sizes)
    assert layout.total_bytes == layout.control_bytes + 2 * layout.half_bytes


@pytest.mark.parametrize("size", [-1, 1.0, True, None])
def test_layout_refuses_a_size_that_is_none(size: object) -> None:
    with pytest.raises(LayoutMismatch, match="entry 1 has size"):
        ArenaLayout((4, size))  # type: ignore[arg-type]


def test_addresses_follow_the_layout(writer: ArenaWriter, reader: ArenaReader) -> None:
    for arena in (writer, reader):
        first, second = arena.entry_addresses(0), arena.entry_addresses(1)
        assert (first.dtype, first.shape) == (np.uint64, (3,))
        assert not np.any(first % 256)
        assert first[0] % 4096 == 0
        np.testing.assert_array_equal(first - first[0], np.array(LAYOUT.offsets, np.uint64))
        np.testing.assert_array_equal(second - first, np.uint64(LAYOUT.half_bytes))


def test_a_rank_without_entries_still_publishes() -> None:
    none = np.zeros(0, np.uint64)
    with (
        contextlib.closing(ArenaWriter(ArenaLayout(()), RANK, SPEC)) as writer,
        contextlib.closing(ArenaReader(writer.handle, SPEC)) as reader,
    ):
        writer.begin(1)
        writer.publish(1, 5, none)
        assert reader.pin(1, 5).digests.shape == (0,)


# Publish, pin, release


def test_a_pinned_half_is_what_was_published(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=-9)
    pinned = reader.pin(1, -9)
    assert pinned.half == 1
    np.testing.assert_array_equal(pinned.digests, digests_for(1))
    assert entries(reader, pinned.half) == filled_with(1)


def test_digests_are_a_copy(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    digests = reader.pin(1, 1).digests
    reader.release()
    publish(writer, 3, version=3)
    np.testing.assert_array_equal(digests, digests_for(1))


def test_both_halves_serve_at_once(writer: ArenaWriter) -> None:
    with (
        contextlib.closing(ArenaReader(writer.handle, SPEC)) as old,
        contextlib.closing(ArenaReader(writer.handle, SPEC)) as new,
    ):
        publish(writer, 1, version=1)
        publish(writer, 2, version=2)
        old_half, new_half = old.pin(1, 1).half, new.pin(2, 2).half
        assert entries(old, old_half) == filled_with(1)
        assert entries(new, new_half) == filled_with(2)


def test_a_pin_on_one_half_leaves_the_other_free(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    publish(writer, 2, version=2)
    reader.pin(2, 2)
    publish(writer, 3, version=3)
    assert entries(reader, 0) == filled_with(2)


def test_sequences_may_be_skipped(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    publish(writer, 7, version=70)
    assert reader.latest() == (7, 70)
    assert reader.pin(7, 70).half == 1


def test_latest_follows_publish_and_ignores_what_is_begun(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    assert reader.latest() == (0, -1)
    publish(writer, 1, version=10)
    assert reader.latest() == (1, 10)
    publish(writer, 2, version=20)
    writer.begin(3)
    assert reader.latest() == (2, 20)
    writer.abandon(3)
    assert reader.latest() == (2, 20)


def test_an_abandoned_sequence_can_be_tried_again(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    writer.begin(3)
    writer.abandon(3)
    with pytest.raises(WriterTimeout, match="half 1 is EMPTY"):
        reader.pin(3, 3)
    publish(writer, 3, version=3)
    assert entries(reader, reader.pin(3, 3).half) == filled_with(3)


def test_a_released_half_can_be_overwritten(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    reader.pin(1, 1)
    reader.release()
    reader.release()
    publish(writer, 3, version=3)
    assert entries(reader, reader.pin(3, 3).half) == filled_with(3)


def test_closing_a_reader_releases_its_pin(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    reader.pin(1, 1)
    reader.close()
    publish(writer, 3, version=3)


# Waiting


def test_a_kept_half_is_a_reader_timeout_and_stays_published(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    publish(writer, 1, version=1)
    half = reader.pin(1, 1).half
    kept = rf"rank {RANK}: reader 0 \(pid {os.getpid()}\) keeps sequence 1"
    with pytest.raises(ReaderTimeout, match=kept):
        writer.begin(3)
    assert entries(reader, half) == filled_with(1)
    reader.release()
    assert entries(reader, reader.pin(1, 1).half) == filled_with(1)
    reader.release()
    publish(writer, 3, version=3)


def test_an_interrupted_wait_leaves_the_old_content(
    writer: ArenaWriter, reader: ArenaReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(half: int) -> None:
        raise KeyboardInterrupt

    publish(writer, 1, version=1)
    monkeypatch.setattr(writer, "_wait_for_readers", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.begin(3)
    assert entries(reader, reader.pin(1, 1).half) == filled_with(1)


def test_a_late_publish_is_a_writer_timeout(writer: ArenaWriter, reader: ArenaReader) -> None:
    with pytest.raises(WriterTimeout, match=rf"trainer rank {RANK} .* sequence 1 within 0.02 s"):
        reader.pin(1, 1)
    writer.begin(2)
    with pytest.raises(WriterTimeout, match="within 0 s; its half 0 is WRITING"):
        reader.pin(2, 2, timeout_s=0)


def test_a_closed_writer_is_gone(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    writer.close()
    gone = rf"trainer rank {RANK} \(pid {os.getpid()}\) is gone"
    with pytest.raises(WriterTimeout, match=gone):
        reader.pin(2, 2, timeout_s=30)
    assert entries(reader, reader.pin(1, 1).half) == filled_with(1)


# Stale sequences and versions


def test_a_replaced_sequence_is_stale(writer: ArenaWriter, reader: ArenaReader) -> None:
    for sequence in (1, 2, 3):
        publish(writer, sequence, version=sequence)
    with pytest.raises(StaleArena, match="sequence 1 was replaced; the newest published is 3"):
        reader.pin(1, 1)


def test_a_skipped_sequence_is_stale_without_waiting(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    publish(writer, 1, version=1)
    publish(writer, 3, version=3)
    with pytest.raises(StaleArena, match="sequence 2 was replaced"):
        reader.pin(2, 2, timeout_s=30)


def test_another_version_is_stale_and_not_kept(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=11)
    with pytest.raises(StaleArena, match="holds version 11, the ticket says 12"):
        reader.pin(1, 12)
    publish(writer, 3, version=13)


@pytest.mark.parametrize("sequence", [0, -1, 2**63])
def test_sequences_that_cannot_be(writer: ArenaWriter, reader: ArenaReader, sequence: int) -> None:
    with pytest.raises(StaleArena, match=f"sequence {sequence}"):
        writer.begin(sequence)
    with pytest.raises(StaleArena, match=f"sequence {sequence}"):
        reader.pin(sequence, 1)


def test_the_writer_keeps_its_own_order(writer: ArenaWriter) -> None:
    publish(writer, 5, version=5)
    for sequence in (5, 4):
        with pytest.raises(StaleArena, match=f"sequence {sequence} cannot follow 5"):
            writer.begin(sequence)
    for give_up in (writer.abandon, lambda s: writer.publish(s, 6, digests_for(6))):
        with pytest.raises(StaleArena, match="sequence 6 was not begun"):
            give_up(6)
    writer.begin(6)
    with pytest.raises(StaleArena, match="sequence 6 is begun"):
        writer.begin(7)


def test_one_pin_at_a_time(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    publish(writer, 2, version=2)
    reader.pin(1, 1)
    with pytest.raises(StaleArena, match="still pins sequence 1"):
        reader.pin(2, 2)


@pytest.mark.parametrize(
    "digests", [np.zeros(2, np.uint64), np.zeros(3, np.int64), np.zeros((3, 1), np.uint64)]
)
def test_publish_wants_one_digest_per_entry(writer: ArenaWriter, digests: np.ndarray) -> None:
    writer.begin(1)
    with pytest.raises(LayoutMismatch, match="expected uint64 \\[3\\]"):
        writer.publish(1, 1, digests)


def test_publish_wants_a_64_bit_version(writer: ArenaWriter) -> None:
    writer.begin(1)
    with pytest.raises(LayoutMismatch, match="does not fit in 64 bits"):
        writer.publish(1, 2**63, digests_for(1))


# Closing


def test_close_may_be_repeated_and_ends_use(writer: ArenaWriter, reader: ArenaReader) -> None:
    publish(writer, 1, version=1)
    reader.pin(1, 1)
    for arena in (reader, writer):
        arena.close()
        arena.close()
    reader.release()
    uses = [
        lambda: writer.begin(2),
        lambda: writer.publish(2, 2, digests_for(2)),
        lambda: writer.abandon(2),
        lambda: writer.entry_addresses(0),
        lambda: reader.pin(1, 1),
        lambda: reader.entry_addresses(0),
        lambda: reader.latest(),
    ]
    for use in uses:
        with pytest.raises(TransportUnavailable, match=rf"rank {RANK}.* is closed"):
            use()
