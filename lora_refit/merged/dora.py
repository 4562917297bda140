"""DoRA: W' = round(m / ||M|| * M) for M = W + scale * B @ A, row by row, as PEFT merges it.

The norm of a row runs over the whole input dimension. A rank that holds some columns of its rows
adds up `row_squares` with the ranks that hold the others before it merges.

M is never stored: the merge kernel fills an fp32 scratch of a few rows, once for the norms and once
for the merge. Error of one element, where e is that of M (the merge kernel's bound, and half an ulp
of fp32) and half_ulp belongs to the dtype of W':

    |W' - m / ||M|| * M|  <=  half_ulp  +  |m| / ||M|| * (e + |M| * ||e|| / (||M|| - ||e||))

A destination of two bytes adds 2^-23 of the value, for the rounding to fp32 on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import MERGE_SUMS_DTYPE

Fill = Callable[[int, torch.Tensor], None]
"""fill(first, scratch) writes rows first .. first + len(scratch) - 1 of M, fp32 [rows, cols]."""

_BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def scratch_rows(rows: int, cols: int, scratch_bytes: int = 4 << 20) -> int:
    """How many rows of fp32 a scratch of about `scratch_bytes` holds: between 1 and `rows`."""
    return max(1, min(rows, scratch_bytes // max(1, 4 * cols)))


def row_squares(fill: Fill, rows: int, scratch: torch.Tensor) -> torch.Tensor:
    """Sum of squares of every row of M, over the columns that `fill` knows, fp64 [rows].

    scratch: fp32 [some rows, columns], overwritten.
    """
    squares = torch.zeros(rows, dtype=torch.float64, device=scratch.device)
    for first, part in _parts(fill, rows, scratch):
        wide = part.double()
        squares[first : first + len(part)] = torch.linalg.vecdot(wide, wide)
    return squares


def row_norms(module: str, squares: Sequence[torch.Tensor]) -> torch.Tensor:
    """||M|| of every row, fp64 [rows], from the `row_squares` of all ranges of columns.

    Raises UnsupportedAdapter, naming module and row, if a norm is zero or not finite.
    """
    norms = torch.stack(list(squares)).sum(0).sqrt()
    bad = (~(norms.isfinite() & (norms > 0))).nonzero()
    if len(bad):
        row = int(bad[0])
        raise UnsupportedAdapter(
            f"{module}, row {row}: its merged weight has norm {float(norms[row])}, which DoRA "
            "divides by; the base or the adapter is damaged, reload or reinitialise it"
        )
    return norms


def merge_rows(
    fill: Fill,
    weight: torch.Tensor,
    magnitude: torch.Tensor,
    norms: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
) -> npt.NDArray[np.void]:
    """Write W' to `out` and return what the rounding lost.

    Args:
        weight: W [rows, cols], the base under the rows that `fill` knows. It is only read.
        magnitude: m [rows], and norms: fp64 [rows], of these rows.
        out: [rows, cols] of fp32, fp16 or bf16.
        scratch: fp32 [some rows, cols], overwritten.

    Returns:
        `MERGE_SUMS_DTYPE` [1], where the update D is m / ||M|| * M - W.

    Raises:
        LayoutMismatch: the shapes do not belong together.
    """
    _check_shapes(weight, magnitude, norms, out)
    factors = magnitude.detach().double() / norms
    sums = np.zeros(1, MERGE_SUMS_DTYPE)
    for first, part in _parts(fill, len(out), scratch):
        rows = slice(first, first + len(part))
        exact = factors[rows, None] * part.double()
        out[rows] = exact.to(out.dtype)
        _add_sums(sums, exact, weight.detach()[rows], out[rows])
    return sums


def _parts(fill: Fill, rows: int, scratch: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """M in parts that fit the scratch: (number of the first row, [rows, cols])."""
    for first in range(0, rows, len(scratch)):
        part = scratch[: min(len(scratch), rows - first)]
        fill(first, part)
        yield first, part


def _add_sums(
    sums: npt.NDArray[np.void], exact: torch.Tensor, weight: torch.Tensor, out: torch.Tensor
) -> None:
    bits = _BITS[out.dtype]
    sums["residual"] += float((out - exact).square_().sum())
    sums["delta"] += float((exact - weight).square_().sum())
    sums["changed"] += int((out.view(bits) != weight.to(out.dtype).view(bits)).sum())
    sums["elements"] += out.numel()


def _check_shapes(
    weight: torch.Tensor, magnitude: torch.Tensor, norms: torch.Tensor, out: torch.Tensor
) -> None:
    rows = (len(out),)
    if weight.shape != out.shape or magnitude.shape != rows or norms.shape != rows:
        raise LayoutMismatch(
            f"weight {tuple(weight.shape)}, merged weight {tuple(out.shape)}, magnitude "
            f"{tuple(magnitude.shape)} and norms {tuple(norms.shape)} do not belong together: "
            "DoRA has one magnitude and one norm for each row"
        )
