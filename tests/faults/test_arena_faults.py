"""Real processes that die, stop or fork while they share an arena.

Children are forked: they start at once, and forking is what trainers do to live arenas.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import LONG_S, Child

from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter, liveness
from lora_refit.errors import ReaderTimeout, TransportUnavailable, WriterTimeout
from lora_refit.messages import ArenaHandle

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

LAYOUT = ArenaLayout((1 << 16,))
SPEC = bytes(32)
RANK = 5
DIGESTS = np.zeros(1, np.uint64)
SHORT_S = 0.05


def words(arena: ArenaWriter | ArenaReader, half: int) -> np.ndarray:
    """The half's only entry as 64-bit words, in place."""
    address = int(arena.entry_addresses(half)[0])
    return np.frombuffer((ctypes.c_uint8 * LAYOUT.entry_bytes[0]).from_address(address), np.uint64)


def publish(writer: ArenaWriter, sequence: int) -> None:
    """Fill the half with the sequence number and publish it as version `sequence`."""
    words(writer, writer.begin(sequence))[:] = sequence
    writer.publish(sequence, sequence, DIGESTS)


def is_uniform(arena: ArenaReader, half: int, sequence: int) -> bool:
    return bool((words(arena, half) == sequence).all())


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    with contextlib.closing(ArenaWriter(LAYOUT, RANK, SPEC, timeout_s=SHORT_S)) as writer:
        yield writer


@pytest.fixture
def reader(writer: ArenaWriter) -> Iterator[ArenaReader]:
    with contextlib.closing(ArenaReader(writer.handle, SPEC, timeout_s=SHORT_S)) as reader:
        yield reader


def pin_and_hold(connection: Connection, handle: ArenaHandle, sequence: int) -> None:
    reader = ArenaReader(handle, SPEC)
    reader.pin(sequence, sequence)
    connection.send("pinned")
    connection.recv()
    reader.release()
    connection.send("released")
    connection.recv()


# Readers that die or stop


def test_a_reader_killed_while_it_pins_does_not_hold_up_the_writer() -> None:
    with contextlib.closing(ArenaWriter(LAYOUT, RANK, SPEC, timeout_s=0)) as writer:
        publish(writer, 1)
        with Child(pin_and_hold, writer.handle, 1) as child:
            child.receive()
            with pytest.raises(ReaderTimeout, match=rf"pid {child.pid}\) keeps sequence 1"):
                writer.begin(3)
            child.kill()
            publish(writer, 3)
        with contextlib.closing(ArenaReader(writer.handle, SPEC)) as successor:
            assert is_uniform(successor, successor.pin(3, 3).half, 3)


def test_a_stopped_reader_is_named_and_the_old_content_stays(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    publish(writer, 1)
    with Child(pin_and_hold, writer.handle, 1) as child:
        child.receive()
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        with pytest.raises(ReaderTimeout, match=rf"reader 1 \(pid {child.pid}\)"):
            writer.begin(3)
        assert reader.latest() == (1, 1)
        assert is_uniform(reader, reader.pin(1, 1).half, 1)
        reader.release()
        os.kill(child.pid, signal.SIGCONT)
        child.connection.send("release")
        assert child.receive() == "released"
        publish(writer, 3)


# Writers that die


def publish_once_and_wait(connection: Connection, prepare: Callable[[], object]) -> None:
    prepare()
    writer = ArenaWriter(LAYOUT, RANK, SPEC)
    publish(writer, 1)
    if os.fork() == 0:
        # A forked data loader: it outlives the trainer by a moment, and ends with the test's pipe.
        connection.poll(LONG_S)
        os._exit(0)
    connection.send(writer.handle)
    while True:
        signal.pause()


def test_a_waiting_reader_hears_that_the_writer_was_killed() -> None:
    shared = sorted(os.listdir("/dev/shm"))
    with Child(publish_once_and_wait, lambda: None) as child:
        handle = child.receive()
        waiting = ArenaReader(handle, SPEC, timeout_s=LONG_S)
        pinned = ArenaReader(handle, SPEC)
        half = pinned.pin(1, 1).half
        killer = threading.Timer(SHORT_S, child.kill)
        killer.start()
        with pytest.raises(WriterTimeout, match=rf"rank {RANK} \(pid {child.pid}\) is gone"):
            waiting.pin(2, 2)
        killer.join()
        assert is_uniform(pinned, half, 1)
        with pytest.raises(TransportUnavailable, match=f"pid {child.pid}"):
            ArenaReader(handle, SPEC)
        waiting.close()
        pinned.close()
    assert sorted(os.listdir("/dev/shm")) == shared


def forget_open_locks() -> None:
    liveness._open_locks = weakref.WeakSet()
    liveness._open_locks.add = lambda locks: None  # type: ignore[method-assign]


def test_mutant_children_that_keep_the_locks_make_a_dead_writer_look_alive() -> None:
    with (
        Child(publish_once_and_wait, forget_open_locks) as child,
        contextlib.closing(ArenaReader(child.receive(), SPEC)) as reader,
    ):
        child.kill()
        with pytest.raises(WriterTimeout, match="did not publish sequence 2 within"):
            reader.pin(2, 2, timeout_s=SHORT_S)


# Forked children of an arena's owner


def use_and_close(connection: Connection, writer: ArenaWriter, reader: ArenaReader) -> None:
    uses = [
        lambda: writer.begin(3),
        lambda: writer.entry_addresses(0),
        lambda: reader.pin(1, 1),
        lambda: reader.release(),
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


def test_a_forked_child_leaves_its_parents_arena_alone(
    writer: ArenaWriter, reader: ArenaReader
) -> None:
    publish(writer, 1)
    half = reader.pin(1, 1).half
    with Child(use_and_close, writer, reader) as child:
        assert child.receive()
        child.process.join()
    with pytest.raises(ReaderTimeout, match=rf"pid {os.getpid()}\) keeps sequence 1"):
        writer.begin(3)
    assert is_uniform(reader, half, 1)
    reader.release()
    with pytest.raises(WriterTimeout, match="did not publish"):
        reader.pin(2, 2)
    publish(writer, 3)
    assert is_uniform(reader, reader.pin(3, 3).half, 3)


# Other processes


READER_SCRIPT = """
import ctypes, sys, msgspec
from lora_refit.arena import ArenaReader
from lora_refit.messages import ArenaHandle
handle = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=ArenaHandle)
reader = ArenaReader(handle, bytes(32))
pinned = reader.pin(2, 20)
print(pinned.digests.tolist(), ctypes.string_at(int(reader.entry_addresses(0)[0]), 9))
"""


def test_an_unrelated_process_attaches_by_the_handle_alone(writer: ArenaWriter) -> None:
    writer.begin(2)
    ctypes.memmove(int(writer.entry_addresses(0)[0]), b"ROLLOUTS!", 9)
    writer.publish(2, 20, np.array([2**64 - 3], np.uint64))
    argument = msgspec.msgpack.encode(writer.handle).hex()
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", READER_SCRIPT, argument]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=root, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"[{2**64 - 3}] b'ROLLOUTS!'\n", "")
    publish(writer, 4)


def attach_as_nobody(connection: Connection, handle: ArenaHandle) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    try:
        ArenaReader(handle, SPEC)
    except TransportUnavailable as error:
        connection.send(str(error))
    else:
        connection.send("attached")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_attach(writer: ArenaWriter) -> None:
    with Child(attach_as_nobody, writer.handle) as child:
        message = child.receive()
    for part in (f"rank {RANK}", "Permission denied", "same user"):
        assert part in message
