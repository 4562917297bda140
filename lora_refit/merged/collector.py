"""An engine worker's side of the bucket rings: verify every bucket, then take them one by one."""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena import RingReader, Taken
from lora_refit.arena_set import ArenaSet
from lora_refit.devices import CPU, new_tensor
from lora_refit.errors import LayoutMismatch, StaleArena
from lora_refit.kernels import BLOCK_DTYPE, MERGE_SUMS_DTYPE, BufferType, CopyKernel, digest
from lora_refit.merged.layout import Bucket, Chunk, MergedLayout
from lora_refit.merged.merger import combined_digest, sums_of_words
from lora_refit.spec import Spec

UintArray = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Staged:
    """A version whose every byte was merged, read and checked, and of which nothing is applied.

    digest: over the digests of all buckets. sums: `MERGE_SUMS_DTYPE`, one for each merged weight.
    """

    digest: str
    sums: npt.NDArray[np.void]


class BucketCollector:
    """All trainer ranks' rings, mapped once, and the plan from their buckets to whole weights.

    device: where the weights are put together.
    """

    def __init__(self, spec: Spec, timeout_s: float, device: torch.device = CPU) -> None:
        layout = spec.layout.merged
        if layout is None:
            raise LayoutMismatch("the spec is of adapter mode; it has no merged weights")
        if len(spec.rings) != len(spec.arenas):
            raise LayoutMismatch(
                f"the spec has {len(spec.rings)} bucket rings for {len(spec.arenas)} trainer ranks; "
                "it was altered, take the publisher's"
            )
        self._layout: MergedLayout = layout
        self._layout_digest = spec.layout_digest
        self._device = device
        self._timeout_s = timeout_s
        self._rings: dict[int, RingReader] = {}
        self._copies = [_BucketCopy(layout, bucket, device) for bucket in layout.buckets]
        self._adapter_digest = ""
        self._sums = np.zeros(0, MERGE_SUMS_DTYPE)
        self._digests: list[dict[int, int]] = []
        self._partial: dict[int, torch.Tensor] = {}
        self._held_bytes = 0
        self._peak_bytes = 0
        self._arenas = ArenaSet(spec, timeout_s, device)
        try:
            for rank in sorted({piece.rank for piece in layout.pieces}):
                self._rings[rank] = RingReader(
                    spec.rings[rank],
                    spec.layout_digest,
                    layout.ring_bytes(rank),
                    layout.note_words(rank),
                    timeout_s,
                    device=device,
                )
        except BaseException:
            self.close()
            raise

    @property
    def transport(self) -> str:
        """How the ranks' buckets reach this worker, each way once."""
        return ", ".join(dict.fromkeys(ring.transport for ring in self._rings.values()))

    def take_peak_bytes(self) -> int:
        """The most that was held of merged weights since this was last asked."""
        peak, self._peak_bytes = self._peak_bytes, self._held_bytes
        return peak

    @property
    def total_bytes(self) -> int:
        """Of all weights of one version."""
        return self._layout.total_bytes

    @property
    def buckets(self) -> int:
        return len(self._layout.buckets)

    def begin(self, sequence: int, version: int, timeout_s: float) -> float:
        """Wait for a version, check the adapters that it is merged from, and open a session on every
        ring; returns the ms waited.

        Raises WriterTimeout naming the rank that does not publish, StaleArena naming what is not as
        published; then the sessions are closed.
        """
        self.end()
        try:
            verified = self._arenas.pin_and_verify(sequence, version, timeout_s)
            self._arenas.release()
            for ring in self._rings.values():
                ring.open(sequence, timeout_s)
        except BaseException:
            self.end()
            raise
        self._adapter_digest = verified.digest
        self._sums = np.zeros(len(self._layout.weights), MERGE_SUMS_DTYPE)
        return verified.wait_ms

    def verify(self, slice_s: float) -> Staged | None:
        """Have buckets merged once and check their bytes, one at least, until `slice_s` is over; the
        sessions stay open for `take`. None while there are more.

        Raises WriterTimeout naming the rank that does not deliver, StaleArena naming what is not as
        merged; then the sessions are closed.
        """
        started = time.perf_counter()
        try:
            while len(self._digests) < self.buckets:
                self._verify_next()
                if len(self._digests) < self.buckets and time.perf_counter() - started > slice_s:
                    return None
        except BaseException:
            self.end()
            raise
        packed = np.asarray(
            [value for digests in self._digests for value in digests.values()], np.uint64
        )
        name = self._layout_digest + self._adapter_digest.encode() + packed.tobytes()
        return Staged(hashlib.blake2b(name, digest_size=16).hexdigest(), self._sums)

    def take(self, bucket: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that a staged bucket completes, [out, in], in memory of their own.

        Buckets must be taken in order. Raises StaleArena if a bucket's bytes are not those that were
        staged.
        """
        copy = self._copies[bucket]
        following = bucket + 1 if bucket + 1 < self.buckets else None
        addresses = self._pin(bucket, self._digests[bucket], following)
        for weight in copy.weights:
            if weight not in self._partial:
                self._partial[weight] = self._new_tensor(weight)
        targets = [self._partial[weight].data_ptr() for weight in copy.weights]
        copy.kernel.run(addresses, np.asarray(targets, np.uint64))
        self._release()
        for weight in copy.completes:
            yield self._layout.weights[weight].name, self._partial.pop(weight)

    def end(self) -> None:
        """Close the sessions, so that the trainer can publish again. Idempotent."""
        self._partial.clear()
        self._digests = []
        for ring in self._rings.values():
            ring.end()

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        self._arenas.close()
        for ring in self._rings.values():
            ring.close()

    def _verify_next(self) -> None:
        number = len(self._digests)
        bucket = self._layout.buckets[number]
        found: dict[int, int] = {}
        for rank, chunks in self._ranks_of(bucket):
            taken = self._take(rank, number, (number + 1) % self.buckets)
            self._check(chunks, taken.address, taken.digest, rank, number)
            found[rank] = taken.digest
            weights = list(bucket.weights_of(rank))
            for name in MERGE_SUMS_DTYPE.names or ():
                self._sums[name][weights] += sums_of_words(taken.notes, len(weights))[name]
        self._digests.append(found)
        self._release()

    def _pin(self, number: int, expected: dict[int, int], following: int | None) -> UintArray:
        """Pin a bucket on every rank and check it again; returns the addresses of its chunks."""
        addresses = []
        for rank, chunks in self._ranks_of(self._layout.buckets[number]):
            taken = self._take(rank, number, following)
            if taken.digest != expected[rank]:
                raise StaleArena(
                    f"trainer rank {rank}, bucket {number}: merged to other bytes than when it was "
                    "staged; its base weights have changed in between"
                )
            self._check(chunks, taken.address, taken.digest, rank, number)
            addresses += [taken.address + chunk.offset for chunk in chunks]
        return np.asarray(addresses, np.uint64)

    def _check(
        self, chunks: Sequence[Chunk], address: int, published: int, rank: int, number: int
    ) -> None:
        addresses = np.asarray([address + chunk.offset for chunk in chunks], np.uint64)
        nbytes = np.asarray([self._layout.nbytes(chunk) for chunk in chunks], np.uint64)
        if combined_digest(digest(addresses, nbytes, self._device)) != published:
            names = dict.fromkeys(self._layout.weights[chunk.weight].name for chunk in chunks)
            raise StaleArena(
                f"trainer rank {rank}, bucket {number} ({', '.join(names)}): its bytes are not those "
                "that were merged"
            )

    def _release(self) -> None:
        for ring in self._rings.values():
            ring.release()

    def _take(self, rank: int, number: int, following: int | None) -> Taken:
        """Pin a rank's bucket, and have it merge the next one while this one is worked on."""
        taken = self._rings[rank].take(number, self._timeout_s)
        if following is not None and self._layout.buckets[following].of_rank(rank):
            self._rings[rank].ask(following)
        return taken

    def _new_tensor(self, weight: int) -> torch.Tensor:
        """Memory for a whole weight; counted until whoever it is given to lets go of it."""
        dtype: torch.dtype = getattr(torch, self._layout.dtype)
        tensor = new_tensor(self._layout.weights[weight].shape, dtype, self._device)
        self._count(tensor.nbytes)
        weakref.finalize(tensor, self._count, -tensor.nbytes)
        return tensor

    def _count(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._held_bytes)

    def _ranks_of(self, bucket: Bucket) -> Iterator[tuple[int, tuple[Chunk, ...]]]:
        for rank in self._rings:
            if chunks := bucket.of_rank(rank):
                yield rank, chunks


class _BucketCopy:
    """One bucket's copy from the rings into whole weights.

    weights: that it writes, in the order of the kernel's destinations. completes: those of which
    nothing is missing afterwards.
    """

    def __init__(self, layout: MergedLayout, bucket: Bucket, device: torch.device) -> None:
        chunks = sorted(bucket.chunks, key=lambda chunk: chunk.rank)
        self.weights = list(dict.fromkeys(chunk.weight for chunk in bucket.chunks))
        last = {weight: index for index, b in enumerate(layout.buckets) for weight in _weights(b)}
        number = layout.buckets.index(bucket)
        self.completes = [weight for weight in self.weights if last[weight] == number]
        dtype: torch.dtype = getattr(torch, layout.dtype)
        blocks = np.zeros(len(chunks), BLOCK_DTYPE)
        for source, chunk in enumerate(chunks):
            width = layout.weights[chunk.weight].shape[1]
            block = blocks[source]
            block["src"], block["dst"] = source, self.weights.index(chunk.weight)
            block["dst_offset"] = chunk.row * width + chunk.col
            block["size"] = (1, chunk.rows, chunk.cols)
            block["src_stride"] = (0, chunk.cols, 1)
            block["dst_stride"] = (0, width, 1)
            block["scale"] = 1.0
        self.kernel = CopyKernel(
            blocks,
            [BufferType(dtype, chunk.numel) for chunk in chunks],
            [
                BufferType(dtype, layout.weights[w].shape[0] * layout.weights[w].shape[1])
                for w in self.weights
            ],
            device,
        )


def _weights(bucket: Bucket) -> Iterator[int]:
    return (chunk.weight for chunk in bucket.chunks)
