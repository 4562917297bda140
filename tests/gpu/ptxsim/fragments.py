"""Which matrix element each lane's registers hold (PTX ISA, "Matrix Fragments", `ldmatrix`).

A map has shape [lane, element]: elements in the order of the lane's registers, and of 16-bit halves
within a register. The simulator uses these maps; the fragment oracle compares them with CuTe.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LANE = np.arange(32)[:, None]
GROUP, IN_GROUP = LANE // 4, LANE % 4


@dataclass(frozen=True)
class FragmentMap:
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    elements_per_register: int

    @property
    def registers(self) -> int:
        return self.rows.shape[1] // self.elements_per_register

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix that the fragments make up."""
        return int(self.rows.max()) + 1, int(self.columns.max()) + 1


def _map(
    rows: NDArray[np.int64], columns: NDArray[np.int64], elements_per_register: int
) -> FragmentMap:
    rows, columns = (np.array(part) for part in np.broadcast_arrays(rows, columns))
    return FragmentMap(rows, columns, elements_per_register)


_HALF, _REGISTER = np.arange(8) % 2, np.arange(8) // 2
_WORD = np.arange(4)

ACCUMULATOR = _map(GROUP + 8 * (_WORD // 2), 2 * IN_GROUP + _WORD % 2, 1)
"""C and D of 16 x 8, fp32: one element a register."""

A_16X16 = _map(GROUP + 8 * (_REGISTER % 2), 2 * IN_GROUP + _HALF + 8 * (_REGISTER // 2), 2)
"""A of m16n8k16, 16-bit: rows by k."""

B_16X8 = _map((2 * IN_GROUP + _HALF + 8 * _REGISTER)[:, :4], GROUP, 2)
"""B of m16n8k16, 16-bit: k by columns."""

A_TF32 = _map(GROUP + 8 * (_WORD % 2), IN_GROUP + 4 * (_WORD // 2), 1)
"""A of m16n8k8, tf32: rows by k."""

B_TF32 = _map(IN_GROUP + 4 * np.arange(2), GROUP, 1)
"""B of m16n8k8, tf32: k by columns."""


def ldmatrix_map(matrices: int, transposed: bool) -> FragmentMap:
    """Row r of matrix m is row 8 * m + r, at the address that lane 8 * m + r gives."""
    element = np.arange(2 * matrices)
    first = 8 * (element // 2)
    along, across = GROUP, 2 * IN_GROUP + element % 2
    rows, columns = (across, along) if transposed else (along, across)
    return _map(first + rows, columns, 2)
