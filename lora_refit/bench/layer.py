"""A transformer layer of 8B shape as two tensor-parallel Megatron ranks hold it.

Shard layouts are Megatron's: fused qkv interleaved by query group, gate above up, lora_A of a
column-parallel module sharded over the rank dimension, lora_B always over its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit.kernels.records import BLOCK_DTYPE, MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE

HIDDEN, HEADS, GROUPS, HEAD, FFN = 4096, 32, 8, 128, 14336
TP = 2

CHECKPOINT_SHAPES = {
    "q_proj": (HEADS * HEAD, HIDDEN),
    "k_proj": (GROUPS * HEAD, HIDDEN),
    "v_proj": (GROUPS * HEAD, HIDDEN),
    "o_proj": (HIDDEN, HEADS * HEAD),
    "gate_proj": (FFN, HIDDEN),
    "up_proj": (FFN, HIDDEN),
    "down_proj": (HIDDEN, FFN),
}
TENSORS = list(CHECKPOINT_SHAPES)
ELEMENTS = sum(rows * cols for rows, cols in CHECKPOINT_SHAPES.values())


@dataclass(frozen=True)
class Module:
    """A parallel linear layer: shape [rows, cols] on each rank, and whether it is row parallel."""

    rows: int
    cols: int
    row_parallel: bool

    def a_shape(self, lora_rank: int) -> tuple[int, int]:
        """Of one rank's lora_A."""
        return (lora_rank if self.row_parallel else lora_rank // TP), self.cols

    @property
    def b_rows(self) -> int:
        """Rows of one rank's lora_B."""
        return self.rows // TP if self.row_parallel else self.rows


QKV = Module((HEADS + 2 * GROUPS) * HEAD // TP, HIDDEN, row_parallel=False)
PROJ = Module(HIDDEN, HEADS * HEAD // TP, row_parallel=True)
FC1 = Module(2 * FFN // TP, HIDDEN, row_parallel=False)
FC2 = Module(HIDDEN, FFN // TP, row_parallel=True)
MODULES = [QKV, PROJ, FC1, FC2]


@dataclass(frozen=True)
class Run:
    """Rows of one rank's shard that are neighbours in a checkpoint tensor, and in one lora_B."""

    module: Module
    rank: int
    first: int
    rows: int
    tensor: str
    to_row: int


def runs() -> Iterator[Run]:
    """All rows of the layer."""
    queries = HEADS // GROUPS * HEAD
    for rank in range(TP):
        for local in range(GROUPS // TP):
            group = rank * GROUPS // TP + local
            first = local * (queries + 2 * HEAD)
            yield Run(QKV, rank, first, queries, "q_proj", group * queries)
            yield Run(QKV, rank, first + queries, HEAD, "k_proj", group * HEAD)
            yield Run(QKV, rank, first + queries + HEAD, HEAD, "v_proj", group * HEAD)
        for position, tensor in enumerate(("gate_proj", "up_proj")):
            share = FFN // TP
            yield Run(FC1, rank, position * share, share, tensor, rank * share)
        for module, tensor in ((PROJ, "o_proj"), (FC2, "down_proj")):
            for first in range(0, module.rows, module.b_rows):
                yield Run(module, rank, first, module.b_rows, tensor, first)


def random_weights(generator: torch.Generator) -> list[torch.Tensor]:
    """bf16 shards [rows, cols], by module and rank."""
    shapes = [(module.rows, module.cols) for module in MODULES for _ in range(TP)]
    return [0.02 * _normal(shape, generator) for shape in shapes]


def random_factors(lora_rank: int, generator: torch.Generator) -> list[torch.Tensor]:
    """bf16 shards of lora_A, then of lora_B, by module and rank."""
    a = [module.a_shape(lora_rank) for module in MODULES for _ in range(TP)]
    b = [(module.b_rows, lora_rank) for module in MODULES for _ in range(TP)]
    return [0.02 * _normal(shape, generator) for shape in (*a, *b)]


def _normal(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(generator=generator)


def copy_blocks(layers: int) -> NDArray[np.void]:
    """The movement of all weights, whose shards are sources 0 on, to the checkpoint tensors."""
    blocks = np.zeros(0, BLOCK_DTYPE)
    for layer in range(layers):
        for run in runs():
            block = np.zeros(1, BLOCK_DTYPE)
            block["src"], block["dst"] = _weight(run, layer), _tensor(run, layer)
            block["src_offset"], block["dst_offset"] = run.first * run.module.cols, _dst_offset(run)
            block["size"] = (1, run.rows, run.module.cols)
            block["src_stride"] = (0, run.module.cols, 1)
            block["dst_stride"] = (0, _dst_stride(run), 1)
            block["scale"] = 1.0
            blocks = np.concatenate([blocks, block])
    return blocks


def merge_program(
    layers: int, lora_rank: int, scale: float
) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Blocks and segments. Sources: all weights, then one layer's factors, which all layers share.
    Modules of the sums: one for each module of each layer."""
    factors = layers * len(MODULES) * TP
    block_rows: list[tuple[float, ...]] = []
    segment_rows: list[tuple[int, ...]] = []
    for layer in range(layers):
        for run in runs():
            segments = list(_segments(run, lora_rank, factors))
            block_rows.append(
                (_weight(run, layer), _tensor(run, layer), run.first * run.module.cols,
                 _dst_offset(run), run.rows, run.module.cols, run.module.cols, _dst_stride(run),
                 len(segment_rows), len(segments), layer * len(MODULES) + _number(run), scale)
            )  # fmt: skip
            segment_rows += segments
    return np.array(block_rows, MERGE_BLOCK_DTYPE), np.array(segment_rows, MERGE_SEGMENT_DTYPE)


def _segments(run: Run, lora_rank: int, factors: int) -> Iterator[tuple[int, ...]]:
    """Fields of MergeSegment: how the shards of B and A are read where they lie."""
    a = factors + _number(run) * TP
    b = a + len(MODULES) * TP
    cols = run.module.cols
    if run.module.row_parallel:
        shard, row = divmod(run.first, run.module.b_rows)
        yield b + shard, a + run.rank, row * lora_rank, 0, lora_rank, 1, cols, 1, lora_rank
        return
    depth = lora_rank // TP
    for shard in range(TP):
        offset = run.first * lora_rank + shard * depth
        yield b + run.rank, a + shard, offset, 0, lora_rank, 1, cols, 1, depth


def _number(run: Run) -> int:
    return MODULES.index(run.module)


def _weight(run: Run, layer: int) -> int:
    return (layer * len(MODULES) + _number(run)) * TP + run.rank


def _tensor(run: Run, layer: int) -> int:
    return layer * len(TENSORS) + TENSORS.index(run.tensor)


def _dst_stride(run: Run) -> int:
    return CHECKPOINT_SHAPES[run.tensor][1]


def _dst_offset(run: Run) -> int:
    first_col = run.rank * run.module.cols if run.module.row_parallel else 0
    return run.to_row * _dst_stride(run) + first_col


def gathered_factors(
    factors: list[torch.Tensor], lora_rank: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Whole lora_A and lora_B of each checkpoint tensor, as exporters have them after gathering."""
    a_shards, b_shards = factors[: len(MODULES) * TP], factors[len(MODULES) * TP :]
    found = {}
    for tensor, (rows, _) in CHECKPOINT_SHAPES.items():
        b = torch.empty(rows, lora_rank, dtype=torch.bfloat16)
        for run in (run for run in runs() if run.tensor == tensor):
            number = _number(run) * TP
            shard, row = divmod(run.first, run.module.b_rows)
            source = b_shards[number + (shard if run.module.row_parallel else run.rank)]
            b[run.to_row : run.to_row + run.rows] = source[row : row + run.rows]
            axis = 1 if run.module.row_parallel else 0
            a = torch.cat(a_shards[number : number + TP], axis)
        found[tensor] = (a, b)
    return found
