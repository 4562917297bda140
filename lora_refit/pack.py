"""The pack: each rank's adapter parameters into its arena, one block a parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lora_refit.errors import UnsupportedAdapter
from lora_refit.kernels import SCALE_ONCE
from lora_refit.plan import Block, Buffer, Plan
from lora_refit.sources.base import lora_scale
from lora_refit.spec import Layout
from lora_refit.trace.export import Parameter


def pack_plan(parameters: Sequence[Parameter], layout: Layout, rank: int) -> Plan:
    """One block a parameter: cast into the arena entry of the same number."""
    scales = folded_scales(layout) if layout.scale_folded else {}
    numels = [math.prod(item.shape) for item in parameters]
    first = next((i for i, item in enumerate(layout.export_map.parameters) if item.rank == rank), 0)
    blocks = [
        Block(
            src=index,
            dst=index,
            src_offset=0,
            dst_offset=0,
            size=(1, 1, numel),
            src_stride=(0, 0, 1),
            dst_stride=(0, 0, 1),
            scale=scales.get(first + index, 1.0),
            flags=SCALE_ONCE if layout.scale_folded else 0,
        )
        for index, numel in enumerate(numels)
    ]
    return Plan.build(
        [
            Buffer(item.name, rank, item.dtype, numel)
            for item, numel in zip(parameters, numels, strict=True)
        ],
        [
            Buffer(f"arena/{item.name}", rank, layout.dtype, numel)
            for item, numel in zip(parameters, numels, strict=True)
        ],
        blocks,
    )


def adapter_dtype(parameters: Sequence[Parameter]) -> torch.dtype:
    """The dtype that holds every parameter exactly: their own, or fp32 if they differ."""
    dtypes = {item.dtype for item in parameters}
    dtype: torch.dtype = getattr(torch, dtypes.pop() if len(dtypes) == 1 else "float32")
    return dtype


def folded_scales(layout: Layout) -> dict[int, float]:
    """alpha / r of every parameter that feeds a lora_B, and of its replicas, by global index."""
    config = layout.peft_config
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise UnsupportedAdapter(
            'scale_rounding="once" needs one rank and alpha for all modules; use "engine"'
        )
    scale = lora_scale(config)
    scales = {
        cell.tensor: scale
        for factor in layout.export_map.factors
        if factor.name.endswith(".lora_B.weight")
        for cell in factor.cells
    }
    copies = {copy: scale for first, copy in layout.export_map.replicas if first in scales}
    return scales | copies
