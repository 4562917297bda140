"""What the merge kernel must write and count, in fp64.

Bound of one element of W', for u = 2^-24 (half an ulp of fp32 at 1):

    |got - (W + D)|  <=  half_ulp(|W + D| + e) + e
                 e    =  2u (K + 40) |scale| (|B| @ |A|)  +  s

The first term of e is the fp32 accumulation over K products, padded by up to 16 and with one
truncation (an error of 2u) for each, and the rounding of scale * acc; of fp32 factors it also covers
what three tf32 products leave out, 5 * 2^-22 of |b| |a|. It is zero for factors whose products and
sums are exact in fp32. The second, s, is the rounding of W + D to fp32, 2u |W + D|, before a
rounding to 2 bytes. `half_ulp` belongs to the dtype of W'; in its subnormal range it is that of the
smallest normal number.

From the triangle inequality, sqrt(residual) and sqrt(delta) are within the norm of e of those of
fp64, and within 1e-4 of their own size for the partial sums in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from block_reference import BITS, POISON, Buffer, digest_of_memory
from merge_cases import Program
from numpy.typing import NDArray

from lora_refit.kernels.records import MERGE_SUMS_DTYPE

UNIT = 2.0**-24
SUM_TOLERANCE = 1e-4


@dataclass
class Result:
    """What a launch left behind."""

    destinations: list[Buffer]
    digests: list[int]
    sums: NDArray[np.void]


@dataclass
class Expected:
    """One block: where it is written, and in fp64 the update, the sum and the bound e."""

    where: torch.Tensor
    weight: torch.Tensor
    delta: torch.Tensor
    error: torch.Tensor


def faults(program: Program, result: Result, exact_delta: bool = False) -> list[str]:
    """Everything that is wrong with a result; empty if it is right.

    `exact_delta`: D is exact in fp32, see above.
    """
    found = []
    written = [np.zeros(len(buffer.memory), np.uint8) for buffer in program.destinations]
    sums = np.zeros(program.modules, MERGE_SUMS_DTYPE)
    slack = np.zeros(program.modules)
    for number, block in enumerate(program.blocks):
        buffer = result.destinations[block["dst"]]
        expected = _expected(program, block, buffer.tensor.dtype, exact_delta)
        got = buffer.read()[expected.where]
        found += _wrong_values(number, expected, got)
        _count(sums[block["module"]], expected, got)
        slack[block["module"]] += float((expected.error**2).sum())
        _mark(written[block["dst"]], expected.where, got.dtype.itemsize)
    found += _wrong_memory(program, result, written)
    found += _wrong_sums(result.sums, sums, np.sqrt(slack))
    return found


def _expected(program: Program, block: np.void, merged: torch.dtype, exact_delta: bool) -> Expected:
    rows, cols = np.arange(block["rows"])[:, None], np.arange(block["cols"])
    source = program.sources[block["weight"]].tensor
    weight = source[
        torch.from_numpy(block["weight_offset"] + rows * block["weight_row_stride"] + cols)
    ]
    product = torch.zeros(weight.shape, dtype=torch.float64)
    magnitude = torch.zeros_like(product)
    depth = 0
    first = int(block["first_segment"])
    for segment in program.segments[first : first + int(block["segment_count"])]:
        k = np.arange(segment["rank"])
        b_at = segment["b_offset"] + rows * segment["b_row_stride"] + k * segment["b_k_stride"]
        a_at = (
            segment["a_offset"]
            + k[:, None] * segment["a_k_stride"]
            + cols * segment["a_col_stride"]
        )
        b = program.sources[segment["b"]].tensor[torch.from_numpy(b_at)].double()
        a = program.sources[segment["a"]].tensor[torch.from_numpy(a_at)].double()
        product += b @ a
        magnitude += b.abs() @ a.abs()
        depth += len(k)
    scale = float(block["scale"])
    delta = scale * product
    error = torch.zeros_like(delta)
    if not exact_delta:
        error += 2 * UNIT * (depth + 40) * abs(scale) * magnitude
    if merged != torch.float32:
        error += 2 * UNIT * (weight.double() + delta).abs()
    where = block["dst_offset"] + rows * block["dst_row_stride"] + cols
    return Expected(torch.from_numpy(where), weight, delta, error)


def _wrong_values(number: int, expected: Expected, got: torch.Tensor) -> list[str]:
    target = expected.weight.double() + expected.delta
    bound = expected.error + _half_ulp(target.abs() + expected.error, got.dtype)
    off = (got.double() - target).abs()
    wrong = ~(off <= bound)
    if not wrong.any():
        return []
    row, col = (int(i) for i in wrong.nonzero()[0])
    return [
        f"block {number}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first "
        f"({row}, {col}): {float(got[row, col])} instead of {float(target[row, col])} "
        f"within {float(bound[row, col]):.1e}"
    ]


def _half_ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp(min=info.smallest_normal))
    return info.eps / 4 * 2.0 ** exponent.double()


def _count(sums: np.void, expected: Expected, got: torch.Tensor) -> None:
    """Adds what the block's module should count, given what was written."""
    target = expected.weight.double() + expected.delta
    before = expected.weight.to(got.dtype)
    sums["residual"] += float(((got.double() - target) ** 2).sum())
    sums["delta"] += float((expected.delta**2).sum())
    sums["changed"] += int((got.view(BITS[got.dtype]) != before.view(BITS[got.dtype])).sum())
    sums["elements"] += got.numel()


def _mark(written: NDArray[np.uint8], where: torch.Tensor, size: int) -> None:
    first = where.numpy().reshape(-1, 1) * size
    np.add.at(written, (first + np.arange(size)).reshape(-1), 1)


def _wrong_memory(program: Program, result: Result, written: list[NDArray[np.uint8]]) -> list[str]:
    """Nothing outside the blocks may change; the digest is that of the bytes inside them."""
    found = []
    masked = []
    for i, (buffer, mask) in enumerate(zip(result.destinations, written, strict=True)):
        assert mask.max(initial=0) <= 1, "blocks of this program overlap"
        if not buffer.outside_is_untouched() or (buffer.memory[mask == 0] != POISON).any():
            found.append(f"destination {i}: bytes outside its blocks changed")
        only_written = torch.from_numpy(buffer.memory * mask).view(buffer.tensor.dtype)
        masked.append(Buffer(only_written))
    digests = digest_of_memory(masked)
    if digests != result.digests:
        wrong = [i for i, pair in enumerate(zip(digests, result.digests, strict=True))
                 if pair[0] != pair[1]]  # fmt: skip
        found.append(f"digests of destinations {wrong} are wrong")
    return found


def _wrong_sums(
    got: NDArray[np.void], expected: NDArray[np.void], slack: NDArray[np.float64]
) -> list[str]:
    found = []
    for name in ("residual", "delta"):
        root = np.sqrt(expected[name])
        with np.errstate(invalid="ignore"):  # of wrong results: comparisons with NaN are false
            wrong = ~(abs(np.sqrt(got[name]) - root) <= slack + SUM_TOLERANCE * root)
        found += [
            f"module {i}: {name} {got[name][i]} instead of {expected[name][i]}"
            for i in np.flatnonzero(wrong)
        ]
    for name in ("changed", "elements"):
        found += [
            f"module {i}: {name} {got[name][i]} instead of {expected[name][i]}"
            for i in np.flatnonzero(got[name] != expected[name])
        ]
    return found
