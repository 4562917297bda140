"""The trainer rank's side of an arena; the protocol is described in `lora_refit.arena`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena.creation import CreatedArena
from lora_refit.arena.layout import HALVES, ArenaLayout
from lora_refit.arena.waiting import attempts
from lora_refit.devices import CPU
from lora_refit.errors import LayoutMismatch, ReaderTimeout, StaleArena
from lora_refit.messages import ArenaHandle


class ArenaWriter:
    """Creates an arena and publishes sequences in it. Used by one thread of one process.

    Args:
        layout: sizes of the entries.
        rank: the trainer rank, for messages.
        layout_digest: 32 bytes that readers must present.
        timeout_s: longest wait for readers, in seconds.
        device: where the shards are packed.
        memory: where a CUDA device packs them: "ipc" or "vmm" for its own memory, shared through a
            CUDA IPC handle or a file descriptor; "host" for pinned host memory; "auto" for the
            first of these that the driver can share.

    Raises:
        TransportUnavailable: the memory cannot be had.
        LayoutMismatch: the layout digest does not have 32 bytes.
    """

    handle: ArenaHandle

    def __init__(
        self,
        layout: ArenaLayout,
        rank: int,
        layout_digest: bytes,
        timeout_s: float = 60.0,
        *,
        device: torch.device = CPU,
        memory: str = "auto",
    ) -> None:
        self._layout = layout
        self._timeout_s = timeout_s
        self._last_published = 0
        self._begun = 0
        self._arena = CreatedArena("arena", layout, rank, layout_digest, device, memory)
        self._mapped, self._name = self._arena.mapped, self._arena.name
        self._page = self._mapped.page
        self.handle = self._arena.handle

    def begin(self, sequence: int) -> int:
        """Take the half of `sequence` from readers and return it; its old content is gone then.

        Raises:
            ReaderTimeout: a reader keeps the half pinned; its content is still whole and published.
            StaleArena: `sequence` does not come after the last published one.
        """
        self._mapped.require_usable(self._name)
        self._require_next(sequence)
        half = sequence % HALVES
        previous = self._page.sequence(half)
        self._page.hide(half)
        try:
            self._wait_for_readers(half)
        except BaseException:
            self._page.show(half, previous)
            raise
        self._begun = sequence
        return half

    def entry_addresses(self, half: int) -> npt.NDArray[np.uint64]:
        """Where to pack: address of each entry in this process, uint64 [entries], read-only."""
        self._mapped.require_usable(self._name)
        return self._mapped.entry_addresses(half)

    def publish(self, sequence: int, version: int, digests: npt.NDArray[np.uint64]) -> None:
        """Let readers see the half that `begin(sequence)` returned; packing must have finished.

        Args:
            version: the policy version, any 64-bit signed integer.
            digests: uint64 [entries], the digest of each entry.

        Raises:
            StaleArena: `begin(sequence)` did not come before.
            LayoutMismatch: not one uint64 digest per entry, or the version has over 64 bits.
        """
        self._mapped.require_usable(self._name)
        self._require_begun(sequence)
        if digests.dtype != np.uint64 or digests.shape != (self._layout.entry_count,):
            raise LayoutMismatch(
                f"{self._name}: digests are {digests.dtype} {list(digests.shape)}, "
                f"expected uint64 [{self._layout.entry_count}]"
            )
        if not -(2**63) <= version < 2**63:
            raise LayoutMismatch(f"{self._name}: version {version} does not fit in 64 bits")
        half = sequence % HALVES
        self._page.write_contents(half, version, digests)
        self._page.show(half, sequence)
        self._last_published = sequence
        self._begun = 0

    def abandon(self, sequence: int) -> None:
        """Give up what `begin(sequence)` started: the half is empty, and the sequence still free.

        Raises:
            StaleArena: `begin(sequence)` did not come before.
        """
        self._mapped.require_usable(self._name)
        self._require_begun(sequence)
        self._page.show(sequence % HALVES, 0)
        self._begun = 0

    def close(self) -> None:
        """Unmap and, in the process that created the arena, let readers know. May be called again.

        Readers that have the arena mapped can still read what they pinned. CUDA IPC memory cannot
        outlive its owner, so for that kind a reader is waited for, some seconds at most; if it
        keeps its pin, the memory stays until this process ends.
        """
        self._arena.close()

    def _require_next(self, sequence: int) -> None:
        if self._begun:
            raise StaleArena(
                f"{self._name}: sequence {self._begun} is begun; publish or abandon it "
                f"before sequence {sequence}"
            )
        if not self._last_published < sequence < 2**63:
            raise StaleArena(
                f"{self._name}: sequence {sequence} cannot follow {self._last_published}; "
                "sequences start at 1 and grow"
            )

    def _require_begun(self, sequence: int) -> None:
        if sequence != self._begun or not self._begun:
            raise StaleArena(f"{self._name}: sequence {sequence} was not begun; call begin first")

    def _wait_for_readers(self, half: int) -> None:
        holders: list[int] = []
        for _ in attempts(self._timeout_s):
            holders = self._arena.live_holders(half)
            if not holders:
                return
        raise ReaderTimeout(
            f"{self._name}: {', '.join(map(self._describe, holders))} still in use after "
            f"{self._timeout_s} s, and the old content stays published; let the engine worker "
            "release it, or end that process, and publish again"
        )

    def _describe(self, reader: int) -> str:
        pid, pinned = self._page.reader_pid(reader), self._page.pin(reader)
        return f"reader {reader} (pid {pid}) keeps sequence {pinned}"
