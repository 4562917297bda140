"""What rounding to the base's grid loses of an update, as the merge kernel's sums report it.

The share that is lost, ||round(W + D) - (W + D)|| / ||D||, depends on how large the update is beside
the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from lora_refit.kernels import BufferType, MergeKernel
from lora_refit.kernels.records import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLS, RANK = 512, 1024, 16
LOSS_OF_SIZE = {5e-2: 0.03, 1.5e-2: 0.11, 5e-3: 0.32, 1.5e-3: 0.70, 5e-4: 0.89}
"""The share of the update lost, by |D| / |W|: measured with torch before there was this kernel, for
W ~ N(0, 0.02), rank 16 and a merge in fp32 that is rounded to bf16. In whole percents."""


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """These matrices are small, and torch's own threads only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Fidelity:
    """Of one merge: the shares of the update that are lost, and of the elements that changed."""

    loss: float
    changed: float


@dataclass(frozen=True)
class Case:
    """W, B and A in one dtype, and a scale that makes |D| / |W| what was asked for."""

    weight: torch.Tensor
    b: torch.Tensor
    a: torch.Tensor
    scale: float

    def delta(self) -> torch.Tensor:
        """In fp64, exact but for its own rounding."""
        return float(np.float32(self.scale)) * (self.b.double() @ self.a.double())


def case(size: float, dtype: torch.dtype, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)
    weight = (0.02 * torch.randn(ROWS, COLS, generator=generator)).to(dtype)
    b = torch.randn(ROWS, RANK, generator=generator).to(dtype)
    a = torch.randn(RANK, COLS, generator=generator).to(dtype)
    scale = size * weight.double().norm() / (b.double() @ a.double()).norm()
    return Case(weight, b, a, float(scale))


def merge(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, np.void]:
    """W' of this dtype, and the kernel's sums."""
    block = (0, 0, 0, 0, ROWS, COLS, COLS, COLS, 0, 1, 0, case.scale)
    segment = (1, 2, 0, 0, RANK, 1, COLS, 1, RANK)
    sources = [case.weight, case.b, case.a]
    out = torch.full((ROWS, COLS), float("nan"), dtype=dtype)
    kernel = MergeKernel(
        np.array([block], MERGE_BLOCK_DTYPE),
        np.array([segment], MERGE_SEGMENT_DTYPE),
        [BufferType(tensor.dtype, tensor.numel()) for tensor in sources],
        [BufferType(dtype, out.numel())],
        modules=1,
    )
    (sums,) = kernel.merge(sources, [out]).sums
    assert sums["elements"] == out.numel()
    return out, sums


def reported(sums: np.void) -> Fidelity:
    return Fidelity(math.sqrt(sums["residual"] / sums["delta"]), sums["changed"] / sums["elements"])


def recomputed(case: Case, merged: torch.Tensor) -> Fidelity:
    """The same from what was written, in fp64."""
    delta = case.delta()
    lost = merged.double() - (case.weight.double() + delta)
    changed = merged != case.weight.to(merged.dtype)
    return Fidelity(float(lost.norm() / delta.norm()), float(changed.double().mean()))


def test_the_loss_in_bf16_is_what_was_measured_before() -> None:
    """Each entry of the table within 10 %, or within the half percent that it was rounded by; a
    smaller update loses more and changes less."""
    found = {size: reported(merge(case(size, BF16), BF16)[1]) for size in LOSS_OF_SIZE}
    print("\n|D| / |W|   lost   expected   elements changed")
    for size, fidelity in found.items():
        expected = LOSS_OF_SIZE[size]
        print(f"{size:8.1e}  {fidelity.loss:5.1%}  {expected:8.0%}  {fidelity.changed:14.1%}")
        assert fidelity.loss == pytest.approx(expected, rel=0.1, abs=0.005)
    losses = [fidelity.loss for fidelity in found.values()]
    changes = [fidelity.changed for fidelity in found.values()]
    assert losses == sorted(losses) and changes == sorted(changes, reverse=True)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("size", list(LOSS_OF_SIZE))
def test_the_sums_are_those_of_fp64(size: float, dtype: torch.dtype) -> None:
    """The loss within 0.1 % of one recomputed from what was written; changed elements exactly."""
    problem = case(size, dtype, seed=1)
    merged, sums = merge(problem, dtype)
    expected = recomputed(problem, merged)
    assert reported(sums).loss == pytest.approx(expected.loss, rel=1e-3)
    assert reported(sums).changed == expected.changed


@pytest.mark.parametrize("size", list(LOSS_OF_SIZE))
def test_fp32_loses_next_to_nothing(size: float) -> None:
    """The same update of the same bf16 base, kept in fp32."""
    fidelity = reported(merge(case(size, BF16), F32)[1])
    assert 0 < fidelity.loss < 1e-7 / size
    assert fidelity.changed > 0.99


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_no_update_loses_and_changes_nothing(dtype: torch.dtype) -> None:
    """lora_B is zero before the first step: W' is W, and all sums are zero."""
    problem = case(5e-3, dtype)
    merged, sums = merge(replace(problem, b=torch.zeros_like(problem.b)), dtype)
    assert torch.equal(merged, problem.weight)
    assert (sums["residual"], sums["delta"], sums["changed"]) == (0, 0, 0)
