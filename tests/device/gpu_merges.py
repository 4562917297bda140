"""Merges on a real GPU against fp64, at shapes that a sanitizer gets through quickly."""

from __future__ import annotations

import torch
from gpu_buffers import DEVICE
from llama import Linear, merge_plan

from lora_refit.kernels import MergeKernel

SHAPES = [Linear("odd", 131, 259), Linear("wide", 128, 256), Linear("one", 1, 1)]
SCALE = 0.5


def check_merges_on_gpu() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for adapter in (torch.bfloat16, torch.float16, torch.float32):
            for rank in (1, 8, 40, 129):
                check_merge(dtype, adapter, rank)


def check_merge(dtype: torch.dtype, adapter: torch.dtype, rank: int) -> None:
    """Every element within half a unit in the last place, and the rounding of the fp32 sum."""
    plan = merge_plan(SHAPES, rank, SCALE, dtype, adapter)
    tensors = []
    for item in SHAPES:
        shapes = [(item.rows, item.cols), (item.rows, rank), (rank, item.cols)]
        tensors += [
            torch.randn(shape, device=DEVICE).to(dtype if index == 0 else adapter)
            for index, shape in enumerate(shapes)
        ]
    merged = [torch.full((i.rows, i.cols), float("nan"), device=DEVICE).to(dtype) for i in SHAPES]
    kernel = MergeKernel(
        plan.blocks, plan.segments, plan.sources, plan.destinations, len(SHAPES), DEVICE
    )
    result = kernel.merge(tensors, merged)
    for index, (item, found) in enumerate(zip(SHAPES, merged, strict=True)):
        w, b, a = (tensor.double() for tensor in tensors[3 * index : 3 * index + 3])
        exact = w + SCALE * (b @ a)
        magnitude = w.abs() + abs(SCALE) * (b.abs() @ a.abs())
        unit = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
        bound = 0.5 * unit + (rank + 4) * 2.0**-22 * magnitude
        assert bool(((found.double() - exact).abs() <= bound).all()), (item, dtype, adapter, rank)
        sums = result.sums[index]
        lost = ((found.double() - exact) ** 2).sum().item()
        assert sums["elements"] == w.numel()
        assert abs(sums["residual"] - lost) <= 0.02 * lost + 1e-3 * w.numel() * 2.0**-40
