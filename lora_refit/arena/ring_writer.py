"""The trainer rank's side of a bucket ring; the protocol is described in `lora_refit.arena`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena.creation import CreatedArena
from lora_refit.arena.layout import HALVES
from lora_refit.arena.ring_demand import Demand, Urgency
from lora_refit.arena.ring_words import RingWords, ring_layout
from lora_refit.arena.waiting import attempts
from lora_refit.devices import CPU
from lora_refit.errors import LayoutMismatch, ReaderTimeout, StaleArena
from lora_refit.messages import ArenaHandle

_LONGEST_NAP_S = 5e-3
"""Between two looks at what readers ask for: a trainer that nobody asks should notice nothing."""


class RingWriter:
    """Creates a bucket ring and fills it as readers ask. Belongs to one process.

    One thread at a time may use it, except that `wait_idle` and `fail` may run while another thread
    serves: sessions end only if they are served.

    Args:
        bucket_bytes: size of each of the two halves.
        note_words: 64-bit words that are published beside each bucket's digest.
        rank: the trainer rank, for messages.
        layout_digest: 32 bytes that readers must present.
        timeout_s: longest wait for readers, in seconds.
        device, memory: where buckets are made and lie, as for `ArenaWriter`.

    Raises:
        TransportUnavailable: the memory cannot be had.
        LayoutMismatch: a size is negative, or the layout digest does not have 32 bytes.
    """

    handle: ArenaHandle

    def __init__(
        self,
        bucket_bytes: int,
        note_words: int,
        rank: int,
        layout_digest: bytes,
        timeout_s: float = 60.0,
        *,
        device: torch.device = CPU,
        memory: str = "auto",
    ) -> None:
        self._note_words = note_words
        self._timeout_s = timeout_s
        self._publication = 0
        self._buckets = 0
        self._visible = False
        self._last_sequence = 0
        self._shown = [0] * HALVES
        self._resident: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        layout = ring_layout(bucket_bytes, note_words)
        self._arena = CreatedArena("bucket ring", layout, rank, layout_digest, device, memory)
        self._mapped, self._name = self._arena.mapped, self._arena.name
        self._page = self._mapped.page
        self._words = RingWords(self._mapped.control)
        self._demand = Demand(self._mapped, self._words)
        self.handle = self._arena.handle

    def wait_idle(self) -> None:
        """Wait until no live reader has a session; then the publication is withdrawn.

        Readers that come meanwhile wait too, so this ends; afterwards they get StaleArena until
        `offer`. Nothing that buckets are made from is read any more.

        Raises:
            ReaderTimeout: a reader keeps its session; the publication can be read as before.
        """
        self._mapped.require_usable(self._name)
        self._words.hide_publication()
        try:
            self._wait_for_sessions()
        except BaseException:
            self._show_again()
            raise
        self._visible = False
        self._words.withdraw(self._publication)

    def offer(self, publication: int, buckets: int) -> None:
        """Let readers open sessions of `publication` and ask for its buckets 0 to `buckets` - 1.

        Everything older is hidden; sessions that are still open find it replaced.

        Raises:
            ReaderTimeout: a reader keeps a bucket pinned; the old publication is still whole.
            StaleArena: `publication` does not come after the last one, or a bucket is begun.
        """
        self._mapped.require_usable(self._name)
        self._require_next(publication, buckets)
        self._words.hide_publication()
        for half in range(HALVES):
            self._page.hide(half)
        try:
            self._wait_for_pins()
        except BaseException:
            for half in range(HALVES):
                self._page.show(half, self._shown[half])
            self._show_again()
            raise
        for half in range(HALVES):
            self._empty(half)
        self._words.withdraw(publication - 1)
        self._words.set_buckets(buckets)
        self._words.show_publication(publication)
        self._publication, self._buckets, self._visible = publication, buckets, True

    def wanted(self) -> list[int]:
        """Buckets that live readers ask for and that are not resident or begun.

        Those that a reader waits for come first, then those asked for ahead; each ascending.
        """
        self._mapped.require_usable(self._name)
        present = {*self._resident.values(), *self._begun.values()}
        asks = self._asks()
        return sorted(
            asks.keys() - present, key=lambda bucket: (asks[bucket] == Urgency.AHEAD, bucket)
        )

    def wait_wanted(self, timeout_s: float) -> list[int]:
        """Wait until a bucket is wanted for which `begin` would find a half.

        Returns all such buckets in the order of `wanted`, or none after `timeout_s` seconds.
        """
        for _ in attempts(timeout_s, _LONGEST_NAP_S):
            wanted = self.wanted()
            asks = self._asks() if wanted else {}
            if servable := [bucket for bucket in wanted if self._free_halves(bucket, asks)]:
                return servable
        return []

    def resident(self) -> frozenset[int]:
        """Buckets that readers can take now."""
        return frozenset(self._resident.values())

    def begin(self, bucket: int) -> int | None:
        """Take a half from readers to make `bucket` in; None if all are in use now.

        A half is in use while a live reader pins it or asks for its bucket. A bucket that is only
        asked for ahead gives way to one that a reader has waited for, for `PATIENCE_S` or longer.

        Raises:
            StaleArena: there is no such bucket, or it is resident or begun already.
        """
        self._mapped.require_usable(self._name)
        self._require_absent(bucket)
        for half in self._free_halves(bucket, self._asks()):
            if self._take_back(half, bucket):
                self._resident.pop(half, None)
                self._begun[half] = bucket
                return half
        return None

    def address(self, half: int) -> int:
        """Where the half's bucket starts in this process."""
        self._mapped.require_usable(self._name)
        return int(self._mapped.entry_addresses(half)[0])

    def publish(self, bucket: int, half: int, digest: int, notes: npt.NDArray[np.generic]) -> None:
        """Let readers take the bucket; all its bytes must have been written.

        Args:
            half: that `begin(bucket)` returned.
            digest: of the bucket, 0 to 2**64 - 1.
            notes: uint64 or float64 [note words].

        Raises:
            StaleArena: `begin(bucket)` did not return this half.
            LayoutMismatch: the digest has over 64 bits, or there are not as many words.
        """
        self._mapped.require_usable(self._name)
        self._require_begun(half, bucket)
        table = self._table(digest, notes)
        sequence = self._next_sequence(half)
        self._page.write_contents(half, bucket, table)
        self._page.show(half, sequence)
        self._last_sequence = self._shown[half] = sequence
        self._resident[half] = self._begun.pop(half)

    def abandon(self, half: int) -> None:
        """Give up what `begin` started in this half: it is empty.

        Raises:
            StaleArena: nothing is begun there.
        """
        self._mapped.require_usable(self._name)
        self._require_begun(half, self._begun.get(half))
        self._empty(half)

    def fail(self, message: str) -> None:
        """Tell all readers of the present publication, also those that come, why it is given up.

        Raises:
            StaleArena: there is no publication yet.
        """
        self._mapped.require_usable(self._name)
        if not self._publication:
            raise StaleArena(f"{self._name}: nothing was offered that could fail with: {message}")
        self._words.set_failure(self._publication, message)

    def close(self) -> None:
        """Unmap and let readers know, as `ArenaWriter.close` does. May be called again."""
        self._arena.close()

    # What readers do

    def _asks(self) -> dict[int, Urgency]:
        return self._demand.asks(self._publication, self._buckets)

    def _free_halves(self, bucket: int, asks: dict[int, Urgency]) -> list[int]:
        """Halves that look free for `bucket`: the empty first, those asked for ahead last."""

        def loss(half: int) -> tuple[bool, int]:
            return self._resident.get(half) in asks, self._shown[half]

        free = [
            half
            for half in range(HALVES)
            if half not in self._begun
            and not self._is_kept(half, bucket, asks)
            and not self._demand.is_pinned(half)
        ]
        return sorted(free, key=loss)

    def _take_back(self, half: int, bucket: int) -> bool:
        """Hide the half; False, and it is shown as before, if readers use it after all."""
        in_use = True
        self._page.hide(half)
        try:
            holders = self._arena.live_holders(half)
            in_use = bool(holders) or self._is_kept(half, bucket, self._asks())
        finally:
            if in_use:
                self._page.show(half, self._shown[half])
        return not in_use

    def _is_kept(self, half: int, bucket: int, asks: dict[int, Urgency]) -> bool:
        """Whether readers ask for what the half holds more than for `bucket`."""
        resident = self._resident.get(half)
        if resident not in asks:
            return False
        return asks[resident] > Urgency.AHEAD or asks.get(bucket) != Urgency.OVERDUE

    def _wait_for_sessions(self) -> None:
        readers: list[int] = []
        for _ in attempts(self._timeout_s):
            readers = list(self._demand.live_sessions())
            if not readers:
                return
        sessions = (
            f"reader {reader} (pid {self._page.reader_pid(reader)}) has a session of publication "
            f"{self._words.session(reader)}"
            for reader in readers
        )
        raise ReaderTimeout(
            f"{self._name}: {', '.join(sessions)} after {self._timeout_s} s; let the engine finish "
            "or drop its refit, or end that process, and publish again"
        )

    def _wait_for_pins(self) -> None:
        holders: list[int] = []
        for _ in attempts(self._timeout_s):
            holders = [
                reader for half in range(HALVES) for reader in self._arena.live_holders(half)
            ]
            if not holders:
                return
        pids = ", ".join(f"reader {r} (pid {self._page.reader_pid(r)})" for r in holders)
        raise ReaderTimeout(
            f"{self._name}: {pids} still reads a bucket of publication {self._publication} after "
            f"{self._timeout_s} s; let the engine worker release it, or end that process, and "
            "publish again"
        )

    # What the writer holds

    def _show_again(self) -> None:
        if self._visible:
            self._words.show_publication(self._publication)

    def _next_sequence(self, half: int) -> int:
        """The next sequence that belongs to this half."""
        following = self._last_sequence + 1
        return following + (following - half) % HALVES

    def _empty(self, half: int) -> None:
        self._resident.pop(half, None)
        self._begun.pop(half, None)
        self._shown[half] = 0
        self._page.show(half, 0)

    def _table(self, digest: int, notes: npt.NDArray[np.generic]) -> npt.NDArray[np.uint64]:
        """The half's table: digest, publication, notes."""
        if notes.dtype not in (np.uint64, np.float64) or notes.shape != (self._note_words,):
            raise LayoutMismatch(
                f"{self._name}: notes are {notes.dtype} {list(notes.shape)}, expected uint64 or "
                f"float64 [{self._note_words}]"
            )
        if not 0 <= digest < 2**64:
            raise LayoutMismatch(f"{self._name}: digest {digest} does not fit in 64 bits")
        head = np.array([digest, self._publication], np.uint64)
        return np.concatenate([head, np.ascontiguousarray(notes).view(np.uint64)])

    def _require_next(self, publication: int, buckets: int) -> None:
        if self._begun:
            raise StaleArena(
                f"{self._name}: buckets {sorted(self._begun.values())} are begun; publish or abandon "
                f"them before publication {publication}"
            )
        if not self._publication < publication < 2**63:
            raise StaleArena(
                f"{self._name}: publication {publication} cannot follow {self._publication}; "
                "publications start at 1 and grow"
            )
        if not 0 <= buckets < 2**31:
            raise StaleArena(f"{self._name}: a publication cannot have {buckets} buckets")

    def _require_absent(self, bucket: int) -> None:
        if not 0 <= bucket < self._buckets:
            raise StaleArena(
                f"{self._name}: publication {self._publication} has {self._buckets} buckets, "
                f"{bucket} is none of them"
            )
        if bucket in self._resident.values() or bucket in self._begun.values():
            raise StaleArena(f"{self._name}: bucket {bucket} is resident or begun already")

    def _require_begun(self, half: int, bucket: int | None) -> None:
        if bucket is None or self._begun.get(half) != bucket:
            raise StaleArena(
                f"{self._name}: bucket {bucket} was not begun in half {half}; call begin first"
            )
