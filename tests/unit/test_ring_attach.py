"""What a bucket ring refuses to attach to, altered words, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter, RingReader, RingWriter
from lora_refit.arena.layout import (
    HALF_HEADERS_OFFSET,
    READER_WORDS_OFFSET,
    RING_BYTES,
    RING_OFFSET,
)
from lora_refit.errors import (
    LayoutMismatch,
    ReaderTimeout,
    RefitError,
    StaleArena,
    TransportUnavailable,
    WriterTimeout,
)

BUCKET_BYTES = 5000
NOTES = 3
BUCKETS = 7
SPEC = bytes(range(32))
RANK = 3
SHORT_S = 0.02
NOTE_WORDS = 88
"""Offset on the control page."""
SESSION, ASK = 16, 24
"""Offsets in a reader's line."""


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(BUCKET_BYTES, NOTES, RANK, SPEC, timeout_s=SHORT_S)
    with contextlib.closing(ring) as writer:
        writer.offer(1, BUCKETS)
        yield writer


@pytest.fixture
def reader(writer: RingWriter) -> Iterator[RingReader]:
    ring = RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES, timeout_s=SHORT_S)
    with contextlib.closing(ring) as reader:
        reader.open(1)
        yield reader


def make(writer: RingWriter, bucket: int) -> int:
    half = writer.begin(bucket)
    assert half is not None
    writer.publish(bucket, half, bucket, np.zeros(NOTES))
    return half


def alter(writer: RingWriter, offset: int, value: bytes) -> None:
    os.pwrite(writer.handle.fd, value, offset)


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


POISONS = [word(value) for value in (1, 3, 2**32, 2**63, 2**64 - 1)]


def open_descriptors_and_mappings() -> tuple[int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:lora_refit")


# Attaching to something else


@pytest.mark.parametrize(
    ("digest", "bucket_bytes", "note_words", "message"),
    [
        (bytes(32), BUCKET_BYTES, NOTES, f"bucket ring of trainer rank {RANK} .*layout digest"),
        (SPEC, 2 * BUCKET_BYTES, NOTES, "its entries need"),
        (SPEC, BUCKET_BYTES, NOTES + 1, "note_words is 4, the handle says 5"),
        (SPEC, BUCKET_BYTES, 10_000, "its entries need"),
        (SPEC, -1, NOTES, "entry 0 has size -1"),
        (SPEC, BUCKET_BYTES, -1, "-1 note words"),
    ],
)
def test_a_ring_of_other_sizes(
    writer: RingWriter, digest: bytes, bucket_bytes: int, note_words: int, message: str
) -> None:
    with pytest.raises(LayoutMismatch, match=message):
        RingReader(writer.handle, digest, bucket_bytes, note_words)


def test_arenas_and_rings_are_told_apart(writer: RingWriter) -> None:
    with pytest.raises(LayoutMismatch, match="note_words is 4, the handle says 0"):
        ArenaReader(writer.handle, SPEC)
    with (
        contextlib.closing(ArenaWriter(ArenaLayout((BUCKET_BYTES,)), RANK, SPEC)) as arena,
        pytest.raises(LayoutMismatch, match="note_words is 0, the handle says 1"),
    ):
        RingReader(arena.handle, SPEC, BUCKET_BYTES, 0)


@pytest.mark.parametrize("poison", POISONS)
def test_an_altered_number_of_notes(writer: RingWriter, poison: bytes) -> None:
    alter(writer, NOTE_WORDS, poison)
    with pytest.raises(LayoutMismatch, match="note_words is"):
        RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES)


def test_another_ring_under_a_reused_descriptor(writer: RingWriter) -> None:
    handle = msgspec.structs.replace(writer.handle, token=bytes(16))
    with pytest.raises(TransportUnavailable, match="token differs"):
        RingReader(handle, SPEC, BUCKET_BYTES, NOTES)


def test_a_ring_without_bytes_or_notes() -> None:
    with (
        contextlib.closing(RingWriter(0, 0, RANK, SPEC)) as writer,
        contextlib.closing(RingReader(writer.handle, SPEC, 0, 0)) as reader,
    ):
        writer.offer(1, 1)
        half = writer.begin(0)
        assert half is not None
        writer.publish(0, half, 9, np.zeros(0))
        reader.open(1)
        taken = reader.take(0)
        assert (taken.digest, taken.notes.shape) == (9, (0,))


# Altered words


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("offset", range(0, 32, 8))
def test_an_altered_ring_word_moves_no_access(
    writer: RingWriter, reader: RingReader, offset: int, poison: bytes
) -> None:
    """Publication, buckets, withdrawn, failed: readers get a bucket or a typed error."""
    make(writer, 0)
    alter(writer, RING_OFFSET + offset, poison)
    for bucket in (0, 3, 2**62):
        with contextlib.suppress(RefitError):
            assert reader.take(bucket, timeout_s=0).digest == bucket
            reader.release()
    assert writer.wanted() == []
    writer.offer(2, BUCKETS)
    reader.end()
    reader.open(2)


