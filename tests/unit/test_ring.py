"""One process, both sides: a bucket ring step by step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from lora_refit.arena import RingReader, RingWriter, Taken, ring_demand
from lora_refit.arena.ring_words import MESSAGE_BYTES, Ask
from lora_refit.errors import LayoutMismatch, ReaderTimeout, StaleArena, WriterTimeout

BUCKET_BYTES = 5000
NOTES = 3
BUCKETS = 7
SPEC = bytes(range(32))
RANK = 3
SHORT_S, LONG_S = 0.02, 30.0

Attach = Callable[[], RingReader]


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    ring = RingWriter(BUCKET_BYTES, NOTES, RANK, SPEC, timeout_s=SHORT_S)
    with contextlib.closing(ring) as writer:
        writer.offer(1, BUCKETS)
        yield writer


@pytest.fixture
def attach(writer: RingWriter) -> Iterator[Attach]:
    """Makes readers with a session of publication 1; they are closed in the end."""
    with contextlib.ExitStack() as stack:

        def attach() -> RingReader:
            ring = RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES, timeout_s=SHORT_S)
            reader = stack.enter_context(contextlib.closing(ring))
            reader.open(1)
            return reader

        yield attach


@pytest.fixture
def reader(attach: Attach) -> RingReader:
    return attach()


def digest_of(bucket: int) -> int:
    return 2**64 - 1 - bucket


def notes_of(bucket: int) -> np.ndarray:
    return np.array([bucket, -0.0, 1e-300])


def fill_and_publish(writer: RingWriter, bucket: int, half: int) -> None:
    ctypes.memset(writer.address(half), bucket + 1, BUCKET_BYTES)
    writer.publish(bucket, half, digest_of(bucket), notes_of(bucket))


def make(writer: RingWriter, bucket: int) -> int:
    half = writer.begin(bucket)
    assert half is not None
    fill_and_publish(writer, bucket, half)
    return half


def is_whole(taken: Taken, bucket: int) -> bool:
    content = ctypes.string_at(taken.address, BUCKET_BYTES)
    return (
        content == bytes([bucket + 1]) * BUCKET_BYTES
        and taken.digest == digest_of(bucket)
        and taken.notes.dtype == np.uint64
        and taken.notes.tobytes() == notes_of(bucket).tobytes()
    )


def wait_for(reader: RingReader, bucket: int) -> None:
    """What other participants see of a reader inside `take(bucket)`."""
    reader._words.set_ask(reader._index, Ask(bucket, waits=True))


# Buckets come as they are asked for


def test_two_passes_over_more_buckets_than_halves(writer: RingWriter, reader: RingReader) -> None:
    for bucket in [*range(BUCKETS)] * 2:
        assert writer.wanted() == []
        reader.ask(bucket)
        assert writer.wanted() == [bucket]
        half = make(writer, bucket)
        assert writer.wanted() == []
        taken = reader.take(bucket, timeout_s=0)
        assert bucket in writer.resident()
        assert taken.address % 4096 == 0
        assert half in (0, 1)
        assert is_whole(taken, bucket)
        reader.release()


def test_what_fits_is_made_unasked_and_stays(writer: RingWriter, attach: Attach) -> None:
    writer.offer(2, 2)
    assert {make(writer, 0), make(writer, 1)} == {0, 1}
    readers = [RingReader(writer.handle, SPEC, BUCKET_BYTES, NOTES) for _ in range(2)]
    for reader in readers:
        reader.open(2)
        for bucket in (0, 1, 0, 1):
            assert is_whole(reader.take(bucket, timeout_s=0), bucket)
            reader.release()
        reader.close()
    assert writer.resident() == {0, 1}
    assert writer.wanted() == []


def test_the_next_bucket_is_made_while_one_is_pinned(
    writer: RingWriter, reader: RingReader
) -> None:
    reader.ask(0)
    make(writer, 0)
    taken = reader.take(0)
    reader.ask(1)
    assert writer.wait_wanted(0) == [1]
    make(writer, 1)
    assert is_whole(taken, 0)
    reader.release()
    assert is_whole(reader.take(1, timeout_s=0), 1)


def test_readers_at_different_buckets(writer: RingWriter, attach: Attach) -> None:
    first, second, third = attach(), attach(), attach()
    wait_for(first, 4)
    wait_for(second, 2)
    third.ask(0)
    assert writer.wanted() == [2, 4, 0], "those that are waited for come first"
    make(writer, 2)
    make(writer, 4)
    taken = first.take(4, timeout_s=0), second.take(2, timeout_s=0)
    assert writer.wanted() == [0]
    assert writer.begin(0) is None
    assert writer.wait_wanted(SHORT_S) == [], "nothing can be made"
    first.release()
    assert writer.wait_wanted(0) == [0]
    make(writer, 0)
    assert is_whole(taken[1], 2)
    assert is_whole(third.take(0, timeout_s=0), 0)


@pytest.mark.parametrize("half", [0, 1])
def test_either_half_alone_serves(writer: RingWriter, attach: Attach, half: int) -> None:
    pins, asks = attach(), attach()
    in_half = {make(writer, bucket): bucket for bucket in (0, 1)}
    pins.take(in_half[1 - half])
    for bucket in (2, 3, 4):
        asks.ask(bucket)
        assert writer.wait_wanted(0) == [bucket]
        assert make(writer, bucket) == half
        asks.take(bucket)
        asks.release()


def test_nothing_is_wanted_while_nobody_asks(writer: RingWriter, reader: RingReader) -> None:
    assert writer.wait_wanted(SHORT_S) == []
    reader.ask(3)
    assert writer.wait_wanted(LONG_S) == [3]
    reader.end()
    assert writer.wait_wanted(SHORT_S) == []
    reader.open(1)
    assert writer.wanted() == [], "a new session starts without asks"


def test_a_take_that_ends_without_a_bucket_asks_no_longer(
    writer: RingWriter, reader: RingReader
) -> None:
    with pytest.raises(WriterTimeout):
        reader.take(3)
    assert writer.wanted() == []


# What stays in its half


def test_a_pinned_bucket_stays(writer: RingWriter, attach: Attach) -> None:
    first, second = attach(), attach()
    half = make(writer, 0)
    taken = first.take(0)
    for bucket in (1, 2, 3):
        wait_for(second, bucket)
        assert make(writer, bucket) == 1 - half
    assert is_whole(taken, 0)


def test_a_bucket_asked_for_ahead_gives_way_to_a_long_wait_only(
    writer: RingWriter, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, other, third = attach(), attach(), attach()
    ahead.ask(0)
    other.ask(1)
    make(writer, 0)
    make(writer, 1)
    third.ask(2)
    assert writer.begin(2) is None
    wait_for(third, 2)
    assert writer.wanted() == [2]
    assert writer.begin(2) is None
    assert is_whole(ahead.take(0, timeout_s=0), 0), "nothing was lost by looking"
    monkeypatch.setattr(ring_demand, "PATIENCE_S", -1.0)
    make(writer, 2)
    assert writer.resident() == {0, 2}
    assert writer.wanted() == [1]
    assert is_whole(third.take(2, timeout_s=0), 2)
    assert writer.begin(1) is None


def test_what_nobody_asks_for_goes_first_and_then_the_oldest(
    writer: RingWriter, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_demand, "PATIENCE_S", -1.0)
    ahead, other = attach(), attach()
    ahead.ask(0)
    for bucket in (0, 1):
        make(writer, bucket)
    wait_for(other, 2)
    make(writer, 2)
    assert writer.resident() == {0, 2}
    ahead.ask(6)
    wait_for(other, 3)
    make(writer, 3)
    assert writer.resident() == {2, 3}


def test_a_bucket_that_is_waited_for_stays(
    writer: RingWriter, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring_demand, "PATIENCE_S", -1.0)
    readers = [attach(), attach(), attach()]
    for bucket, reader in enumerate(readers):
        wait_for(reader, bucket)
    make(writer, 0)
    make(writer, 1)
    assert writer.wanted() == [2]
    assert writer.begin(2) is None
    for bucket in (0, 1):
        assert is_whole(readers[bucket].take(bucket, timeout_s=0), bucket)


def test_an_ask_that_comes_while_a_half_is_hidden_keeps_the_bucket(
    writer: RingWriter, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, late = attach(), attach()
    make(writer, 0)
    make(writer, 1)
    early.take(1)
    hide = writer._page.hide

    def ask_then_hide(half: int) -> None:
        wait_for(late, 0)
        hide(half)

    monkeypatch.setattr(writer._page, "hide", ask_then_hide)
    assert writer.begin(2) is None
    assert is_whole(late.take(0, timeout_s=0), 0)


def test_an_interrupted_begin_changes_nothing(
    writer: RingWriter, reader: RingReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(half: int) -> None:
        raise KeyboardInterrupt

    make(writer, 0)
    make(writer, 1)
    monkeypatch.setattr(writer._arena, "live_holders", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.begin(2)
    for bucket in (0, 1):
        assert is_whole(reader.take(bucket, timeout_s=0), bucket)
        reader.release()


def test_an_abandoned_bucket_is_wanted_again(writer: RingWriter, reader: RingReader) -> None:
    reader.ask(5)
    half = writer.begin(5)
    assert half is not None
    assert writer.wanted() == []
    writer.abandon(half)
    assert writer.wanted() == [5]
    with pytest.raises(WriterTimeout, match="halves are EMPTY and EMPTY"):
        reader.take(5)
    make(writer, 5)
    assert is_whole(reader.take(5), 5)


def test_readers_that_block_each_other_across_rings_go_on() -> None:
    """Asks ahead hold both halves of one ring, pins under a wait for it both halves of the other."""
    with contextlib.ExitStack() as stack:

        def open_stack(ring: RingWriter | RingReader) -> RingWriter | RingReader:
            return stack.enter_context(contextlib.closing(ring))

        writers = [RingWriter(BUCKET_BYTES, NOTES, rank, SPEC) for rank in range(2)]
        for ring in writers:
            open_stack(ring)
            ring.offer(1, BUCKETS)

        def attach_to_both() -> list[RingReader]:
            rings = [RingReader(w.handle, SPEC, BUCKET_BYTES, NOTES, LONG_S) for w in writers]
            for ring in rings:
                open_stack(ring)
                ring.open(1)
            return rings

        workers = [attach_to_both() for _ in range(4)]
        for bucket in (0, 1):
            workers[bucket][1].ask(bucket)
            make(writers[1], bucket)
        for bucket in (2, 3):
            make(writers[0], bucket)
            workers[bucket][0].take(bucket)

        def finish(bucket: int) -> None:
            rings = workers[bucket]
            if bucket < 2:
                rings[0].take(bucket)
            done.append(is_whole(rings[1].take(bucket), bucket))
            for ring in rings:
                ring.release()

        done: list[bool] = []
        ended = threading.Event()
        threads = [threading.Thread(target=serve, args=(w, ended)) for w in writers]
        threads += [threading.Thread(target=finish, args=(bucket,)) for bucket in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads[2:]:
            thread.join()
        ended.set()
        for thread in threads[:2]:
            thread.join()
    assert done == [True] * 4


def serve(writer: RingWriter, ended: threading.Event) -> None:
    while not ended.is_set():
        for bucket in writer.wait_wanted(SHORT_S):
            half = writer.begin(bucket)
            if half is not None:
                fill_and_publish(writer, bucket, half)


# Publications and sessions


def test_a_new_publication_replaces_the_old(writer: RingWriter, reader: RingReader) -> None:
    make(writer, 0)
    reader.ask(0)
    writer.offer(5, 1)
    assert writer.resident() == frozenset()
    assert writer.wanted() == [], "asks of an old session do not count"
    for use in (lambda: reader.take(0, timeout_s=LONG_S), lambda: reader.ask(0)):
        with pytest.raises(StaleArena, match="publication 1 was withdrawn, the newest is 5"):
            use()
    make(writer, 0)
    reader.end()
    with pytest.raises(StaleArena, match="publication 4 was withdrawn"):
        reader.open(4, timeout_s=LONG_S)
    reader.open(5)
    assert is_whole(reader.take(0), 0)


def test_a_bucket_of_another_publication_is_not_taken(
    writer: RingWriter, reader: RingReader
) -> None:
    """Even if the reader has looked for a newer publication before it came."""
    require_served = reader._require_served

    def offer_then_nothing(publication: int) -> None:
        writer.offer(2, BUCKETS)
        make(writer, 0)
        reader._require_served = require_served  # type: ignore[method-assign]

    make(writer, 0)
    reader._require_bucket = lambda bucket: None  # type: ignore[method-assign]
    reader._require_served = offer_then_nothing  # type: ignore[method-assign]
    with pytest.raises(WriterTimeout, match="did not make bucket 0 of publication 1"):
        reader.take(0, timeout_s=0)
    make(writer, 1)
    writer.offer(3, 1)


def test_a_pin_holds_up_the_next_publication(writer: RingWriter, reader: RingReader) -> None:
    make(writer, 0)
    taken = reader.take(0)
    kept = rf"rank {RANK}: reader 0 \(pid {os.getpid()}\) still reads a bucket of publication 1"
    with pytest.raises(ReaderTimeout, match=kept):
        writer.offer(2, BUCKETS)
    assert is_whole(taken, 0)
    reader.release()
    assert is_whole(reader.take(0, timeout_s=0), 0), "it is published as before"
    reader.release()
    writer.offer(2, BUCKETS)


def test_a_session_without_a_pin_keeps_the_writer_from_being_idle(
    writer: RingWriter, attach: Attach
) -> None:
    reader = attach()
    kept = rf"rank {RANK}: reader 0 \(pid {os.getpid()}\) has a session of publication 1 after"
    with pytest.raises(ReaderTimeout, match=kept):
        writer.wait_idle()
    attach().end()  # the publication can be opened again
    reader.end()
    writer.wait_idle()
    with pytest.raises(StaleArena, match="publication 1 was withdrawn, the newest is not there"):
        reader.open(1, timeout_s=LONG_S)
    writer.wait_idle()
    writer.offer(2, BUCKETS)
    reader.open(2)


def test_a_withdrawn_publication_does_not_come_back(
    writer: RingWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    writer.wait_idle()
    monkeypatch.setattr(writer, "_wait_for_pins", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.offer(2, BUCKETS)
    assert writer._words.publication() == 0


def test_an_open_session_is_served_while_the_writer_waits(
    writer: RingWriter, attach: Attach
) -> None:
    reader, late = attach(), attach()
    late.end()
    look = writer._demand.live_sessions

    def serve_then_look() -> Iterator[int]:
        reader.ask(0)
        make(writer, 0)
        assert is_whole(reader.take(0, timeout_s=0), 0)
        with pytest.raises(WriterTimeout, match="did not offer publication 1"):
            late.open(1, timeout_s=0)
        reader.end()
        return look()

    writer._demand.live_sessions = serve_then_look  # type: ignore[method-assign]
    writer.wait_idle()


def test_a_session_begins_with_its_publication(writer: RingWriter, attach: Attach) -> None:
    reader = attach()
    reader.end()
    offer = threading.Timer(SHORT_S, writer.offer, (2, BUCKETS))
    offer.start()
    reader.open(2, timeout_s=LONG_S)
    offer.join()
    with pytest.raises(StaleArena, match="has a session of publication 2; end it before"):
        reader.open(3)


def test_a_session_that_comes_too_late_is_none(writer: RingWriter, attach: Attach) -> None:
    """The publication is hidden between the reader's look and its announcement."""
    reader = attach()
    reader.end()
    announce = reader._words.announce_session

    def idle_then_announce(index: int, publication: int) -> None:
        writer.wait_idle()
        announce(index, publication)

    reader._words.announce_session = idle_then_announce  # type: ignore[method-assign]
    with pytest.raises(StaleArena, match="publication 1 was withdrawn"):
        reader.open(1)
    with pytest.raises(StaleArena, match="has no session"):
        reader.take(0)
    writer.wait_idle()


