"""Reading tags back: a plane is kept as the rows and columns where it changes and its corners.

Movement along one axis at a time keeps a plane separable, so this takes O(rows + columns) memory;
a tensor that would need more is not moved by anything that copy blocks can replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.errors import NotMovement
from lora_refit.trace.axis import IntArray
from lora_refit.trace.tags import BASE

_MIN_CORNERS = 1 << 16
_CORNERS_PER_LINE = 64


@dataclass(frozen=True)
class CompressedPlane:
    """A matrix that is constant between the given row and column starts.

    row_starts, col_starts: int64, first is 0. values: [len(row_starts), len(col_starts)].
    """

    row_starts: IntArray
    col_starts: IntArray
    values: npt.NDArray[np.integer]

    def at(self, rows: npt.ArrayLike, cols: npt.ArrayLike) -> npt.NDArray[np.integer]:
        """The values at the outer product of sorted or unsorted row and column positions."""
        row_cells = np.searchsorted(self.row_starts, rows, "right") - 1
        col_cells = np.searchsorted(self.col_starts, cols, "right") - 1
        return self.values[np.ix_(row_cells, col_cells)]


def read(matrix: torch.Tensor, name: str) -> CompressedPlane:
    """Compress one tag plane as it came out of the exporter or loader.

    matrix: 2-D, any floating dtype. Raises NotMovement, naming the tensor, if it holds anything
    but tags or changes at more places than movement can explain.
    """
    digits = _as_digits(matrix, name)
    row_starts = np.append(0, np.flatnonzero((digits[1:] != digits[:-1]).any(axis=1)) + 1)
    col_starts = np.append(0, np.flatnonzero((digits[:, 1:] != digits[:, :-1]).any(axis=0)) + 1)
    limit = max(_MIN_CORNERS, _CORNERS_PER_LINE * sum(digits.shape))
    if len(row_starts) * len(col_starts) > limit:
        raise NotMovement(
            f"{name}: its elements are scattered ({len(row_starts)} x {len(col_starts)} distinct "
            f"pieces in a {digits.shape[0]} x {digits.shape[1]} matrix); only movement of rows and "
            "columns can be replayed"
        )
    values = digits[np.ix_(row_starts, col_starts)]
    return CompressedPlane(row_starts.astype(np.int64), col_starts.astype(np.int64), values)


def _as_digits(matrix: torch.Tensor, name: str) -> npt.NDArray[np.uint8]:
    source = matrix.detach()
    if source.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise NotMovement(
            f"{name}: dtype {source.dtype} cannot hold tags; export bfloat16, float16 or float32"
        )
    clamped = source.nan_to_num(0.0).clamp(0, BASE)
    digits = clamped.to(torch.uint8)
    wrong = digits.to(source.dtype) != source
    if bool(wrong.any()):
        example = float(source[wrong][0])
        raise NotMovement(
            f"{name}: {int(wrong.sum())} of {source.numel()} values are not tags (for example "
            f"{example!r}); the exporter or loader computes them instead of moving them"
        )
    return digits.contiguous().cpu().numpy()


def combine(digits: list[CompressedPlane], name: str) -> CompressedPlane:
    """Join the digit planes of one field into int64 coordinates, -1 where nothing arrived."""
    row_starts = np.unique(np.concatenate([plane.row_starts for plane in digits]))
    col_starts = np.unique(np.concatenate([plane.col_starts for plane in digits]))
    total = np.zeros((len(row_starts), len(col_starts)), np.int64)
    padding: npt.NDArray[np.bool_] | None = None
    for place, plane in enumerate(digits):
        values = plane.at(row_starts, col_starts).astype(np.int64)
        empty = values == 0
        if padding is not None and bool((padding != empty).any()):
            raise NotMovement(f"{name}: its padding differs between two passes of the same trace")
        padding = empty
        total += (values - 1) * BASE**place
    total[padding] = -1
    return CompressedPlane(row_starts, col_starts, total)
