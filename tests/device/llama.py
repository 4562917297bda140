"""Shapes of Llama-3.1-8B's linear layers, and block lists over its adapters and weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit.kernels import (
    BLOCK_DTYPE,
    MERGE_BLOCK_DTYPE,
    MERGE_SEGMENT_DTYPE,
    BufferType,
)

LAYERS = 32


@dataclass(frozen=True)
class Linear:
    """One module: W [rows, cols], lora_A [r, cols], lora_B [rows, r]."""

    name: str
    rows: int
    cols: int


LINEARS = (
    Linear("q_proj", 4096, 4096),
    Linear("k_proj", 1024, 4096),
    Linear("v_proj", 1024, 4096),
    Linear("o_proj", 4096, 4096),
    Linear("gate_proj", 14336, 4096),
    Linear("up_proj", 14336, 4096),
    Linear("down_proj", 4096, 14336),
)


def modules(layers: int = LAYERS) -> list[Linear]:
    return [linear for _ in range(layers) for linear in LINEARS]


def factor_shapes(rank: int, layers: int = LAYERS) -> list[tuple[int, int]]:
    """lora_A and lora_B of every module, in turn."""
    return [shape for item in modules(layers) for shape in ((rank, item.cols), (item.rows, rank))]


def pack_blocks(numels: list[int]) -> NDArray[np.void]:
    """One block a tensor, each into a destination of its own."""
    blocks = np.zeros(len(numels), BLOCK_DTYPE)
    blocks["src"] = blocks["dst"] = np.arange(len(numels))
    blocks["size"][:, :2] = 1
    blocks["size"][:, 2] = numels
    blocks["src_stride"][:, 2] = blocks["dst_stride"][:, 2] = 1
    blocks["scale"] = 1.0
    return blocks


@dataclass(frozen=True)
class MergePlan:
    """Sources are W, lora_B and lora_A of every module, in turn; destinations are the W'."""

    blocks: NDArray[np.void]
    segments: NDArray[np.void]
    sources: list[BufferType]
    destinations: list[BufferType]


def merge_plan(
    items: list[Linear], rank: int, scale: float, dtype: torch.dtype, adapter: torch.dtype
) -> MergePlan:
    blocks = np.zeros(len(items), MERGE_BLOCK_DTYPE)
    segments = np.zeros(len(items), MERGE_SEGMENT_DTYPE)
    number = np.arange(len(items))
    rows, cols = [np.asarray([getattr(i, key) for i in items]) for key in ("rows", "cols")]
    blocks["weight"], blocks["dst"] = 3 * number, number
    blocks["rows"], blocks["cols"], blocks["scale"] = rows, cols, scale
    blocks["weight_row_stride"] = blocks["dst_row_stride"] = cols
    blocks["first_segment"] = blocks["module"] = number
    blocks["segment_count"] = 1
    segments["b"], segments["a"], segments["rank"] = 3 * number + 1, 3 * number + 2, rank
    segments["b_row_stride"], segments["b_k_stride"] = rank, 1
    segments["a_k_stride"], segments["a_col_stride"] = cols, 1
    sources = [
        kind
        for item in items
        for kind in (
            BufferType(dtype, item.rows * item.cols),
            BufferType(adapter, item.rows * rank),
            BufferType(adapter, rank * item.cols),
        )
    ]
    destinations = [BufferType(dtype, item.rows * item.cols) for item in items]
    return MergePlan(blocks, segments, sources, destinations)
