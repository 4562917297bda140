"""What merged mode moves: rectangles of checkpoint weights, cut into buckets.

Trainer and engine derive the same buckets from the same layout, so no message describes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec
import torch

from lora_refit.errors import LayoutMismatch

CHUNK_ALIGNMENT = 64
"""Of chunks within a bucket, in bytes: whole vectors and cache lines."""

SUM_WORDS = 4
"""64-bit words of one weight's fidelity sums."""


class MergedWeight(msgspec.Struct, frozen=True, array_like=True):
    """A weight [out, in] by its name in the checkpoint, such as `model.layers.0.mlp.up_proj.weight`."""

    name: str
    shape: tuple[int, int]


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a merged weight that one trainer rank computes from its own base shard."""

    weight: int
    rank: int
    row: int
    rows: int
    col: int
    cols: int


@dataclass(frozen=True)
class Chunk:
    """Rows of a piece as they lie in a bucket of its rank, row after row; `offset` in bytes.

    weight, rank, row, rows, col and cols as in Piece. piece: its number.
    """

    piece: int
    weight: int
    rank: int
    row: int
    rows: int
    col: int
    cols: int
    offset: int

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Bucket:
    """What is merged, sent and loaded at a time, over all trainer ranks."""

    chunks: tuple[Chunk, ...]

    def of_rank(self, rank: int) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if chunk.rank == rank)

    def weights_of(self, rank: int) -> tuple[int, ...]:
        """The weights that a rank's part belongs to, in the order of its fidelity sums."""
        return tuple(dict.fromkeys(chunk.weight for chunk in self.of_rank(rank)))


class MergedLayout(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """weights: every adapted weight. pieces: they tile each weight. bucket_bytes: the most that one
    rank puts into one bucket. dtype: of the merged weights, without the `torch.` prefix."""

    dtype: str
    bucket_bytes: int
    weights: tuple[MergedWeight, ...]
    pieces: tuple[Piece, ...]

    @property
    def itemsize(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    @property
    def total_bytes(self) -> int:
        """Of all merged weights together."""
        return sum(math.prod(weight.shape) for weight in self.weights) * self.itemsize

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Raises LayoutMismatch if a bucket cannot hold one row of a weight."""
        return tuple(_fill_buckets(self))

    def nbytes(self, chunk: Chunk) -> int:
        return chunk.numel * self.itemsize

    def ring_bytes(self, rank: int) -> int:
        """Size of each half of a rank's bucket ring; at least one aligned chunk."""
        ends = [
            chunk.offset + self.nbytes(chunk)
            for bucket in self.buckets
            for chunk in bucket.of_rank(rank)
        ]
        return _align(max(ends, default=1))

    def note_words(self, rank: int) -> int:
        """Words for the fidelity sums of one bucket of a rank."""
        counts = [len(bucket.weights_of(rank)) for bucket in self.buckets]
        return SUM_WORDS * max(counts, default=0)


def _fill_buckets(layout: MergedLayout) -> Iterator[Bucket]:
    """Chunks in the order of weights; a rank that has no room left closes the bucket for all."""
    chunks: list[Chunk] = []
    filled: dict[int, int] = {}
    for chunk in _chunks(layout):
        size = layout.nbytes(chunk)
        if filled.get(chunk.rank, 0) + size > layout.bucket_bytes:
            yield Bucket(tuple(chunks))
            chunks, filled = [], {}
        offset = filled.get(chunk.rank, 0)
        chunks.append(replace(chunk, offset=offset))
        filled[chunk.rank] = _align(offset + size)
    if chunks:
        yield Bucket(tuple(chunks))


def _chunks(layout: MergedLayout) -> Iterator[Chunk]:
    """Every piece in parts that fit a bucket; the parts of one weight's pieces take turns, so that
    all ranks are at the same rows."""
    by_weight: dict[int, list[int]] = {}
    for index, piece in enumerate(layout.pieces):
        by_weight.setdefault(piece.weight, []).append(index)
    for weight in range(len(layout.weights)):
        parts = [_parts(layout, index) for index in by_weight[weight]]
        for step in range(max(map(len, parts))):
            yield from (part[step] for part in parts if step < len(part))


def _parts(layout: MergedLayout, index: int) -> list[Chunk]:
    piece = layout.pieces[index]
    row_bytes = piece.cols * layout.itemsize
    most = layout.bucket_bytes // row_bytes
    if most == 0:
        raise LayoutMismatch(
            f"bucket_bytes={layout.bucket_bytes} holds not one row of "
            f"{layout.weights[piece.weight].name} on trainer rank {piece.rank}, which has "
            f"{row_bytes} bytes; give at least that"
        )
    count = -(-piece.rows // most)
    bounds = [piece.row + piece.rows * part // count for part in range(count + 1)]
    return [
        Chunk(index, piece.weight, piece.rank, start, stop - start, piece.col, piece.cols, 0)
        for start, stop in pairwise(bounds)
    ]


def _align(value: int) -> int:
    return -(-value // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT
