"""What live readers do with a bucket ring, as its writer sees it: sessions, asks and pins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from enum import IntEnum

from lora_refit.arena.layout import HALVES, READER_CAPACITY
from lora_refit.arena.memory import MappedArena
from lora_refit.arena.ring_words import RingWords

PATIENCE_S = 0.1
"""How long a bucket that a reader waits for leaves one in place that others asked for ahead. Merging
that one again costs more than such a wait, which keeps readers at the same buckets."""


class Urgency(IntEnum):
    """How much a bucket is asked for."""

    AHEAD = 0
    WAITED = 1
    OVERDUE = 2
    """Waited for, and longer than `PATIENCE_S`."""


class Demand:
    """Looks at the readers' words. A word that was just stored may be missed until the next look."""

    def __init__(self, mapped: MappedArena, words: RingWords) -> None:
        self._mapped = mapped
        self._words = words
        self._waited_since: dict[int, float] = {}

    def asks(self, publication: int, buckets: int) -> dict[int, Urgency]:
        """Buckets that live readers with a session of `publication` ask for."""
        waits: dict[int, bool] = {}
        for reader in self._words.look().with_sessions():
            ask = self._words.ask_of(reader)
            if (
                ask is not None
                and 0 <= ask.bucket < buckets
                and self._words.session(reader) == publication
                and self._mapped.locks.is_locked(reader)
            ):
                waits[ask.bucket] = waits.get(ask.bucket, False) or ask.waits
        now = time.monotonic()
        waited = (bucket for bucket, waiting in waits.items() if waiting)
        self._waited_since = {bucket: self._waited_since.get(bucket, now) for bucket in waited}
        return {bucket: self._urgency(bucket, now) for bucket in waits}

    def is_pinned(self, half: int) -> bool:
        """Whether a live reader pins the half; unlike `live_holders` this leaves all as it is."""
        pins = enumerate(self._words.look().pins())
        return any(
            pinned and pinned % HALVES == half and self._mapped.locks.is_locked(reader)
            for reader, pinned in pins
        )

    def live_sessions(self) -> Iterator[int]:
        """Readers that have a session, of a hidden publication; those of dead readers are cleared."""
        for reader in range(READER_CAPACITY):
            session = self._words.session(reader)
            if session and self._mapped.locks.is_locked(reader):
                yield reader
            elif session:
                self._words.clear_session(reader, session)

    def _urgency(self, bucket: int, now: float) -> Urgency:
        if bucket not in self._waited_since:
            return Urgency.AHEAD
        overdue = now - self._waited_since[bucket] > PATIENCE_S
        return Urgency.OVERDUE if overdue else Urgency.WAITED
