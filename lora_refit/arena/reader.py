"""An engine worker's side of an arena; the protocol is described in `lora_refit.arena`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena.attachment import AttachedArena
from lora_refit.arena.layout import HALVES, ArenaLayout
from lora_refit.arena.waiting import attempts
from lora_refit.devices import CPU
from lora_refit.errors import StaleArena, WriterTimeout
from lora_refit.messages import ArenaHandle


@dataclass(frozen=True)
class Pinned:
    """A half that will not change before it is released.

    Attributes:
        half: 0 or 1.
        digests: uint64 [entries], a copy of the digests that the trainer published.
    """

    half: int
    digests: npt.NDArray[np.uint64]


class ArenaReader:
    """Maps a trainer rank's arena and pins what it reads. Used by one thread of one process.

    The data halves are mapped read-only. A reader pins one sequence at a time.

    Args:
        handle: from the trainer's spec.
        layout_digest: 32 bytes, from the trainer's spec.
        timeout_s: longest wait for a sequence, in seconds.
        device: where the kernels that read the arena run.

    Raises:
        TransportUnavailable: the arena cannot be opened from here, or has 64 readers already.
        LayoutMismatch: the arena was packed for another spec.
    """

    def __init__(
        self,
        handle: ArenaHandle,
        layout_digest: bytes,
        timeout_s: float = 60.0,
        *,
        device: torch.device = CPU,
    ) -> None:
        self._timeout_s = timeout_s
        self._pinned = 0
        layout = ArenaLayout(handle.entry_bytes)
        self._arena = AttachedArena("arena", handle, layout, layout_digest, device)
        self._trainer, self._name = self._arena.trainer, self._arena.name
        self._mapped, self._index = self._arena.mapped, self._arena.index
        self._page = self._mapped.page

    @property
    def transport(self) -> str:
        """How the bytes travel, for reports."""
        return self._mapped.transport

    def pin(self, sequence: int, version: int, timeout_s: float | None = None) -> Pinned:
        """Wait until `sequence` is published and keep its half from being overwritten.

        Args:
            sequence, version: from the ticket.
            timeout_s: longest wait in seconds; None means the reader's own.

        Raises:
            StaleArena: a newer sequence took its place, the arena holds another version under it,
                or this reader has a pin already.
            WriterTimeout: it was not published in time, or the trainer is gone.
        """
        self._mapped.require_usable(self._name)
        self._require_pinnable(sequence)
        half = sequence % HALVES
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for _ in self._attempts(sequence, timeout_s):
            if self._try_pin(half, sequence):
                return self._pinned_contents(half, sequence, version)
        raise self._unpublished(sequence, timeout_s)

    def await_published(self, sequence: int, timeout_s: float | None = None) -> None:
        """Wait until `sequence` or a later one is published, without a pin.

        Raises:
            WriterTimeout: it was not published in time, or the trainer is gone.
        """
        self._mapped.require_usable(self._name)
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for _ in self._attempts(sequence, timeout_s):
            if self._page.newest()[0] >= sequence:
                return
        raise self._unpublished(sequence, timeout_s)

    def release(self) -> None:
        """Let the trainer overwrite what is pinned; all reads must have finished."""
        if not self._mapped.closed:
            self._mapped.require_usable(self._name)
            self._page.release_pin(self._index)
        self._pinned = 0

    def entry_addresses(self, half: int) -> npt.NDArray[np.uint64]:
        """Where to read: address of each entry in this process, uint64 [entries], read-only."""
        self._mapped.require_usable(self._name)
        return self._mapped.entry_addresses(half)

    def latest(self) -> tuple[int, int]:
        """(sequence, version) of the newest published half, (0, -1) when nothing is published."""
        self._mapped.require_usable(self._name)
        return self._page.newest()

    def close(self) -> None:
        """Release, detach and unmap; in a forked child only unmap. May be called again."""
        self._arena.close()

    def _attempts(self, sequence: int, timeout_s: float) -> Iterator[None]:
        """Looks at what the trainer published. Raises WriterTimeout once it is gone."""
        for _ in attempts(timeout_s):
            # Looked at first: a trainer may publish and end between the two looks.
            writer_alive = self._arena.writer_is_alive()
            yield
            if not writer_alive:
                raise WriterTimeout(
                    f"{self._trainer} is gone before it published sequence {sequence}; "
                    "restart the trainer and attach again"
                )

    def _unpublished(self, sequence: int, timeout_s: float) -> WriterTimeout:
        half = sequence % HALVES
        return WriterTimeout(
            f"{self._trainer} did not publish sequence {sequence} within {timeout_s} s; its half "
            f"{half} is {self._page.state(half)}; call publish on every rank, or see what it does"
        )

    def _require_pinnable(self, sequence: int) -> None:
        if self._pinned:
            raise StaleArena(
                f"{self._name}: this reader still pins sequence {self._pinned}; "
                f"release it before sequence {sequence}"
            )
        if not 0 < sequence < 2**63:
            raise StaleArena(f"{self._name}: there is no sequence {sequence}; they start at 1")

    def _try_pin(self, half: int, sequence: int) -> bool:
        """One round of R1 to R4; False when the sequence is not published yet."""
        # The other half first: once it shows a newer sequence, this half is settled.
        newest = self._page.sequence(1 - half)
        found = self._page.sequence(half)
        if found == sequence:
            self._page.announce_pin(self._index, sequence)
            if self._still_published(half, sequence):
                self._pinned = sequence
                return True
            self._page.release_pin(self._index)
        if max(found, newest) > sequence:
            raise StaleArena(
                f"{self._name}: sequence {sequence} was replaced; the newest published is "
                f"{max(found, newest)}; refit with the newest ticket"
            )
        return False

    def _still_published(self, half: int, sequence: int) -> bool:
        return self._page.sequence(half) == sequence

    def _pinned_contents(self, half: int, sequence: int, version: int) -> Pinned:
        found = self._page.version(half)
        if found != version:
            self.release()
            raise StaleArena(
                f"{self._name}: sequence {sequence} holds version {found}, the ticket says "
                f"{version}; refit with the ticket of that publish"
            )
        return Pinned(half, self._page.table(half))