@pytest.mark.parametrize("wait", ["_wait_for_pins", "_wait_for_sessions"])
def test_an_interrupted_wait_changes_nothing(
    writer: RingWriter, attach: Attach, monkeypatch: pytest.MonkeyPatch, wait: str
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    make(writer, 0)
    monkeypatch.setattr(writer, wait, interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.wait_idle() if wait == "_wait_for_sessions" else writer.offer(2, 1)
    assert is_whole(attach().take(0, timeout_s=0), 0)


# A writer that cannot go on


def test_a_failure_reaches_those_who_wait_and_those_who_come(
    writer: RingWriter, attach: Attach
) -> None:
    waits, comes = attach(), attach()
    comes.end()
    make(writer, 0)
    fail = threading.Timer(SHORT_S, writer.fail, ("base weight μ is gone",))
    fail.start()
    told = rf"rank {RANK} \(pid {os.getpid()}\) gave up publication 1: base weight μ is gone; publ"
    for use in (lambda: waits.take(1, LONG_S), lambda: waits.take(0), lambda: comes.open(1)):
        with pytest.raises(WriterTimeout, match=told):
            use()
    fail.join()
    waits.end()
    writer.wait_idle()
    writer.offer(2, BUCKETS)
    comes.open(2)


def test_a_failure_message_is_bounded_and_whole_utf_8(
    writer: RingWriter, reader: RingReader
) -> None:
    writer.fail("long " * MESSAGE_BYTES)
    writer.fail("a" + "\0" + "μ" * MESSAGE_BYTES + "\ud800")
    with pytest.raises(WriterTimeout) as raised:
        reader.take(0)
    assert "1: a" + "μ" * ((MESSAGE_BYTES - 1) // 2) + "; publish" in str(raised.value)


def test_a_message_that_is_replaced_while_it_is_read_is_none(
    writer: RingWriter, reader: RingReader
) -> None:
    failed = reader._words._failed

    def fail_again_then_look() -> int:
        seen = failed()
        reader._words._failed = failed  # type: ignore[method-assign]
        writer.offer(2, BUCKETS)
        writer.fail("of publication 2")
        return seen

    writer.fail("of publication 1")
    reader._words._failed = fail_again_then_look  # type: ignore[method-assign]
    with pytest.raises(StaleArena, match="publication 1 was withdrawn, the newest is 2"):
        reader.take(0)


def test_nothing_can_fail_before_it_is_offered() -> None:
    with (
        contextlib.closing(RingWriter(BUCKET_BYTES, NOTES, RANK, SPEC)) as writer,
        pytest.raises(StaleArena, match="nothing was offered that could fail with: no room"),
    ):
        writer.fail("no room")


def test_timeouts_name_the_trainer(writer: RingWriter, reader: RingReader) -> None:
    made = rf"rank {RANK} \(pid {os.getpid()}\) did not make bucket 6 of publication 1 within 0.02"
    with pytest.raises(WriterTimeout, match=made):
        reader.take(6)
    reader.end()
    with pytest.raises(WriterTimeout, match=rf"rank {RANK} .* not offer publication 2 within 0.02"):
        reader.open(2)


def test_a_closed_writer_is_gone(writer: RingWriter, reader: RingReader) -> None:
    make(writer, 0)
    writer.close()
    assert is_whole(reader.take(0), 0)
    reader.release()
    gone = rf"trainer rank {RANK} \(pid {os.getpid()}\) is gone before it"
    with pytest.raises(WriterTimeout, match=f"{gone} made bucket 1 of publication 1"):
        reader.take(1, timeout_s=LONG_S)
    reader.end()
    with pytest.raises(WriterTimeout, match=f"{gone} offered publication 2"):
        reader.open(2, timeout_s=LONG_S)


# Wrong use


def test_the_writer_keeps_its_own_order(writer: RingWriter) -> None:
    for publication in (1, 0, -1, 2**63):
        with pytest.raises(StaleArena, match=f"publication {publication} cannot follow 1"):
            writer.offer(publication, 1)
    with pytest.raises(StaleArena, match="cannot have -1 buckets"):
        writer.offer(2, -1)
    for bucket in (-1, BUCKETS):
        with pytest.raises(StaleArena, match=f"has 7 buckets, {bucket} is none of them"):
            writer.begin(bucket)
    half = writer.begin(3)
    assert half is not None
    for use in (
        lambda: writer.publish(3, 1 - half, 0, notes_of(3)),
        lambda: writer.publish(4, half, 0, notes_of(4)),
        lambda: writer.abandon(1 - half),
    ):
        with pytest.raises(StaleArena, match="was not begun in half"):
            use()
    for use in (lambda: writer.begin(3), lambda: make(writer, 3)):
        with pytest.raises(StaleArena, match="bucket 3 is resident or begun already"):
            use()
    with pytest.raises(StaleArena, match=r"buckets \[3\] are begun"):
        writer.offer(2, 1)
    fill_and_publish(writer, 3, half)
    with pytest.raises(StaleArena, match="bucket 3 is resident or begun already"):
        writer.begin(3)


@pytest.mark.parametrize(
    ("digest", "notes", "message"),
    [
        (0, np.zeros(2), r"float64 \[2\], expected uint64 or float64 \[3\]"),
        (0, np.zeros((3, 1)), r"float64 \[3, 1\]"),
        (0, np.zeros(3, np.float32), "float32"),
        (2**64, np.zeros(3), "does not fit in 64 bits"),
        (-1, np.zeros(3), "does not fit in 64 bits"),
    ],
)
def test_publish_wants_64_bit_words(
    writer: RingWriter, digest: int, notes: np.ndarray, message: str
) -> None:
    half = writer.begin(0)
    assert half is not None
    with pytest.raises(LayoutMismatch, match=message):
        writer.publish(0, half, digest, notes)
    writer.publish(0, half, 2**64 - 1, np.arange(6, dtype=np.uint64)[::2])


def test_a_reader_keeps_to_one_session_and_one_pin(writer: RingWriter, reader: RingReader) -> None:
    make(writer, 0)
    reader.take(0)
    with pytest.raises(StaleArena, match="still pins bucket 0; release it before bucket 1"):
        reader.take(1)
    for bucket in (-1, BUCKETS):
        for use in (reader.ask, reader.take):
            with pytest.raises(LayoutMismatch, match=f"has 7 buckets, {bucket} is none"):
                use(bucket)
    reader.end()
    reader.end()
    for use in (reader.ask, reader.take):
        with pytest.raises(StaleArena, match="has no session"):
            use(0)
    for publication in (0, -1, 2**63):
        with pytest.raises(StaleArena, match=f"there is no publication {publication}"):
            reader.open(publication)
