"""A trainer of one decoder layer, sharded as Megatron shards it, all ranks in one process.

Fused qkv with grouped heads, fused gate and up (both column parallel), and two row-parallel
projections. Whole tensors are put together from shards by plain torch, independent of any plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from helpers import factor, learn

from lora_refit.merged.pieces import BaseShard
from lora_refit.sources.base import BaseWeight
from lora_refit.trace.export import ExportMap, Parameter
from lora_refit.trace.movement import TensorMap

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN = 12, 6, 5, 42, 66
COLUMN, ROW = "column", "row"

Split = Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]


def split_qkv(shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of every rank: for each of its groups the query heads, then key, then value."""
    per_group = HEADS // KV_HEADS
    grouped = torch.cat(
        [shard.reshape(-1, (per_group + 2) * HEAD_DIM, shard.shape[-1]) for shard in shards]
    )
    q, k, v = grouped.split([per_group * HEAD_DIM, HEAD_DIM, HEAD_DIM], dim=1)
    return {name: part.flatten(0, 1) for name, part in (("q", q), ("k", k), ("v", v))}


def split_gate_up(shards: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    halves = [shard.chunk(2) for shard in shards]
    return {name: torch.cat([half[i] for half in halves]) for i, name in enumerate(("gate", "up"))}


@dataclass(frozen=True)
class Module:
    """rows, cols: of the whole fused weight."""

    name: str
    kind: str
    rows: int
    cols: int
    split: Split


MODULES = (
    Module("qkv", COLUMN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, split_qkv),
    Module("o", ROW, HIDDEN, HEADS * HEAD_DIM, lambda shards: {"o": torch.cat(shards, 1)}),
    Module("gate_up", COLUMN, 2 * FFN, HIDDEN, split_gate_up),
    Module("down", ROW, HIDDEN, FFN, lambda shards: {"down": torch.cat(shards, 1)}),
)


@dataclass
class FusedTrainer:
    """weights, a, b: by rank, one tensor for each of MODULES."""

    tensor_parallel: int
    rank: int
    base_dtype: torch.dtype
    adapter_dtype: torch.dtype
    seed: int = 0
    weights: list[list[torch.Tensor]] = field(init=False)
    a: list[list[torch.Tensor]] = field(init=False)
    b: list[list[torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def draw(rows: int, cols: int, std: float, dtype: torch.dtype) -> torch.Tensor:
            return (torch.randn(rows, cols, generator=generator) * std).to(dtype)

        size, rank = self.tensor_parallel, self.rank
        self.weights, self.a, self.b = [], [], []
        for _ in range(size):
            shapes = [
                ((m.rows // size, m.cols), (rank // size, m.cols), (m.rows // size, rank))
                if m.kind == COLUMN
                else ((m.rows, m.cols // size), (rank, m.cols // size), (m.rows // size, rank))
                for m in MODULES
            ]
            self.weights.append([draw(*w, 0.05, self.base_dtype) for w, _, _ in shapes])
            self.a.append([draw(*a, 0.2, self.adapter_dtype) for _, a, _ in shapes])
            self.b.append([draw(*b, 0.2, self.adapter_dtype) for _, _, b in shapes])

    def parameters(self) -> list[torch.Tensor]:
        """Of all ranks, in the order of `described`."""
        return [
            tensor
            for rank in range(self.tensor_parallel)
            for pair in zip(self.a[rank], self.b[rank], strict=True)
            for tensor in pair
        ]

    def described(self) -> tuple[Parameter, ...]:
        names = [f"{m.name}.{part}" for m in MODULES for part in ("in", "out")]
        return tuple(
            Parameter(index // len(names), names[index % len(names)], tuple(t.shape), "float32")
            for index, t in enumerate(self.parameters())
        )

    def export(self, parameters: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """PEFT name -> whole factor."""
        size, count = self.tensor_parallel, 2 * len(MODULES)
        factors = {}
        for index, module in enumerate(MODULES):
            a = [parameters[rank * count + 2 * index] for rank in range(size)]
            b = [parameters[rank * count + 2 * index + 1] for rank in range(size)]
            whole_a = torch.cat(a) if module.kind == COLUMN else torch.cat(a, 1)
            parts = module.split(b) if module.kind == COLUMN else {module.name: torch.cat(b)}
            for name, part in parts.items():
                factors[factor(name, "A")] = whole_a
                factors[factor(name, "B")] = part
        return factors

    def base(self) -> dict[str, torch.Tensor]:
        """Checkpoint name -> whole base weight."""
        whole = {}
        for index, module in enumerate(MODULES):
            shards = [self.weights[rank][index] for rank in range(self.tensor_parallel)]
            whole |= {f"{name}.weight": part for name, part in module.split(shards).items()}
        return whole

    def export_map(self) -> ExportMap:
        shapes = [tuple(tensor.shape) for tensor in self.parameters()]
        names = list(self.export(self.parameters()))
        maps = learn(lambda x: list(self.export(x).values()), shapes, torch.float32)
        named = tuple(
            TensorMap(name, m.shape, m.cells) for name, m in zip(names, maps, strict=True)
        )
        return ExportMap(self.described(), named, ())

    def magnitude(self, name: str) -> torch.Tensor:
        """DoRA's magnitude of each row of a whole checkpoint weight, fp64 [rows]."""
        rows = self.base()[f"{name}.weight"].shape[0]
        return 1 + torch.arange(rows, dtype=torch.float64) / 128

    def held(self, rank: int, dora: bool = False) -> list[BaseWeight]:
        found = []
        for index, module in enumerate(MODULES):
            rows = len(self.b[rank][index])
            found.append(
                BaseWeight(
                    a=f"{module.name}.in",
                    b=f"{module.name}.out",
                    weight=self.weights[rank][index],
                    first_row=0 if module.kind == COLUMN else rank * rows,
                    magnitude=self._magnitude_shard(index, rank) if dora else None,
                )
            )
        return found

    def _magnitude_shard(self, index: int, rank: int) -> torch.Tensor:
        """In the order of a rank's rows, found by splitting the numbers of its rows as its weight."""
        module, shards = MODULES[index], []
        for item in range(self.tensor_parallel):
            rows = len(self.weights[item][index])
            shards.append(
                torch.arange(rows)[:, None] + (rows * item if module.kind == COLUMN else 0)
            )
        total = int(max(shard.max() for shard in shards)) + 1
        values = torch.zeros(total)
        for name, numbers in module.split(shards).items():
            values[numbers[:, 0]] = self.magnitude(name).float()
        return values[shards[rank][:, 0]].clone()

    def shards(self) -> list[BaseShard]:
        from lora_refit.merged.pieces import describe_shards

        export_map = self.export_map()
        return [
            shard
            for rank in range(self.tensor_parallel)
            for shard in describe_shards(self.held(rank), export_map, rank)
        ]
