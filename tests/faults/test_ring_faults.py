"""Real processes that share a bucket ring, and die, stop or fork meanwhile."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import pytest
from children import LONG_S, Child
from ring_cases import (
    BUCKETS,
    RANK,
    SHORT_S,
    attach,
    is_whole,
    make,
    new_writer,
    read_passes,
    serving,
)

from lora_refit.arena import RingReader, RingWriter
from lora_refit.errors import ReaderTimeout, TransportUnavailable, WriterTimeout
from lora_refit.messages import ArenaHandle

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def writer() -> Iterator[RingWriter]:
    with contextlib.closing(new_writer()) as writer:
        writer.offer(1, BUCKETS)
        yield writer


# Readers in other processes


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("firsts", [(0,), (0, 0), (0, 3), (5, 1, 3)])
def test_every_reader_gets_every_bucket(
    writer: RingWriter, firsts: tuple[int, ...], ahead: bool
) -> None:
    """Two publications with two passes each, by readers that start at the given buckets."""
    for publication in (2, 3):
        with contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(Child(read_passes, writer.handle, publication, first, ahead))
                for first in firsts
            ]
            assert [child.receive() for child in children] == ["attached"] * len(firsts)
            writer.offer(publication, BUCKETS)
            made = stack.enter_context(serving(writer, publication))
            for child in children:
                child.connection.send("go")
            assert [child.receive() for child in children] == [2 * BUCKETS] * len(firsts)
            writer.wait_idle()
        print(f"{len(firsts)} readers from {firsts}, ahead={ahead}: {len(made)} buckets made")
        assert set(made) == set(range(BUCKETS))


# Readers that die or stop


def hold(connection: Connection, handle: ArenaHandle, doing: str) -> None:
    """Open a session, get as far as `doing` says, and stay there until killed."""
    reader = attach(handle, LONG_S)
    reader.open(1)
    if doing in ("pin", "pin and ask"):
        reader.take(0)
    if doing in ("ask", "pin and ask"):
        reader.ask(1)
    connection.send(doing)
    if doing == "wait":
        reader.take(3)
    connection.recv()
    reader.end()
    connection.send("ended")
    connection.recv()


@pytest.mark.parametrize("doing", ["nothing", "pin", "ask", "pin and ask", "wait"])
def test_a_killed_reader_holds_up_nothing(doing: str) -> None:
    with contextlib.closing(new_writer(timeout_s=0)) as writer:
        writer.offer(1, BUCKETS)
        make(writer, 1, 0)
        make(writer, 1, 1)
        with Child(hold, writer.handle, doing) as child:
            assert child.receive() == doing
            if doing == "wait":
                assert writer.wait_wanted(LONG_S) == [3]
            session = rf"pid {child.pid}\) has a session of publication 1"
            with pytest.raises(ReaderTimeout, match=session):
                writer.wait_idle()
            if "pin" in doing:
                with pytest.raises(ReaderTimeout, match=rf"pid {child.pid}\) still reads"):
                    writer.offer(2, BUCKETS)
            child.kill()
        assert writer.wanted() == []
        assert make(writer, 1, 4)
        assert make(writer, 1, 5)
        assert writer.resident() == {4, 5}, "both halves are free again"
        writer.wait_idle()
        writer.offer(2, BUCKETS)
        with contextlib.closing(attach(writer.handle)) as successor, serving(writer, 2):
            successor.open(2)
            assert is_whole(successor.take(6, LONG_S), 2, 6)


def test_others_are_served_when_a_reader_is_killed_between_them(writer: RingWriter) -> None:
    with (
        Child(read_passes, writer.handle, 1, 0, True) as lives,
        Child(hold, writer.handle, "wait") as dies,
        serving(writer, 1),
    ):
        assert lives.receive() == "attached"
        assert dies.receive() == "wait"
        lives.connection.send("go")
        dies.kill()
        assert lives.receive() == 2 * BUCKETS


def test_a_stopped_reader_is_named_and_goes_on(writer: RingWriter) -> None:
    make(writer, 1, 0)
    with Child(hold, writer.handle, "pin") as child:
        child.receive()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        with pytest.raises(ReaderTimeout, match=rf"reader 0 \(pid {child.pid}\) has a session"):
            writer.wait_idle()
        with serving(writer, 1), contextlib.closing(attach(writer.handle, LONG_S)) as other:
            other.open(1)
            for bucket in range(BUCKETS):
                assert is_whole(other.take(bucket), 1, bucket)
                other.release()
        os.kill(child.pid, signal.SIGCONT)
        child.connection.send("end")
        assert child.receive() == "ended"
        writer.wait_idle()


# Writers that die or fail


def offer_and_wait(connection: Connection) -> None:
    writer = new_writer()
    writer.offer(1, BUCKETS)
    make(writer, 1, 0)
    writer.begin(1)
    if os.fork() == 0:
        # A forked data loader: it outlives the trainer by a moment, and ends with the test's pipe.
        connection.poll(LONG_S)
        os._exit(0)
    connection.send(writer.handle)
    while True:
        signal.pause()


def test_a_waiting_reader_hears_that_the_writer_was_killed() -> None:
    with (
        Child(offer_and_wait) as child,
        contextlib.ExitStack() as stack,
    ):
        handle = child.receive()
        waiting, pinning = (
            stack.enter_context(contextlib.closing(attach(handle, LONG_S))) for _ in range(2)
        )
        waiting.open(1)
        pinning.open(1)
        taken = pinning.take(0)
        killer = threading.Timer(SHORT_S, child.kill)
        killer.start()
        gone = rf"rank {RANK} \(pid {child.pid}\) is gone before it made bucket 1"
        with pytest.raises(WriterTimeout, match=gone):
            waiting.take(1)
        killer.join()
        assert is_whole(taken, 1, 0)
        pinning.release()
        assert is_whole(pinning.take(0), 1, 0)
        waiting.end()
        with pytest.raises(WriterTimeout, match="is gone before it offered publication 2"):
            waiting.open(2)


def wait_for_a_bucket(connection: Connection, handle: ArenaHandle) -> None:
    reader = attach(handle, LONG_S)
    reader.open(1)
    connection.send("open")
    try:
        reader.take(2)
    except WriterTimeout as error:
        connection.send(str(error))
    reader.end()


def test_a_failing_writer_tells_readers_at_once(writer: RingWriter) -> None:
    with Child(wait_for_a_bucket, writer.handle) as child:
        assert child.receive() == "open"
        assert writer.wait_wanted(LONG_S) == [2]
        writer.fail("merging broke")
        assert "gave up publication 1: merging broke" in child.receive()
        child.process.join()
        writer.wait_idle()


# Forked children of a ring's owner


def use_and_close(connection: Connection, writer: RingWriter, reader: RingReader) -> None:
    uses: list[Callable[[], object]] = [
        lambda: writer.wait_idle(),
        lambda: writer.offer(2, 1),
        lambda: writer.wanted(),
        lambda: writer.begin(1),
        lambda: writer.fail("child"),
        lambda: reader.take(1),
        lambda: reader.ask(1),
        lambda: reader.release(),
        lambda: reader.end(),
    ]
    refusals = 0
    for use in uses:
        with contextlib.suppress(TransportUnavailable):
            use()
            continue
        refusals += 1
    reader.close()
    writer.close()
    connection.send(refusals == len(uses))


def test_a_forked_child_leaves_its_parents_ring_alone(writer: RingWriter) -> None:
    with contextlib.closing(attach(writer.handle)) as reader:
        reader.open(1)
        make(writer, 1, 0)
        taken = reader.take(0)
        reader.ask(4)
        with Child(use_and_close, writer, reader) as child:
            assert child.receive()
            child.process.join()
        assert writer.wanted() == [4]
        with pytest.raises(ReaderTimeout, match=rf"pid {os.getpid()}\) has a session"):
            writer.wait_idle()
        with pytest.raises(ReaderTimeout, match=rf"pid {os.getpid()}\) still reads"):
            writer.offer(2, BUCKETS)
        assert is_whole(taken, 1, 0)
        reader.release()
        with pytest.raises(WriterTimeout, match="did not make bucket 1"):
            reader.take(1)
        make(writer, 1, 4)
        assert is_whole(reader.take(4), 1, 4)
