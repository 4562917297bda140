"""An engine worker's side of a bucket ring; the protocol is described in `lora_refit.arena`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena.attachment import AttachedArena
from lora_refit.arena.layout import HALVES
from lora_refit.arena.ring_words import Ask, RingWords, ring_layout
from lora_refit.arena.waiting import attempts
from lora_refit.devices import CPU
from lora_refit.errors import LayoutMismatch, StaleArena, WriterTimeout
from lora_refit.messages import ArenaHandle

_DIGEST, _PUBLICATION, _NOTES = 0, 1, 2
"""Positions in a half's table."""


@dataclass(frozen=True)
class Taken:
    """A bucket that will not change before it is released.

    Attributes:
        address: where it starts in this process.
        digest: as the trainer published it.
        notes: uint64 [note words], a copy; view them as what the trainer wrote.
    """

    address: int
    digest: int
    notes: npt.NDArray[np.uint64]


class RingReader:
    """Maps a trainer rank's bucket ring and takes buckets from it, one at a time.

    Used by one thread of one process. The data halves are mapped read-only.

    Args:
        handle, layout_digest: from the trainer's spec.
        bucket_bytes, note_words: as the trainer created the ring.
        timeout_s: longest wait for a publication or a bucket, in seconds.
        device: where the kernels that read the buckets run.

    Raises:
        TransportUnavailable: the ring cannot be opened from here, or has 64 readers already.
        LayoutMismatch: the ring has other sizes, or was made for another spec.
    """

    def __init__(
        self,
        handle: ArenaHandle,
        layout_digest: bytes,
        bucket_bytes: int,
        note_words: int,
        timeout_s: float = 60.0,
        *,
        device: torch.device = CPU,
    ) -> None:
        self._timeout_s = timeout_s
        self._session = 0
        self._pinned: int | None = None
        layout = ring_layout(bucket_bytes, note_words)
        self._arena = AttachedArena("bucket ring", handle, layout, layout_digest, device)
        self._trainer, self._name = self._arena.trainer, self._arena.name
        self._mapped, self._index = self._arena.mapped, self._arena.index
        self._page = self._mapped.page
        self._words = RingWords(self._mapped.control)

    @property
    def transport(self) -> str:
        """How the bytes travel, for reports."""
        return self._mapped.transport

    def open(self, publication: int, timeout_s: float | None = None) -> None:
        """Wait until the publication is offered and begin a session of it.

        The trainer's `wait_idle` waits for the session's end.

        Args:
            publication: from the ticket.
            timeout_s: longest wait in seconds; None means the reader's own.

        Raises:
            StaleArena: it was replaced or withdrawn, or this reader has a session already.
            WriterTimeout: it was not offered in time, the trainer gave it up, or is gone.
        """
        self._mapped.require_usable(self._name)
        if self._session:
            raise StaleArena(
                f"{self._name}: this reader has a session of publication {self._session}; end it "
                f"before publication {publication}"
            )
        if not 0 < publication < 2**63:
            raise StaleArena(f"{self._name}: there is no publication {publication}")
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for _ in attempts(timeout_s):
            writer_alive = self._arena.writer_is_alive()
            self._require_served(publication)
            if self._try_open(publication):
                return
            if not writer_alive:
                raise self._writer_is_gone(f"it offered publication {publication}")
        raise WriterTimeout(
            f"{self._trainer} did not offer publication {publication} within {timeout_s} s; call "
            "publish on every rank, or see what it does"
        )

    def ask(self, bucket: int) -> None:
        """Have a bucket made ahead, also while an earlier one is pinned; replaces the last ask.

        Raises:
            StaleArena: this reader has no session.
            LayoutMismatch: the publication has no such bucket.
        """
        self._require_session()
        self._require_bucket(bucket)
        self._words.set_ask(self._index, Ask(bucket, waits=False))

    def take(self, bucket: int, timeout_s: float | None = None) -> Taken:
        """Wait until a bucket is made and keep it from being overwritten.

        Args:
            timeout_s: longest wait in seconds; None means the reader's own.

        Raises:
            StaleArena: the publication was replaced, or this reader has no session, or a pin
                already.
            LayoutMismatch: the publication has no such bucket.
            WriterTimeout: it was not made in time, the trainer gave it up, or is gone.
        """
        self._require_session()
        self._require_bucket(bucket)
        if self._pinned is not None:
            raise StaleArena(
                f"{self._name}: this reader still pins bucket {self._pinned}; release it before "
                f"bucket {bucket}"
            )
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._words.set_ask(self._index, Ask(bucket, waits=True))
        try:
            return self._wait_for(bucket, timeout_s)
        finally:
            # A pin, if there is one, was stored before and keeps the bucket from now on.
            self._words.clear_ask(self._index)

    def release(self) -> None:
        """Let the trainer overwrite what is pinned; all reads must have finished."""
        if not self._mapped.closed:
            self._mapped.require_usable(self._name)
            self._page.release_pin(self._index)
        self._pinned = None

    def end(self) -> None:
        """Close the session, if there is one: nothing is pinned or asked for any more."""
        self.release()
        if not self._mapped.closed:
            self._words.clear_ask(self._index)
            self._words.close_session(self._index)
        self._session = 0

    def close(self) -> None:
        """End, detach and unmap; in a forked child only unmap. May be called again."""
        self._arena.close()

    def _try_open(self, publication: int) -> bool:
        if self._words.publication() != publication:
            return False
        self._words.announce_session(self._index, publication)
        if self._words.publication() != publication:
            self._words.close_session(self._index)
            return False
        self._session = publication
        return True

    def _wait_for(self, bucket: int, timeout_s: float) -> Taken:
        for _ in attempts(timeout_s):
            # Looked at first: a trainer may publish and end between the two looks.
            writer_alive = self._arena.writer_is_alive()
            self._require_served(self._session)
            for half in range(HALVES):
                if taken := self._try_pin(half, bucket):
                    self._pinned = bucket
                    return taken
            if not writer_alive:
                raise self._writer_is_gone(
                    f"it made bucket {bucket} of publication {self._session}"
                )
        states = " and ".join(self._page.state(half) for half in range(HALVES))
        raise WriterTimeout(
            f"{self._trainer} did not make bucket {bucket} of publication {self._session} within "
            f"{timeout_s} s; its halves are {states}; see what it does, and whether another worker "
            "keeps both in use"
        )

    def _try_pin(self, half: int, bucket: int) -> Taken | None:
        """One round of R1 to R4."""
        sequence = self._page.sequence(half)
        belongs_here = 0 < sequence < 2**63 and sequence % HALVES == half
        if not belongs_here or self._page.version(half) != bucket:
            return None
        self._page.announce_pin(self._index, sequence)
        if self._still_published(half, sequence):
            table = self._page.table(half)
            if self._page.version(half) == bucket and table[_PUBLICATION] == self._session:
                address = int(self._mapped.entry_addresses(half)[0])
                return Taken(address, int(table[_DIGEST]), table[_NOTES:])
        self._page.release_pin(self._index)
        return None

    def _still_published(self, half: int, sequence: int) -> bool:
        return self._page.sequence(half) == sequence

    def _require_served(self, publication: int) -> None:
        failure = self._words.failure(publication)
        if failure is not None:
            raise WriterTimeout(
                f"{self._trainer} gave up publication {publication}: {failure}; publish again"
            )
        if self._words.withdrawn() >= publication:
            raise StaleArena(
                f"{self._name}: publication {publication} was withdrawn, the newest is "
                f"{self._words.publication() or 'not there yet'}; refit with the newest ticket"
            )

    def _require_session(self) -> None:
        self._mapped.require_usable(self._name)
        if not self._session:
            raise StaleArena(f"{self._name}: this reader has no session; open a publication first")

    def _require_bucket(self, bucket: int) -> None:
        self._require_served(self._session)
        buckets = self._words.buckets()
        if not 0 <= bucket < min(buckets, 2**62):
            raise LayoutMismatch(
                f"{self._name}: publication {self._session} has {buckets} buckets, {bucket} is none "
                "of them; attach again with the trainer's new spec"
            )

    def _writer_is_gone(self, before: str) -> WriterTimeout:
        return WriterTimeout(
            f"{self._trainer} is gone before {before}; restart the trainer and attach again"
        )