def test_altered_messages_are_text(writer: RingWriter, reader: RingReader) -> None:
    alter(writer, RING_OFFSET, b"\xff" * RING_BYTES)
    alter(writer, RING_OFFSET + 24, word(1))
    with pytest.raises(WriterTimeout, match="gave up publication 1: �+; publish again"):
        reader.take(0)


@pytest.mark.parametrize("poison", POISONS)
def test_altered_half_headers_move_no_access(
    writer: RingWriter, reader: RingReader, poison: bytes
) -> None:
    make(writer, 0)
    make(writer, 1)
    alter(writer, HALF_HEADERS_OFFSET, poison * 16)
    with contextlib.suppress(WriterTimeout):
        reader.take(0)
        reader.release()
    assert writer.resident() == {0, 1}
    make(writer, 5)
    assert reader.take(5).digest == 5


@pytest.mark.parametrize("sequence", [1, 3, 2**63, 2**64 - 2])
def test_a_sequence_that_is_not_of_its_half_is_not_pinned(
    writer: RingWriter, reader: RingReader, sequence: int
) -> None:
    """Its pin would keep the other half, or none."""
    half = make(writer, 0)
    alter(writer, HALF_HEADERS_OFFSET + 64 * half, word(sequence + half))
    with pytest.raises(WriterTimeout, match="did not make bucket 0"):
        reader.take(0)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("offset", [SESSION, ASK])
def test_altered_reader_words_ask_for_nothing(
    writer: RingWriter, reader: RingReader, offset: int, poison: bytes
) -> None:
    """Those of the reader itself and of a place that nobody has."""
    reader.ask(2)
    for index in (0, 9):
        alter(writer, READER_WORDS_OFFSET + 64 * index + offset, poison)
    wanted = writer.wanted()
    assert set(wanted) <= set(range(BUCKETS))
    for bucket in wanted:
        make(writer, bucket)
    if offset == SESSION:
        with pytest.raises(ReaderTimeout, match=rf"reader 0 \(pid {os.getpid()}\) has a session"):
            writer.wait_idle()
    reader.end()
    writer.wait_idle()
    assert os.pread(writer.handle.fd, 8, READER_WORDS_OFFSET + 64 * 9 + SESSION) == word(0)


def test_an_altered_pin_holds_up_the_writer_no_longer_than_its_time(
    writer: RingWriter, reader: RingReader
) -> None:
    alter(writer, READER_WORDS_OFFSET, b"\xff" * 64 * 64)
    for bucket in (0, 1, 2):
        make(writer, bucket)
        assert writer.resident() == {bucket}, "the other half looks pinned"
    with pytest.raises(ReaderTimeout, match="still reads a bucket of publication 1"):
        writer.offer(2, 1)
    reader.end()
    writer.offer(2, 1)


# Closing


def test_close_may_be_repeated_and_ends_use(writer: RingWriter, reader: RingReader) -> None:
    make(writer, 0)
    reader.take(0)
    for ring in (reader, writer):
        ring.close()
        ring.close()
    reader.release()
    reader.end()
    uses = [
        lambda: writer.wait_idle(),
        lambda: writer.offer(2, 1),
        lambda: writer.wanted(),
        lambda: writer.wait_wanted(0),
        lambda: writer.begin(1),
        lambda: writer.address(0),
        lambda: writer.publish(1, 0, 0, np.zeros(NOTES)),
        lambda: writer.abandon(0),
        lambda: writer.fail("late"),
        lambda: reader.open(1),
        lambda: reader.ask(1),
        lambda: reader.take(1),
    ]
    for use in uses:
        with pytest.raises(TransportUnavailable, match=rf"rank {RANK}.* is closed"):
            use()


def test_a_closed_reader_holds_up_nothing(writer: RingWriter) -> None:
    reader = RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES)
    reader.open(1)
    make(writer, 0)
    reader.take(0)
    reader.ask(1)
    reader.close()
    assert writer.wanted() == []
    writer.wait_idle()
    writer.offer(2, 1)


def test_a_reader_in_a_used_place_starts_with_nothing(writer: RingWriter) -> None:
    for offset in (0, SESSION, ASK):
        alter(writer, READER_WORDS_OFFSET + offset, word(4))
    reader = RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES)
    with contextlib.closing(reader):
        assert os.pread(writer.handle.fd, 32, READER_WORDS_OFFSET)[16:] == bytes(16)
        with pytest.raises(StaleArena, match="no session"):
            reader.take(1)
        writer.wait_idle()


def test_cycles_and_dropped_rings_leave_nothing_behind() -> None:
    before = open_descriptors_and_mappings()
    for _ in range(50):
        writer = RingWriter(BUCKET_BYTES, NOTES, RANK, SPEC)
        writer.offer(1, 1)
        reader = RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES)
        reader.open(1)
        make(writer, 0)
        reader.take(0)
        with pytest.raises(LayoutMismatch):
            RingReader(writer.handle, bytes(32), BUCKET_BYTES, NOTES)
        del writer, reader
    assert open_descriptors_and_mappings() == before
