"""Compose two movements, destination <- middle <- source, into copy blocks destination <- source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from lora_refit.plan.blocks import Block, batch, joint_runs
from lora_refit.trace.axis import IntArray
from lora_refit.trace.movement import Cell, TensorMap
from lora_refit.trace.tags import matrix_shape


def compose(
    outer: Sequence[TensorMap],
    inner: Sequence[TensorMap],
    source_shapes: Sequence[tuple[int, ...]],
    scales: Mapping[int, float],
) -> list[Block]:
    """Blocks that fill the outer destinations straight from the inner sources.

    outer: maps of destination tensors, whose cells index `inner`.
    inner: maps of the middle tensors, whose cells index `source_shapes`.
    scales: factor by middle tensor index; 1 where absent.
    """
    blocks = []
    for index, tensor_map in enumerate(outer):
        for cell in tensor_map.cells:
            middle = inner[cell.tensor]
            scale = scales.get(cell.tensor, 1.0)
            blocks += _through(index, tensor_map, cell, middle, source_shapes, scale)
    return batch(blocks)


def _through(
    dst: int,
    outer: TensorMap,
    cell: Cell,
    middle: TensorMap,
    source_shapes: Sequence[tuple[int, ...]],
    scale: float,
) -> list[Block]:
    row_offsets, col_offsets = _destination_offsets(outer, cell)
    middle_rows, middle_cols = cell.source_rows, cell.source_cols
    slab_rows, _ = middle.slab_shape
    blocks = []
    for piece in middle.cells:
        i = middle_rows - (piece.slab * slab_rows + piece.row)
        j = middle_cols - piece.col
        in_rows = np.flatnonzero((i >= 0) & (i < piece.rows))
        in_cols = np.flatnonzero((j >= 0) & (j < piece.cols))
        if len(in_rows) == 0 or len(in_cols) == 0:
            continue
        width = matrix_shape(source_shapes[piece.tensor])[1]
        along_rows = piece.along_rows.coordinates()[i[in_rows]]
        along_cols = piece.along_cols.coordinates()[j[in_cols]]
        if piece.transposed:
            along_cols = along_cols * width
        else:
            along_rows = along_rows * width
        blocks += _strided(
            piece.tensor,
            dst,
            (row_offsets[in_rows], along_rows),
            (col_offsets[in_cols], along_cols),
            scale,
        )
    return blocks


def _destination_offsets(tensor_map: TensorMap, cell: Cell) -> tuple[IntArray, IntArray]:
    """Element offsets in the destination of the cell's source rows and of its source columns."""
    slab_rows, slab_cols = tensor_map.slab_shape
    rows = (cell.slab * slab_rows + cell.row + np.arange(cell.rows)) * slab_cols
    cols = cell.col + np.arange(cell.cols)
    return (cols, rows) if cell.transposed else (rows, cols)


def _strided(
    src: int,
    dst: int,
    rows: tuple[IntArray, IntArray],
    cols: tuple[IntArray, IntArray],
    scale: float,
) -> list[Block]:
    """Blocks for an outer product; rows and cols are (destination offsets, source offsets)."""
    col_runs = joint_runs(*cols)
    return [
        Block(
            src=src,
            dst=dst,
            src_offset=row.src + col.src,
            dst_offset=row.dst + col.dst,
            size=(1, row.count, col.count),
            src_stride=(0, row.src_step, col.src_step),
            dst_stride=(0, row.dst_step, col.dst_step),
            scale=scale,
        )
        for row in joint_runs(*rows)
        for col in col_runs
    ]
