"""Merges whole weights, as an export has them, with the merge kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lora_refit.kernels import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE, BufferType, MergeKernel
from lora_refit.kernels.merge import Merged
from lora_refit.merged.dora import merge_rows, row_norms, row_squares, scratch_rows


@dataclass(frozen=True)
class _Shape:
    rows: int
    cols: int
    rank: int
    weight: torch.dtype
    factors: torch.dtype
    merged: torch.dtype


class DenseMerger:
    """W + scale * B @ A of contiguous CPU matrices: W and W' [rows, cols], B [rows, r], A [r, cols].

    A kernel is kept for every combination of shapes and dtypes. The inputs are only read.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._kernels: dict[_Shape, MergeKernel] = {}

    def merge(
        self, weight: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
    ) -> Merged:
        """LoRA: `out` is round(W + scale * B @ A)."""
        weight, b, a = (matrix.detach().contiguous() for matrix in (weight, b, a))
        shape = _Shape(len(b), a.shape[1], len(a), weight.dtype, a.dtype, out.dtype)
        if shape not in self._kernels:
            self._kernels[shape] = _kernel(shape, self._scale)
        return self._kernels[shape].merge([weight, b, a], [out])

    def merge_dora(
        self,
        module: str,
        weight: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        magnitude: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """DoRA over all columns: `out` is round(m / ||W + scale * B @ A|| * (W + scale * B @ A)).

        Raises UnsupportedAdapter, naming the module and the row, if a row's norm is zero.
        """
        rows, cols = weight.shape
        scratch = torch.empty(scratch_rows(rows, cols), cols)

        def fill(first: int, part: torch.Tensor) -> None:
            chosen = slice(first, first + len(part))
            self.merge(weight[chosen], b[chosen], a, part)

        norms = row_norms(module, [row_squares(fill, rows, scratch)])
        merge_rows(fill, weight, magnitude, norms, out, scratch)


def _kernel(shape: _Shape, scale: float) -> MergeKernel:
    rows, cols, rank = shape.rows, shape.cols, shape.rank
    block = (0, 0, 0, 0, rows, cols, cols, cols, 0, 1, 0, scale)
    segment = (1, 2, 0, 0, rank, 1, cols, 1, rank)
    return MergeKernel(
        np.array([block], MERGE_BLOCK_DTYPE),
        np.array([segment], MERGE_SEGMENT_DTYPE),
        [
            BufferType(shape.weight, rows * cols),
            BufferType(shape.factors, rows * rank),
            BufferType(shape.factors, rank * cols),
        ],
        [BufferType(shape.merged, rows * cols)],
        modules=1,
    )
