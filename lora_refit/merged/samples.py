"""Sampled elements of the trainer's base, by which an engine tells whether it serves the same one."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from lora_refit.base_samples import BaseSample
from lora_refit.collectives import ProcessGroup, all_gather_bytes
from lora_refit.errors import LayoutMismatch
from lora_refit.kernels import DTYPE_CODES
from lora_refit.merged.layout import MergedWeight
from lora_refit.merged.pieces import Pieces, SourcedPiece
from lora_refit.sources.base import BaseWeight, has_storage
from lora_refit.trace.axis import IntArray

_POINTS = 8


class _Found(msgspec.Struct, array_like=True):
    """What one rank read: float32 [rows, cols] at some of a weight's sampled rows and columns."""

    weight: int
    rows: list[int]
    cols: list[int]
    values: bytes


def sample_bases(
    held: Sequence[BaseWeight],
    pieces: Pieces,
    weights: Sequence[MergedWeight],
    rank: int,
    group: ProcessGroup | None,
) -> tuple[tuple[BaseSample, ...], tuple[str, ...]]:
    """Sampled rows and columns of every weight that has pieces, and a line for every other weight
    with the reason. Collective; the same on every rank.

    Raises LayoutMismatch, naming both ranks, if ranks that hold the same elements disagree.
    """
    grids = [tuple(map(_spread, weight.shape)) for weight in weights]
    own = [
        _read(item, held[item.base].weight, *grids[item.piece.weight])
        for item in (*pieces.pieces, *pieces.replicas)
        if item.piece.rank == rank
    ]
    gathered = all_gather_bytes(msgspec.msgpack.encode([item for item in own if item]), group)
    values = [np.full((len(rows), len(cols)), np.nan, np.float32) for rows, cols in grids]
    for other, data in enumerate(gathered):
        for found in msgspec.msgpack.decode(data, type=list[_Found]):
            _place(found, values[found.weight], weights[found.weight], other)
    samples: list[BaseSample] = []
    gaps: list[str] = []
    for index, (weight, (rows, cols)) in enumerate(zip(weights, grids, strict=True)):
        if index in pieces.problems:
            gaps.append(f"{weight.name}: {pieces.problems[index]}")
        elif np.isnan(values[index]).any():
            gaps.append(f"{weight.name}: the trainer's values are not there, or not numbers")
        else:
            samples.append(
                BaseSample(
                    name=weight.name,
                    shape=weight.shape,
                    rows=tuple(rows.tolist()),
                    cols=tuple(cols.tolist()),
                    values=values[index].tobytes(),
                )
            )
    return tuple(samples), tuple(gaps)


def _spread(count: int) -> IntArray:
    """Positions along an axis, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, _POINTS).round().astype(np.int64))


def _read(
    item: SourcedPiece, weight: torch.Tensor | None, rows: IntArray, cols: IntArray
) -> _Found | None:
    """The piece's part of the sampled grid; nothing where the base is not stored as floats."""
    if weight is None or weight.dtype not in DTYPE_CODES or not has_storage(weight):
        return None
    piece = item.piece
    row_at = np.flatnonzero((rows >= piece.row) & (rows < piece.row + piece.rows))
    col_at = np.flatnonzero((cols >= piece.col) & (cols < piece.col + piece.cols))
    shard_rows = torch.from_numpy(item.weight_rows[rows[row_at] - piece.row])
    shard_cols = torch.from_numpy(item.weight_cols[cols[col_at] - piece.col])
    values = weight.detach()[shard_rows.to(weight.device)][:, shard_cols.to(weight.device)]
    return _Found(
        piece.weight,
        row_at.tolist(),
        col_at.tolist(),
        values.to("cpu", torch.float32).contiguous().numpy().tobytes(),
    )


def _place(
    found: _Found,
    values: np.ndarray[tuple[int, int], np.dtype[np.float32]],
    weight: MergedWeight,
    rank: int,
) -> None:
    at = np.ix_(found.rows, found.cols)
    new = np.frombuffer(found.values, np.float32).reshape(len(found.rows), len(found.cols))
    before = values[at]
    if not bool((np.isnan(before) | (before == new)).all()):
        raise LayoutMismatch(
            f"{weight.name}: trainer rank {rank} holds other base values than a lower rank that "
            "holds the same elements; load one checkpoint on all ranks"
        )
    values[at] = new
