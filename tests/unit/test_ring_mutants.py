"""Torn reads: a mutant of each rule of the bucket ring shows one, the ring as it is never does."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable

import numpy as np
import pytest

from lora_refit.arena import RingReader, RingWriter
from lora_refit.errors import WriterTimeout

BUCKET_BYTES = 4096
BUCKETS = 5
SPEC = bytes(32)


def fill(writer: RingWriter, bucket: int) -> int | None:
    """Make the bucket without publishing it; returns its half, None if there is none."""
    half = writer.begin(bucket)
    if half is not None:
        ctypes.memset(writer.address(half), bucket, BUCKET_BYTES)
    return half


def make(writer: RingWriter, bucket: int) -> None:
    half = fill(writer, bucket)
    if half is not None:
        writer.publish(bucket, half, bucket, np.zeros(0))


def is_whole(address: int, bucket: int) -> bool:
    return ctypes.string_at(address, BUCKET_BYTES) == bytes([bucket]) * BUCKET_BYTES


class IgnoresPins(RingWriter):
    def begin(self, bucket: int) -> int | None:
        self._demand.is_pinned = lambda half: False  # type: ignore[method-assign]
        self._arena.live_holders = lambda half: []  # type: ignore[method-assign]
        return super().begin(bucket)


class LooksBeforeHidingOnly(RingWriter):
    def begin(self, bucket: int) -> int | None:
        self._arena.live_holders = lambda half: []  # type: ignore[method-assign]
        return super().begin(bucket)


class IgnoresAsks(RingWriter):
    """No mutant: asks keep a bucket in place, but only pins must keep it whole."""

    def _is_kept(self, *_: object) -> bool:
        return False


class ShowsWhatIsNotMade(RingWriter):
    def begin(self, bucket: int) -> int | None:
        half = super().begin(bucket)
        if half is not None:
            self._page.write_contents(half, bucket, self._table(bucket, np.zeros(0)))
            self._page.show(half, self._next_sequence(half))
        return half


class DoesNotRecheck(RingReader):
    def _still_published(self, half: int, sequence: int) -> bool:
        return True


def replaces_a_pinned_bucket(writer: RingWriter, reader: RingReader) -> bool:
    make(writer, 1)
    taken = reader.take(1)
    for bucket in (2, 3, 4):
        make(writer, bucket)
    return not is_whole(taken.address, 1)


def pins_what_is_about_to_be_hidden(writer: RingWriter, reader: RingReader) -> bool:
    """A reader comes between the writer's first look at the pins and its second."""
    taken = []
    hide = writer._page.hide

    def take_then_hide(half: int) -> None:
        writer._page.hide = hide  # type: ignore[method-assign]
        taken.append(reader.take(1))
        hide(half)

    make(writer, 1)
    make(writer, 2)
    writer._page.hide = take_then_hide  # type: ignore[method-assign]
    fill(writer, 3)
    return not is_whole(taken[0].address, 1)


def pins_what_was_just_replaced(writer: RingWriter, reader: RingReader) -> bool:
    """A bucket is begun between the reader's first look and its pin."""
    page = reader._page
    announce = page.announce_pin

    def fill_then_announce(index: int, sequence: int) -> None:
        page.announce_pin = announce  # type: ignore[method-assign]
        fill(writer, 3)
        announce(index, sequence)

    make(writer, 1)
    writer.begin(2)  # so no other half is left
    page.announce_pin = fill_then_announce  # type: ignore[method-assign]
    with contextlib.suppress(WriterTimeout):
        return not is_whole(reader.take(1, timeout_s=0).address, 1)
    return False


def takes_what_is_not_made(writer: RingWriter, reader: RingReader) -> bool:
    writer.begin(1)
    with contextlib.suppress(WriterTimeout):
        return not is_whole(reader.take(1, timeout_s=0).address, 1)
    return False


Interleaving = Callable[[RingWriter, RingReader], bool]
Pair = tuple[type[RingWriter], type[RingReader]]
RULES: list[tuple[Interleaving, Pair, Pair]] = [
    (replaces_a_pinned_bucket, (IgnoresPins, RingReader), (RingWriter, RingReader)),
    (
        pins_what_is_about_to_be_hidden,
        (LooksBeforeHidingOnly, RingReader),
        (IgnoresAsks, RingReader),
    ),
    (pins_what_was_just_replaced, (IgnoresAsks, DoesNotRecheck), (IgnoresAsks, RingReader)),
    (takes_what_is_not_made, (ShowsWhatIsNotMade, RingReader), (RingWriter, RingReader)),
]


def is_torn(interleaving: Interleaving, pair: Pair) -> bool:
    writer_type, reader_type = pair
    with (
        contextlib.closing(writer_type(BUCKET_BYTES, 0, 0, SPEC)) as writer,
        contextlib.closing(reader_type(writer.handle, SPEC, BUCKET_BYTES, 0)) as reader,
    ):
        writer.offer(1, BUCKETS)
        reader.open(1)
        return interleaving(writer, reader)


@pytest.mark.parametrize(("interleaving", "mutant", "control"), RULES)
def test_an_interleaving_tears_the_mutant_only(
    interleaving: Interleaving, mutant: Pair, control: Pair
) -> None:
    assert is_torn(interleaving, mutant)
    assert not is_torn(interleaving, control)
    assert not is_torn(interleaving, (RingWriter, RingReader))
