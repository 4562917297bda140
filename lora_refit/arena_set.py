"""An engine worker's view of all trainer ranks' arenas."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena import ArenaReader
from lora_refit.devices import CPU
from lora_refit.errors import StaleArena
from lora_refit.kernels import digest
from lora_refit.spec import Spec

UintArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Verified:
    """A version whose every byte was checked. digest: over all ranks' packed bytes."""

    digest: str
    wait_ms: float
    verify_ms: float


class ArenaSet:
    """The arenas of a publisher, mapped once.

    Entries are in the order of the export map's parameters: rank by rank. device: where they are
    read. ranks: whose entries are read; None for all.
    """

    def __init__(
        self,
        spec: Spec,
        timeout_s: float,
        device: torch.device = CPU,
        ranks: frozenset[int] | None = None,
    ) -> None:
        self._layout = spec.layout
        self._device = device
        self._layout_digest = spec.layout_digest
        self._readers: list[ArenaReader] = []
        spec.require_fitting_arenas()
        self._others: list[ArenaReader] = []
        read = frozenset(range(len(spec.arenas))) if ranks is None else ranks
        try:
            for handle in spec.arenas:
                reader = ArenaReader(handle, spec.layout_digest, timeout_s, device=device)
                (self._readers if handle.rank in read else self._others).append(reader)
        except BaseException:
            self.close()
            raise
        parameters = spec.layout.export_map.parameters
        self._mapped = np.flatnonzero([item.rank in read for item in parameters])
        itemsize = spec.layout.itemsize
        self._nbytes = np.asarray(
            [math.prod(item.shape) * itemsize for item in parameters], np.uint64
        )
        self._by_half = [self._entry_addresses(half) for half in range(2)]
        self._pinned_half: int | None = None

    @property
    def transport(self) -> str:
        """How the ranks' bytes reach this worker, each way once."""
        return ", ".join(dict.fromkeys(reader.transport for reader in self._readers))

    def await_published(self, sequence: int, timeout_s: float) -> None:
        """Wait until every rank, read or not, has published `sequence` or a later one.

        Raises WriterTimeout naming the rank that has not.
        """
        deadline = time.perf_counter() + timeout_s
        for reader in (*self._readers, *self._others):
            reader.await_published(sequence, max(0.0, deadline - time.perf_counter()))

    def pin_and_verify(self, sequence: int, version: int, timeout_s: float) -> Verified:
        """Wait for a version on every rank, keep it from being overwritten, check its digests.

        Raises WriterTimeout naming the missing rank, StaleArena naming the parameter whose bytes
        are not the published ones or whose replicas differ. Nothing stays pinned then.
        """
        self.release()
        try:
            started = time.perf_counter()
            deadline = started + timeout_s  # of all ranks together: the driver waits no longer
            pinned = [
                reader.pin(sequence, version, max(0.0, deadline - time.perf_counter()))
                for reader in self._readers
            ]
            waited = time.perf_counter()
            published = np.zeros(len(self._nbytes), np.uint64)
            published[self._mapped] = _joined([item.digests for item in pinned])
            self._pinned_half = pinned[0].half
            self._verify(published, version)
            verified = time.perf_counter()
        except BaseException:
            self.release()
            raise
        return Verified(
            digest=hashlib.blake2b(
                self._layout_digest + published.tobytes(), digest_size=16
            ).hexdigest(),
            wait_ms=(waited - started) * 1e3,
            verify_ms=(verified - waited) * 1e3,
        )

    def addresses(self) -> UintArray:
        """Address of every parameter's entry in the pinned half, 0 for ranks that are not read."""
        assert self._pinned_half is not None
        return self._by_half[self._pinned_half]

    def release(self) -> None:
        """Let the trainers have the pinned half back."""
        self._pinned_half = None
        for reader in self._readers:
            reader.release()

    def close(self) -> None:
        for reader in (*self._readers, *self._others):
            reader.close()

    def _entry_addresses(self, half: int) -> UintArray:
        addresses = np.zeros(len(self._nbytes), np.uint64)
        addresses[self._mapped] = _joined(
            [reader.entry_addresses(half) for reader in self._readers]
        )
        return addresses

    def _verify(self, published: UintArray, version: int) -> None:
        parameters = self._layout.export_map.parameters
        mapped = self._mapped
        found = digest(self.addresses()[mapped], self._nbytes[mapped], self._device)
        wrong = mapped[found != published[mapped]]
        if len(wrong):
            raise StaleArena(
                f"{parameters[int(wrong[0])].label}: its packed bytes are not those that were "
                f"published as version {version} ({len(wrong)} of {len(mapped)} entries differ)"
            )
        known = set(mapped.tolist())
        for first, copy in self._layout.export_map.replicas:
            if {first, copy} <= known and published[first] != published[copy]:
                raise StaleArena(
                    f"{parameters[first].label} and its replica on {parameters[copy].label} hold "
                    f"different values in version {version}; the trainer's ranks have diverged"
                )


def _joined(parts: list[UintArray]) -> UintArray:
    return np.concatenate([np.zeros(0, np.uint64), *parts])
