"""Torn reads: a mutant of each rule of the arena shows one, the arena as it is never does."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter
from lora_refit.errors import ReaderTimeout, StaleArena, WriterTimeout
from lora_refit.messages import ArenaHandle

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FORK = multiprocessing.get_context("fork")
LAYOUT = ArenaLayout((1 << 16,))
SPEC = bytes(32)
RANK = 5
DIGESTS = np.zeros(1, np.uint64)
SHORT_S, LONG_S = 0.05, 30.0
STRESS_S = 2.0
LAST_VERSION = -2


def words(arena: ArenaWriter | ArenaReader, half: int) -> np.ndarray:
    """The half's only entry as 64-bit words, in place."""
    address = int(arena.entry_addresses(half)[0])
    return np.frombuffer((ctypes.c_uint8 * LAYOUT.entry_bytes[0]).from_address(address), np.uint64)


def publish(writer: ArenaWriter, sequence: int, version: int | None = None) -> None:
    """Fill the half with the sequence number and publish it, by default as version `sequence`."""
    words(writer, writer.begin(sequence))[:] = sequence
    writer.publish(sequence, sequence if version is None else version, DIGESTS)


def is_uniform(arena: ArenaReader, half: int, sequence: int) -> bool:
    return bool((words(arena, half) == sequence).all())


class IgnoresPins(ArenaWriter):
    def _wait_for_readers(self, half: int) -> None:
        pass


class PublishesBeforePacking(ArenaWriter):
    def begin(self, sequence: int) -> int:
        half = super().begin(sequence)
        self._page.write_contents(half, sequence, DIGESTS)
        self._page.show(half, sequence)
        return half


class DoesNotRecheck(ArenaReader):
    def _still_published(self, half: int, sequence: int) -> bool:
        return True


def overwrites_a_pinned_half(writer: ArenaWriter, reader: ArenaReader) -> bool:
    """The writer wants a half while a reader pins it."""
    publish(writer, 1)
    half = reader.pin(1, 1).half
    with contextlib.suppress(ReaderTimeout):
        publish(writer, 3)
    return not is_uniform(reader, half, 1)


def pins_before_packing(writer: ArenaWriter, reader: ArenaReader) -> bool:
    """A reader comes between `begin` and the first byte."""
    half = writer.begin(1)
    with contextlib.suppress(WriterTimeout):
        reader.pin(1, 1, timeout_s=0)
        return not is_uniform(reader, half, 1)
    return False


def pins_what_was_just_replaced(writer: ArenaWriter, reader: ArenaReader) -> bool:
    """A whole publish fits between the reader's first look and its pin."""
    page = reader._page
    announce = page.announce_pin

    def publish_then_announce(index: int, sequence: int) -> None:
        page.announce_pin = announce  # type: ignore[method-assign]
        publish(writer, 3, version=1)
        announce(index, sequence)

    publish(writer, 1)
    page.announce_pin = publish_then_announce  # type: ignore[method-assign]
    with contextlib.suppress(StaleArena):
        return not is_uniform(reader, reader.pin(1, 1).half, 1)
    return False


Interleaving = Callable[[ArenaWriter, ArenaReader], bool]
RULES: list[tuple[Interleaving, type[ArenaWriter], type[ArenaReader]]] = [
    (overwrites_a_pinned_half, IgnoresPins, ArenaReader),
    (pins_before_packing, PublishesBeforePacking, ArenaReader),
    (pins_what_was_just_replaced, ArenaWriter, DoesNotRecheck),
]


def is_torn(
    interleaving: Interleaving, writer_type: type[ArenaWriter], reader_type: type[ArenaReader]
) -> bool:
    with (
        contextlib.closing(writer_type(LAYOUT, RANK, SPEC, timeout_s=SHORT_S)) as writer,
        contextlib.closing(reader_type(writer.handle, SPEC)) as reader,
    ):
        return interleaving(writer, reader)


@pytest.mark.parametrize(("interleaving", "writer_type", "reader_type"), RULES)
def test_an_interleaving_tears_the_mutant_only(
    interleaving: Interleaving, writer_type: type[ArenaWriter], reader_type: type[ArenaReader]
) -> None:
    assert is_torn(interleaving, writer_type, reader_type)
    assert not is_torn(interleaving, ArenaWriter, ArenaReader)


def read_until_the_last_version(connection: Connection, handle: ArenaHandle) -> None:
    """Pin whatever is newest, over and over; report (pins, torn pins) at the first torn one too."""
    reader = ArenaReader(handle, SPEC)
    pins = torn = version = 0
    connection.send("attached")
    while version != LAST_VERSION and not torn:
        sequence, version = reader.latest()
        if not sequence:
            continue
        try:
            half = reader.pin(sequence, version, timeout_s=LONG_S).half
        except StaleArena:
            continue
        for _ in range(3):
            torn += not is_uniform(reader, half, sequence)
            time.sleep(0)
        pins += 1
        reader.release()
    connection.send((pins, torn))
    reader.close()


@contextlib.contextmanager
def racing_reader(handle: ArenaHandle) -> Iterator[Connection]:
    """A forked process that reads until the last version, and what it reports through."""
    connection, other = FORK.Pipe()
    process = FORK.Process(target=read_until_the_last_version, args=(other, handle))
    process.start()
    try:
        yield connection
    finally:
        process.kill()
        process.join()
        connection.close()
        other.close()


def receive(connection: Connection) -> Any:
    assert connection.poll(LONG_S), "the reader says nothing"
    return connection.recv()


def race(writer_type: type[ArenaWriter], seconds: float) -> list[tuple[int, int]]:
    """One writer against two readers, until the time is up or a reader has seen a torn half."""
    with (
        contextlib.closing(writer_type(LAYOUT, RANK, SPEC, timeout_s=LONG_S)) as writer,
        racing_reader(writer.handle) as first,
        racing_reader(writer.handle) as second,
    ):
        readers = (first, second)
        assert [receive(reader) for reader in readers] == ["attached", "attached"]
        deadline = time.monotonic() + seconds
        sequence = 1
        while time.monotonic() < deadline and not any(reader.poll() for reader in readers):
            publish(writer, sequence)
            sequence += 1
        publish(writer, sequence, LAST_VERSION)
        publish(writer, sequence + 1, LAST_VERSION)
        results = [receive(reader) for reader in readers]
    print(f"{writer_type.__name__}: {sequence} published, (pins, torn) per reader: {results}")
    return results


def test_no_pinned_half_is_torn_under_stress() -> None:
    for pins, torn in race(ArenaWriter, STRESS_S):
        assert pins > 10
        assert torn == 0


@pytest.mark.parametrize("mutant", [IgnoresPins, PublishesBeforePacking])
def test_stress_sees_the_mutant(mutant: type[ArenaWriter]) -> None:
    assert any(torn for _, torn in race(mutant, LONG_S))
