"""Tag values: every element of a list of tensors says which tensor, row and column it is.

Each field (tensor, row, column) is written as base-255 digits, one digit per *plane*. Digits are
stored as 1..255, which bf16, fp16 and fp32 hold exactly; 0 is left for "came from nowhere". Fields
are kept apart instead of one global element number because only (tensor, row, column) stays
separable when tensor parallelism concatenates along columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

BASE = 255
FIELDS = ("tensor", "row", "column")


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor seen as a matrix: rows are all leading dimensions, columns the last one."""
    if len(shape) == 0:
        return 1, 1
    return math.prod(shape[:-1]), int(shape[-1])


@dataclass(frozen=True)
class Plane:
    """One base-255 digit of one field."""

    field: str
    digit: int

    def digit_of(self, value: int) -> int:
        return value // int(BASE**self.digit) % BASE + 1


def planes_for(shapes: Sequence[Sequence[int]]) -> tuple[Plane, ...]:
    """The planes that tell every element of tensors of these shapes apart, usually 5 to 7."""
    matrices = [matrix_shape(shape) for shape in shapes]
    limits = (len(shapes), max(rows for rows, _ in matrices), max(cols for _, cols in matrices))
    return tuple(
        Plane(field, digit)
        for field, limit in zip(FIELDS, limits, strict=True)
        for digit in range(_digits(limit))
    )


def _digits(limit: int) -> int:
    count = 1
    while BASE**count < limit:
        count += 1
    return count


def fill(tensor: torch.Tensor, tensor_index: int, plane: Plane) -> None:
    """Write one plane of tags into a tensor of any floating dtype, in place."""
    if plane.field == "tensor":
        tensor.fill_(float(plane.digit_of(tensor_index)))
        return
    rows, cols = matrix_shape(tensor.shape)
    length = rows if plane.field == "row" else cols
    digits = (torch.arange(length) // BASE**plane.digit) % BASE + 1
    digits = digits.to(device=tensor.device, dtype=tensor.dtype)
    along = digits[:, None] if plane.field == "row" else digits[None, :]
    tensor.copy_(along.expand(rows, cols).reshape(tensor.shape))
