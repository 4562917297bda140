"""A trainer rank hands its merged buckets to engines: at once if all fit, otherwise as they ask."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

from lora_refit.arena import RingWriter
from lora_refit.arena.layout import HALVES
from lora_refit.arena_set import ArenaSet
from lora_refit.errors import RefitError
from lora_refit.merged.merger import MergedBucket, UintArray, words_of_sums

_FIRST_NAP_S = 50e-6
_LONGEST_NAP_S = 20e-3
"""Between two looks at what engines ask for; the second one while nobody asks for long."""

_log = logging.getLogger(__name__)


class Merger(Protocol):
    def prepare(self, adapters: UintArray, stream: object | None) -> None:
        """Do what a version needs before its first bucket. Collective where it is collective."""

    def merge(
        self, bucket: int, address: int, adapters: UintArray, stream: object | None
    ) -> MergedBucket: ...


class Delivery:
    """One rank's bucket ring and who fills it.

    adapters: arenas of all ranks; it reads those of ranks whose shards this rank merges. buckets: their number. With
    more buckets than the ring has halves a thread merges those that engines ask for, so the base
    must stay in place until the refit is done.
    """

    def __init__(
        self,
        merger: Merger,
        ring: RingWriter,
        adapters: ArenaSet,
        buckets: int,
        note_words: int,
        timeout_s: float,
    ) -> None:
        self._merger = merger
        self._ring = ring
        self._adapters = adapters
        self._buckets = buckets
        self._note_words = note_words
        self._timeout_s = timeout_s
        self._offered = 0
        self._threads: list[threading.Thread] = []
        self._end = threading.Event()
        # At exit the ring is unmapped, which must not happen under a merge.
        weakref.finalize(self, _end_all, self._threads, self._end)

    def make_room(self, sequence: int) -> None:
        """Let go of the arenas' half that `sequence` is about to be packed into.

        Only after a publish that failed is that the half of what is offered. Raises ReaderTimeout
        while an engine is in the middle of a refit to it.
        """
        if self._offered and (sequence - self._offered) % HALVES == 0:
            self._withdraw()

    def start(self, sequence: int, version: int, stream: object | None) -> None:
        """Offer a version in the place of the one before, once all ranks have published it.

        Until then the one before is served: a rank that runs ahead must not take it from an engine
        that another rank, or whoever it waits for, is refitting.
        Returns when all buckets are merged if they fit the ring, otherwise at once.
        Raises WriterTimeout for a rank that does not publish, ReaderTimeout while an engine is in
        the middle of a refit to the version before, and what merging raises; engines that ask are
        told that too.
        """
        self._adapters.await_published(sequence, self._timeout_s)
        self._withdraw()
        self._offered = sequence
        self._ring.offer(sequence, self._buckets)
        try:
            self._adapters.pin_and_verify(sequence, version, self._timeout_s)
            self._merger.prepare(self._adapters.addresses(), stream)
            if self._buckets <= HALVES:
                for bucket in range(self._buckets):
                    served = self._serve(bucket, stream)
                    assert served, "a ring that was just offered has both halves free"
                self._adapters.release()
                return
        except BaseException as error:
            self._adapters.release()
            self._ring.fail(str(error))
            raise
        self._end.clear()
        thread = threading.Thread(
            target=_serve_until_the_end,
            args=(weakref.ref(self), self._end),
            name="lora-refit-merge",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """End the thread and release the ring; engines in between are told. Idempotent."""
        _end_all(self._threads, self._end)
        self._adapters.close()
        self._ring.close()

    def _withdraw(self) -> None:
        """Take back what is offered."""
        self._ring.wait_idle()
        _end_all(self._threads, self._end)
        self._adapters.release()
        self._offered = 0

    def serve_wanted(self) -> bool:
        """Merge what engines ask for now; whether that was anything."""
        wanted = self._ring.wait_wanted(0)
        for bucket in wanted:
            self._serve(bucket, None)
        return bool(wanted)

    def give_up(self, error: Exception) -> None:
        """Tell engines why nothing comes any more."""
        expected = isinstance(error, RefitError)
        _log.error("delivery of merged weights ended: %s", error, exc_info=not expected)
        self._ring.fail(str(error))

    def _serve(self, bucket: int, stream: object | None) -> bool:
        """Merge a bucket; False if both halves are being read, then the engine keeps asking."""
        half = self._ring.begin(bucket)
        if half is None:
            return False
        try:
            merged = self._merger.merge(
                bucket, self._ring.address(half), self._adapters.addresses(), stream
            )
        except BaseException:
            self._ring.abandon(half)
            raise
        notes = words_of_sums(merged.sums, self._note_words)
        self._ring.publish(bucket, half, merged.digest, notes)
        return True


def _serve_until_the_end(reference: weakref.ref[Delivery], end: threading.Event) -> None:
    """Holds no Delivery while it sleeps, so that one that is dropped is collected."""
    nap = _FIRST_NAP_S
    while not end.wait(nap):
        delivery = reference()
        if delivery is None:
            return
        try:
            served = delivery.serve_wanted()
        except Exception as error:
            delivery.give_up(error)
            return
        nap = _FIRST_NAP_S if served else min(2 * nap, _LONGEST_NAP_S)
        del delivery


def _end_all(threads: list[threading.Thread], end: threading.Event) -> None:
    end.set()
    while threads:
        thread = threads.pop()
        if thread is not threading.current_thread():
            thread.join()
