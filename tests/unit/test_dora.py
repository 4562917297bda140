"""DoRA merges of a trainer's shards, against PEFT's own merge in fp64, within the bound that
lora_refit.merged.dora states."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from block_reference import BITS
from peft import LoraConfig, get_peft_model

from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.merged.dense import DenseMerger
from lora_refit.merged.dora import merge_rows, row_norms, row_squares, scratch_rows

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
UNIT = 2.0**-24
SUM_TOLERANCE = 1e-9
CUTS = ("whole", "rows 2", "rows 3", "columns 2", "columns 3")
"""A weight on one rank, or column-parallel or row-parallel on two or three."""


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """These tensors are small; torch's own threads only slow them down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Module:
    """W, m and the factors as a trainer has them, and its alpha."""

    weight: torch.Tensor
    magnitude: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / len(self.a)


@dataclass
class Merge:
    """What all ranks together wrote, and the sums of their merges."""

    weight: torch.Tensor
    residual: float = 0.0
    delta: float = 0.0
    changed: int = 0
    elements: int = 0


def random_module(
    rows: int, cols: int, rank: int, alpha: float, weight: torch.dtype, adapter: torch.dtype = F32
) -> Module:
    generator = torch.Generator().manual_seed(rows * cols + rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return Module(
        (0.1 * normal(rows, cols)).to(weight),
        (1 + 0.3 * normal(rows)).to(adapter),
        normal(rank, cols).to(adapter),
        (0.1 * normal(rows, rank)).to(adapter),
        alpha,
    )


def parts(module: Module, cut: str) -> list[tuple[slice, slice]]:
    """Rows and columns of each rank, of different sizes where they do not divide."""
    axis, _, count = cut.partition(" ")
    ranks = int(count or 1)
    length = module.weight.shape[1 if axis == "columns" else 0]
    ends = [length * i // ranks for i in range(ranks + 1)]
    slices = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
    everything = slice(None)
    return [(everything, part) if axis == "columns" else (part, everything) for part in slices]


def fill_of(
    module: Module, rows: slice, cols: slice, scale: float, mutant: str = ""
) -> Callable[..., None]:
    """What a rank knows of M: its rows and columns, by the real merge kernel."""
    merger = DenseMerger(scale)
    weight, b, a = module.weight[rows, cols], module.b[rows], module.a[:, cols]

    def fill(first: int, scratch: torch.Tensor) -> None:
        chosen = slice(first, first + len(scratch))
        merger.merge(weight[chosen], b[chosen], a, scratch)
        if mutant == "rounded twice":
            scratch.copy_(scratch.bfloat16())

    return fill


def merge(module: Module, cut: str, out: torch.dtype, mutant: str = "") -> Merge:
    """Every rank's part, with the norms of the ranks that hold other columns added up."""
    merged = Merge(torch.full(module.weight.shape, torch.nan, dtype=out))
    scale = 1.0 if mutant == "scale left out" else module.scale
    magnitude = module.magnitude
    if mutant == "magnitude of another row":
        magnitude = magnitude.roll(1)
    shards = parts(module, cut)
    squares = []
    for rows, cols in shards:
        fill = fill_of(module, rows, cols, 0.0 if mutant == "norm of W" else scale)
        weight = module.weight[rows, cols]
        squares.append(row_squares(fill, len(weight), scratch_for(weight)))
    for rank, (rows, cols) in enumerate(shards):
        shared = cut.startswith("columns") and mutant != "norm over the local columns"
        weight = module.weight[rows, cols]
        sums = merge_rows(
            fill_of(module, rows, cols, scale, mutant),
            weight,
            magnitude[rows],
            row_norms("module", squares if shared else [squares[rank]]),
            merged.weight[rows, cols],
            scratch_for(weight),
        )[0]
        merged.residual += float(sums["residual"])
        merged.delta += float(sums["delta"])
        merged.changed += int(sums["changed"])
        merged.elements += int(sums["elements"])
    return merged


def scratch_for(weight: torch.Tensor) -> torch.Tensor:
    """Poisoned, and for so few rows that a merge takes several, the last with fewer."""
    return torch.full((min(len(weight), 5), weight.shape[1]), torch.nan)


def merged_by_peft(module: Module) -> torch.Tensor:
    """m / ||W + s B A|| * (W + s B A) in fp64, by PEFT."""
    rows, cols = module.weight.shape
    model = torch.nn.ModuleDict({"linear": torch.nn.Linear(cols, rows, bias=False)}).double()
    config = LoraConfig(
        r=len(module.a), lora_alpha=module.alpha, target_modules=["linear"], use_dora=True
    )
    peft = get_peft_model(model, config).double()
    layer = peft.base_model.model["linear"]
    with torch.no_grad():
        layer.base_layer.weight.copy_(module.weight)
        layer.lora_A["default"].weight.copy_(module.a)
        layer.lora_B["default"].weight.copy_(module.b)
        layer.lora_magnitude_vector["default"].weight.copy_(module.magnitude)
    merged = peft.merge_and_unload()["linear"].weight.detach()
    assert merged.dtype == torch.float64
    return merged


def faults(module: Module, got: Merge) -> list[str]:
    """What is wrong with a merge, within the stated bound."""
    target = merged_by_peft(module)
    a, b, weight = (item.double() for item in (module.a, module.b, module.weight))
    full = weight + module.scale * b @ a
    error = 2 * UNIT * (len(a) + 40) * abs(module.scale) * (b.abs() @ a.abs()) + UNIT * full.abs()
    norm = full.norm(dim=1, keepdim=True)
    norm_error = error.norm(dim=1, keepdim=True)
    factor = module.magnitude.double()[:, None].abs() / norm
    error = factor * (error + full.abs() * norm_error / (norm - norm_error))
    if got.weight.dtype != F32:
        error += 2 * UNIT * target.abs()
    bound = half_ulp(target.abs() + error, got.weight.dtype) + error
    wrong = ~((got.weight.double() - target).abs() <= bound)
    found = [f"{int(wrong.sum())} of {wrong.numel()} elements"] if wrong.any() else []
    slack = float(error.norm())
    residual = float((got.weight.double() - target).norm())
    delta = float((target - weight).norm())
    bits = BITS[got.weight.dtype]
    before = module.weight.to(got.weight.dtype)
    found += [
        name
        for name, value, expected, room in (
            ("residual", np.sqrt(got.residual), residual, slack + SUM_TOLERANCE * residual),
            ("delta", np.sqrt(got.delta), delta, slack + SUM_TOLERANCE * delta),
            ("changed", got.changed, int((got.weight.view(bits) != before.view(bits)).sum()), 0),
            ("elements", got.elements, target.numel(), 0),
        )
        if not abs(value - expected) <= room
    ]
    return found


def half_ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.clamp(min=info.smallest_normal))
    return info.eps / 4 * 2.0 ** exponent.double()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_equals_pefts_merge(dtype: torch.dtype, cut: str) -> None:
    """Ranks 1 to 64, alphas that give odd scales, factors of the base's dtype and of fp32, and W'
    of the base's dtype and of others."""
    for rank, alpha in ((1, 3), (2, 7), (7, 5), (16, 24), (33, 11), (64, 20)):
        for adapter, out in ((F32, dtype), (dtype, dtype), (dtype, F32), (F32, BF16)):
            module = random_module(23, 41 + rank, rank, alpha, dtype, adapter)
            before = module.weight.clone()
            assert faults(module, merge(module, cut, out)) == [], f"r {rank}, {adapter}, {out}"
            assert torch.equal(module.weight, before)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    "mutant",
    [
        "norm over the local columns",
        "norm of W",
        "magnitude of another row",
        "scale left out",
        "rounded twice",
    ],
)
def test_mutants_are_caught(mutant: str, dtype: torch.dtype) -> None:
    """Each is one mistake in the same merge; without a mistake the same check passes."""
    module = random_module(23, 48, 8, 12, dtype)
    assert faults(module, merge(module, "columns 2", dtype)) == []
    found = faults(module, merge(module, "columns 2", dtype, mutant))
    print(f"{mutant}: {found[0]} are wrong")
    assert "elements" in found[0]


