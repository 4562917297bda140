"""From pieces to the merge kernel's blocks: whole runs of rows and columns with their K-segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lora_refit.kernels import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE
from lora_refit.merged.pieces import SourcedPiece
from lora_refit.trace.axis import IntArray

Records = npt.NDArray[np.void]


@dataclass(frozen=True)
class Operands:
    """How the kernel's source list is made up: a rank's base weights, then all parameters.

    base_widths, parameter_widths: columns of each, as matrices.
    """

    base_widths: tuple[int, ...]
    parameter_widths: tuple[int, ...]

    def parameter(self, number: int) -> int:
        return len(self.base_widths) + number


@dataclass(frozen=True)
class Target:
    """Rows of a piece to merge, and where they go.

    row: counted from the piece's first. dst: destination buffer; its rows follow each other from
    element dst_offset on. module: whose fidelity sums they add to.
    """

    piece: SourcedPiece
    row: int
    rows: int
    dst: int
    dst_offset: int
    module: int
    scale: float


@dataclass(frozen=True)
class Run:
    """Positions start .. start + count - 1 of some index arrays, all of which advance evenly."""

    start: int
    count: int
    steps: tuple[int, ...]


def even_runs(*arrays: IntArray) -> list[Run]:
    """The longest runs, from the first position on, in which every array has a constant step."""
    table = np.stack(arrays)
    steps = np.diff(table, axis=1)
    changes = np.flatnonzero((steps[:, 1:] != steps[:, :-1]).any(axis=0)) + 1
    length = table.shape[1]
    runs = []
    start = 0
    for stop in [*changes.tolist(), length - 1]:
        # The step into a run's first element belongs to no run.
        if stop <= start:
            continue
        runs.append(Run(start, stop - start + 1, tuple(steps[:, start].tolist())))
        start = stop + 1
    if start == length - 1:
        runs.append(Run(start, 1, (0,) * len(arrays)))
    return runs


def merge_tables(targets: Sequence[Target], operands: Operands) -> tuple[Records, Records]:
    """`MERGE_BLOCK_DTYPE` and `MERGE_SEGMENT_DTYPE` records that merge every target."""
    blocks: list[tuple[int | float, ...]] = []
    segments: list[tuple[int, ...]] = []
    for target in targets:
        _add_target(target, operands, blocks, segments)
    return (
        np.asarray(blocks, MERGE_BLOCK_DTYPE) if blocks else np.zeros(0, MERGE_BLOCK_DTYPE),
        np.asarray(segments, MERGE_SEGMENT_DTYPE) if segments else np.zeros(0, MERGE_SEGMENT_DTYPE),
    )


def _add_target(
    target: Target,
    operands: Operands,
    blocks: list[tuple[int | float, ...]],
    segments: list[tuple[int, ...]],
) -> None:
    piece = target.piece
    inside = slice(target.row, target.row + target.rows)
    weight_rows, b_rows = piece.weight_rows[inside], piece.b.rows[inside]
    width = operands.base_widths[piece.base]
    cols = len(piece.weight_cols)
    # The kernel reads and writes columns next to each other; a column that is not stands alone.
    col_runs = [
        part
        for run in even_runs(piece.weight_cols, *(a.cols for _, a in piece.a))
        for part in _contiguous(run)
    ]
    for row in even_runs(weight_rows, b_rows):
        for col in col_runs:
            first = len(segments)
            segments += _segments(piece, operands, row, int(b_rows[row.start]), col)
            blocks.append(
                (
                    piece.base,
                    target.dst,
                    int(weight_rows[row.start]) * width + int(piece.weight_cols[col.start]),
                    target.dst_offset + row.start * cols + col.start,
                    row.count,
                    col.count,
                    row.steps[0] * width,
                    cols,
                    first,
                    len(segments) - first,
                    target.module,
                    target.scale,
                )
            )


def _contiguous(run: Run) -> list[Run]:
    if run.steps[0] == 1 or run.count == 1:
        return [run]
    alone = tuple(0 for _ in run.steps)
    return [Run(run.start + i, 1, alone) for i in range(run.count)]


def _segments(
    piece: SourcedPiece, operands: Operands, row: Run, b_row: int, col: Run
) -> list[tuple[int, ...]]:
    """K-segments of one block, in the order of k."""
    b_width = operands.parameter_widths[piece.b.parameter]
    segments: list[tuple[int, ...]] = []
    for index, (ks, a) in enumerate(piece.a):
        a_width = operands.parameter_widths[a.parameter]
        b_cols = piece.b.cols[ks]
        for k in even_runs(b_cols, a.rows):
            segments.append(
                (
                    operands.parameter(piece.b.parameter),
                    operands.parameter(a.parameter),
                    b_row * b_width + int(b_cols[k.start]),
                    int(a.rows[k.start]) * a_width + int(a.cols[col.start]),
                    row.steps[1] * b_width,
                    k.steps[0],
                    k.steps[1] * a_width,
                    col.steps[1 + index],
                    k.count,
                )
            )
    return segments
