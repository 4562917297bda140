"""Merges that need more than one kernel: a few rows at a time, through an fp32 scratch.

DoRA rescales rows by norms that run over all tensor-parallel ranks; the trainer's own rounding
rounds B @ A, and its multiple, before it adds them. Both work on torch's current stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.collectives import ProcessGroup, all_gather_bytes, same_outcome
from lora_refit.devices import new_tensor
from lora_refit.kernels import (
    BLOCK_DTYPE,
    MERGE_SUMS_DTYPE,
    BufferType,
    CopyKernel,
    MergeKernel,
)
from lora_refit.merged.dora import Fill, merge_rows, row_norms, row_squares, scratch_rows
from lora_refit.merged.layout import Chunk
from lora_refit.merged.merge_plan import Target
from lora_refit.merged.merger import MergedBucket, MergeInputs, UintArray, combined_digest
from lora_refit.sources.base import BaseWeight

PREPARE_COLLECTIVES = 4
"""Of DoraMerger.prepare: of every rank's outcome and squares, first their length and then they."""


class ExactRows:
    """Rows of W + scale * B @ A of one chunk, in fp32, a scratch at a time; with product_only those
    of B @ A."""

    def __init__(self, inputs: MergeInputs, chunk: Chunk, *, product_only: bool = False) -> None:
        self._inputs = inputs
        zeros = (chunk.cols if product_only else 0,)
        self._zeros = new_tensor(zeros, torch.float32, inputs.bases.device).zero_()
        self._piece = inputs.pieces[chunk.piece]
        self._first = chunk.row - self._piece.piece.row
        self._shape = (chunk.rows, chunk.cols)
        self._step = scratch_rows(*self._shape)
        self._kernels = [self._kernel(row) for row in range(0, chunk.rows, self._step)]

    @property
    def base(self) -> int:
        """Number of the base weight under the chunk."""
        return self._piece.base

    @cached_property
    def base_rows(self) -> torch.Tensor:
        """Which rows of the base weight lie under the chunk."""
        return torch.from_numpy(self._piece.weight_rows[self._first : self._first + self._shape[0]])

    def scratch(self) -> torch.Tensor:
        shape = (self._step, self._shape[1])
        return new_tensor(shape, torch.float32, self._inputs.bases.device)

    def under(self, held: BaseWeight) -> torch.Tensor:
        """A copy of W under the chunk, [rows, cols]."""
        assert held.weight is not None
        weight = held.weight.detach()
        cols = torch.from_numpy(self._piece.weight_cols)
        return weight[self.base_rows.to(weight.device)][:, cols.to(weight.device)]

    def filler(self, sources: UintArray) -> Fill:
        """See lora_refit.merged.dora; `first` is a multiple of the rows of a scratch."""

        if len(self._zeros):
            sources = np.append(sources, np.uint64(self._zeros.data_ptr()))

        def fill(first: int, scratch: torch.Tensor) -> None:
            kernel = self._kernels[first // self._step]
            kernel.run(sources, np.asarray([scratch.data_ptr()], np.uint64))

        return fill

    def _kernel(self, row: int) -> MergeKernel:
        rows = min(self._step, self._shape[0] - row)
        target = Target(self._piece, self._first + row, rows, 0, 0, 0, self._inputs.scale)
        scratch = BufferType(torch.float32, rows * self._shape[1])
        return self._inputs.kernel([target], [scratch], 1, zeros=len(self._zeros))


class RowMerger(ABC):
    """Merges the chunks of a bucket one after another."""

    def __init__(self, inputs: MergeInputs) -> None:
        self._inputs = inputs
        self._buckets = [bucket.of_rank(inputs.rank) for bucket in inputs.layout.buckets]
        self._weights = [bucket.weights_of(inputs.rank) for bucket in inputs.layout.buckets]
        self.rows = {
            chunk: ExactRows(inputs, chunk) for chunks in self._buckets for chunk in chunks
        }
        self._copies = {chunk: self._copy(chunk) for chunk in self.rows}

    @abstractmethod
    def prepare(self, adapters: UintArray, stream: object | None) -> None:
        """See lora_refit.merged.delivery.Merger."""

    @abstractmethod
    def merge_chunk(
        self, chunk: Chunk, held: BaseWeight, sources: UintArray, out: torch.Tensor
    ) -> npt.NDArray[np.void]:
        """Fill `out` [rows, cols] and return its `MERGE_SUMS_DTYPE` [1]."""

    def merge(
        self, bucket: int, address: int, adapters: UintArray, stream: object | None
    ) -> MergedBucket:
        """Merge this rank's part of a bucket to `address`, which holds `ring_bytes`. Raises
        LayoutMismatch for a base that is not what it was."""
        self._inputs.require_pristine(bucket)
        sources = self._inputs.source_addresses(adapters)
        held = self._inputs.bases.now()
        sums = np.zeros(len(self._weights[bucket]), MERGE_SUMS_DTYPE)
        digests = []
        for chunk in self._buckets[bucket]:
            out = new_tensor(
                (chunk.rows, chunk.cols), self._inputs.dtype, self._inputs.bases.device
            )
            found = self.merge_chunk(chunk, held[self.rows[chunk].base], sources, out)
            place = self._weights[bucket].index(chunk.weight)
            for name in MERGE_SUMS_DTYPE.names or ():
                sums[name][place] += found[name][0]
            digests.append(self._send(chunk, out, address))
        return MergedBucket(combined_digest(np.asarray(digests, np.uint64)), sums)

    def _send(self, chunk: Chunk, out: torch.Tensor, address: int) -> int:
        """Copy a merged chunk into the bucket; returns the digest of its bytes."""
        source = np.asarray([out.data_ptr()], np.uint64)
        destination = np.asarray([address + chunk.offset], np.uint64)
        return int(self._copies[chunk].run(source, destination)[0])

    def _copy(self, chunk: Chunk) -> CopyKernel:
        block = np.zeros(1, BLOCK_DTYPE)
        block["size"] = (1, 1, chunk.numel)
        block["src_stride"] = block["dst_stride"] = (0, 0, 1)
        block["scale"] = 1.0
        buffer = BufferType(self._inputs.dtype, chunk.numel)
        return CopyKernel(block, [buffer], [buffer], self._inputs.bases.device)


class DoraMerger(RowMerger):
    """W' = m / ||W + D|| * (W + D). `prepare` is collective: it adds up the rows' squares over the
    ranks that hold other columns of the same rows."""

    def __init__(self, inputs: MergeInputs, group: ProcessGroup | None) -> None:
        super().__init__(inputs)
        self._group = group
        self._squares: list[torch.Tensor] = []
        self._magnitudes: dict[int, torch.Tensor] = {}

    def prepare(self, adapters: UintArray, stream: object | None) -> None:
        # Copies, as the arenas hold of A and B: the trainer may go on before all is merged.
        self._magnitudes = {
            index: base.magnitude.detach().clone()
            for index, base in enumerate(self._inputs.bases.held())
            if base.magnitude is not None
        }
        own = same_outcome(lambda: self._own_squares(adapters), self._group)
        layout = self._inputs.layout
        squares = [np.zeros(weight.shape[0]) for weight in layout.weights]
        for rank, data in enumerate(all_gather_bytes(own, self._group)):
            values = np.frombuffer(data, np.float64)
            for chunk in (chunk for bucket in layout.buckets for chunk in bucket.of_rank(rank)):
                squares[chunk.weight][chunk.row : chunk.row + chunk.rows] += values[: chunk.rows]
                values = values[chunk.rows :]
        self._squares = [torch.from_numpy(total) for total in squares]

    def merge_chunk(
        self, chunk: Chunk, held: BaseWeight, sources: UintArray, out: torch.Tensor
    ) -> npt.NDArray[np.void]:
        rows = self.rows[chunk]
        magnitude = self._magnitudes[rows.base]
        squares = self._squares[chunk.weight][chunk.row : chunk.row + chunk.rows]
        squares = squares.to(magnitude.device)
        return merge_rows(
            rows.filler(sources),
            rows.under(held),
            magnitude[rows.base_rows.to(magnitude.device)],
            row_norms(self._inputs.layout.weights[chunk.weight].name, [squares]),
            out,
            rows.scratch(),
        )

    def _own_squares(self, adapters: UintArray) -> bytes:
        """fp64 sums over this rank's columns, for every row of its chunks in their order."""
        for bucket in range(len(self._buckets)):
            self._inputs.require_pristine(bucket)
        sources = self._inputs.source_addresses(adapters)
        squares = [
            row_squares(rows.filler(sources), chunk.rows, rows.scratch()).cpu().numpy()
            for chunk, rows in self.rows.items()
        ]
        return np.concatenate([np.zeros(0), *squares]).tobytes()


class ForwardMerger(RowMerger):
    """W' = W + scale * (B @ A) with the product, its multiple and the sum each rounded to the base's
    dtype, as an eager merge in the trainer's dtype does; in the end cast to the merged dtype."""

    def __init__(self, inputs: MergeInputs) -> None:
        super().__init__(inputs)
        self._products = {chunk: ExactRows(inputs, chunk, product_only=True) for chunk in self.rows}

    def prepare(self, adapters: UintArray, stream: object | None) -> None:
        """Nothing: every row stands for itself."""

    def merge_chunk(
        self, chunk: Chunk, held: BaseWeight, sources: UintArray, out: torch.Tensor
    ) -> npt.NDArray[np.void]:
        rows, scale = self._products[chunk], self._inputs.scale
        base = rows.under(held)
        scratch = rows.scratch()
        fill = rows.filler(sources)
        sums = np.zeros(1, MERGE_SUMS_DTYPE)
        for first in range(0, chunk.rows, len(scratch)):
            product = scratch[: min(len(scratch), chunk.rows - first)]
            fill(first, product)
            under = base[first : first + len(product)]
            merged = (under + product.to(base.dtype) * scale).to(out.dtype)
            out[first : first + len(product)] = merged
            update = product.double() * scale
            sums["residual"] += float((merged - (under + update)).square().sum())
            sums["delta"] += float(update.square().sum())
            sums["changed"] += int((merged != under.to(out.dtype)).sum())
            sums["elements"] += merged.numel()
        return sums
