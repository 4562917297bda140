"""Counting matrix elements that a set of row-and-column selections leaves uncovered."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lora_refit.trace.axis import IntArray


def uncovered_elements(shape: tuple[int, int], pieces: Sequence[tuple[IntArray, IntArray]]) -> int:
    """Elements of a matrix that lie in no piece; a piece is the product of some rows and columns.

    Takes O((rows + columns) * distinct pieces) memory: columns selected by the same pieces are
    alike, so rows are counted once per kind of column.
    """
    distinct = list(
        {(rows.tobytes(), cols.tobytes()): (rows, cols) for rows, cols in pieces}.values()
    )
    if not distinct:
        return shape[0] * shape[1]
    row_in = np.zeros((shape[0], len(distinct)), bool)
    col_in = np.zeros((shape[1], len(distinct)), bool)
    for index, (rows, cols) in enumerate(distinct):
        row_in[rows, index] = True
        col_in[cols, index] = True
    kinds, counts = np.unique(col_in, axis=0, return_counts=True)
    missing = 0
    for kind, count in zip(kinds, counts, strict=True):
        missing += int(count) * int((~row_in[:, kind].any(axis=1)).sum())
    return missing