def test_sums_are_of_the_update_that_dora_makes() -> None:
    """Mutant: the update without the rescaling; with m = ||M|| there is none to rescale."""
    module = random_module(23, 48, 8, 12, BF16)
    sums = merge(module, "whole", BF16)
    sums.delta = float((module.scale * module.b @ module.a).norm()) ** 2
    assert faults(module, sums) == ["delta"]


@pytest.mark.parametrize("value", [0.0, torch.nan, torch.inf])
def test_a_row_without_a_norm_is_refused_by_name(value: float) -> None:
    module = random_module(12, 30, 4, 4, F32)
    module.weight[7] = value
    module.b[7] = 0
    with pytest.raises(UnsupportedAdapter, match=r"layers\.0\.o_proj, row 7: .* norm"):
        row_norms(
            "layers.0.o_proj",
            [
                row_squares(fill_of(module, rows, cols, 1.0), 12, torch.empty(5, 15))
                for rows, cols in parts(module, "columns 2")
            ],
        )


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    module = random_module(12, 30, 4, 4, F32)
    fill = fill_of(module, slice(None), slice(None), 1.0)
    norms = torch.ones(12, dtype=torch.float64)
    with pytest.raises(LayoutMismatch, match=r"magnitude \(11,\)"):
        merge_rows(
            fill,
            module.weight,
            module.magnitude[:-1],
            norms,
            torch.empty(12, 30),
            torch.empty(5, 30),
        )


def test_scratch_is_bounded() -> None:
    assert scratch_rows(100_000, 14336, 4 << 20) * 14336 * 4 <= 4 << 20
    assert scratch_rows(3, 10) == 3
    assert scratch_rows(10, 10**9) == 1
