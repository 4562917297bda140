"""One trainer rank's merges: a bucket at a time, from base shards and all ranks' adapter shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.kernels import MERGE_SUMS_DTYPE, BufferType, MergeKernel
from lora_refit.kernels.merge import Merged
from lora_refit.merged.bases import BaseShards, addresses_of
from lora_refit.merged.layout import SUM_WORDS, Bucket, Chunk, MergedLayout
from lora_refit.merged.merge_plan import Operands, Target, merge_tables
from lora_refit.merged.pieces import SourcedPiece
from lora_refit.trace.export import Parameter
from lora_refit.trace.tags import matrix_shape

UintArray = npt.NDArray[np.uint64]

_MULTIPLIER = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class MergedBucket:
    """digest: of all chunks' bytes, see `combined_digest`. sums: `MERGE_SUMS_DTYPE`, one for each of
    `Bucket.weights_of`."""

    digest: int
    sums: npt.NDArray[np.void]


@dataclass(frozen=True)
class MergeInputs:
    """What all merges of one rank read.

    pieces: of all ranks, as the layout numbers them. parameters: of the export map; adapter_dtype:
    theirs in the arenas. scale: on B @ A.
    """

    layout: MergedLayout
    pieces: Sequence[SourcedPiece]
    parameters: Sequence[Parameter]
    adapter_dtype: torch.dtype
    bases: BaseShards
    rank: int
    scale: float

    @property
    def dtype(self) -> torch.dtype:
        """Of the merged weights."""
        dtype: torch.dtype = getattr(torch, self.layout.dtype)
        return dtype

    def kernel(
        self,
        targets: Sequence[Target],
        destinations: Sequence[BufferType],
        modules: int,
        *,
        zeros: int = 0,
    ) -> MergeKernel:
        """Its sources are `source_addresses`. With `zeros` it makes B @ A alone, and has one more
        source: that many fp32 zeros, at least a row."""
        matrices = [matrix_shape(item.shape) for item in self.parameters]
        adapters = [BufferType(self.adapter_dtype, rows * cols) for rows, cols in matrices]
        operands = Operands(self.bases.widths, tuple(cols for _, cols in matrices))
        sources = [*self.bases.buffers, *adapters]
        blocks, segments = merge_tables(targets, operands)
        if zeros:
            blocks["weight"], blocks["scale"] = len(sources), 1.0
            blocks["weight_offset"] = blocks["weight_row_stride"] = 0
            sources.append(BufferType(torch.float32, zeros))
        return MergeKernel(
            blocks,
            segments,
            sources,
            destinations,
            modules,
            self.bases.device,
        )

    def target(self, chunk: Chunk, dst: int, module: int) -> Target:
        """A whole chunk as destination buffer `dst`."""
        piece = self.pieces[chunk.piece]
        row = chunk.row - piece.piece.row
        return Target(piece, row, chunk.rows, dst, 0, module, self.scale)

    def require_pristine(self, bucket: int) -> None:
        """Raises LayoutMismatch if a base weight under a bucket has been written to."""
        chunks = self.layout.buckets[bucket].of_rank(self.rank)
        self.bases.require_pristine(sorted({self.pieces[chunk.piece].base for chunk in chunks}))

    def source_addresses(self, adapters: UintArray) -> UintArray:
        """adapters: address of every parameter of the export map that this rank's pieces read."""
        return np.concatenate([addresses_of(self.bases.now()), adapters])


class BucketMerger:
    """Merges this rank's part of a bucket in one launch: gathers A and B, multiplies, adds, rounds
    once, packs, digests and measures what the rounding lost."""

    def __init__(self, inputs: MergeInputs) -> None:
        self._inputs = inputs
        self._offsets = []
        self._kernels = []
        for bucket in inputs.layout.buckets:
            chunks = bucket.of_rank(inputs.rank)
            self._kernels.append(_bucket_kernel(inputs, bucket))
            self._offsets.append(np.asarray([chunk.offset for chunk in chunks], np.uint64))

    def prepare(self, adapters: UintArray, stream: object | None) -> None:
        """Nothing: every row stands for itself."""

    def merge(
        self, bucket: int, address: int, adapters: UintArray, stream: object | None
    ) -> MergedBucket:
        """Merge to `address`, which holds `ring_bytes`. Raises LayoutMismatch for a base that is not
        what it was."""
        self._inputs.require_pristine(bucket)
        merged: Merged = self._kernels[bucket].run(
            self._inputs.source_addresses(adapters),
            self._offsets[bucket] + np.uint64(address),
            stream,
        )
        return MergedBucket(combined_digest(merged.digests), merged.sums)


def _bucket_kernel(inputs: MergeInputs, bucket: Bucket) -> MergeKernel:
    chunks, modules = bucket.of_rank(inputs.rank), bucket.weights_of(inputs.rank)
    targets = [
        inputs.target(chunk, dst, modules.index(chunk.weight)) for dst, chunk in enumerate(chunks)
    ]
    buffers = [BufferType(inputs.dtype, chunk.numel) for chunk in chunks]
    return inputs.kernel(targets, buffers, len(modules))


def combined_digest(digests: UintArray) -> int:
    """One number for the digests of a bucket's chunks; their order counts."""
    total = 0
    for value in digests.tolist():
        total = (total * _MULTIPLIER + int(value) + 1) % 2**64
    return total


def words_of_sums(sums: npt.NDArray[np.void], words: int) -> UintArray:
    """Fidelity sums as the notes of a bucket, filled up with zeros."""
    notes = np.zeros(words, np.uint64)
    notes[: SUM_WORDS * len(sums)] = np.frombuffer(sums.tobytes(), np.uint64)
    return notes


def sums_of_words(notes: UintArray, count: int) -> npt.NDArray[np.void]:
    """`MERGE_SUMS_DTYPE` [count], back from the notes of a bucket."""
    return np.frombuffer(notes.tobytes(), MERGE_SUMS_DTYPE, count)
