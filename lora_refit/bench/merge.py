"""`bench merge`: merging LoRA into layers of 8B shape, beside Megatron-Bridge's merge and copies.

All contenders work on the same weights, far more than caches hold, and take turns in one run:

- lora_refit: gathers both ranks' factors, merges, packs for the checkpoint's layout, digests and
  measures fidelity in one launch.
- Megatron-Bridge: its own `_merge_single_adapter_weight` for every checkpoint tensor, given weights
  and factors that are gathered and split already, which its export would do first. It makes several
  temporaries for each tensor; glibc is told to keep freed memory for them, as GPU allocators do.
  What Bridge takes without that, in fresh pages, is measured at the end.
- lora_refit copy: moves and digests the same weights without merging.
- torch copy_: the same bytes, contiguous, without a digest.

The products alone are what rank costs at the margin: the difference between merges of two ranks.
No merge that makes them on these cores is faster, so they bound what can be reached.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table

from lora_refit.bench import layer
from lora_refit.kernels import BufferType, CopyKernel, MergeKernel
from lora_refit.testing import megatron_cpu

THREADS = 2
ALPHA_OVER_RANK = 2
MARGINAL_RANKS = (64, 128)
OURS = "lora_refit"
BRIDGE = "Megatron-Bridge"
COPY = "lora_refit copy"
TORCH = "torch copy_"
PRODUCTS = "products alone"
FRESH = "Megatron-Bridge, fresh pages"
FRESH_REPETITIONS = 2
BRIDGE_AIM = 4.0
COPY_AIM, COPY_AIM_RANK = 1.5, 16
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_LARGEST_HEAP_BLOCK = 32 << 20  # where glibc's own adjustment of M_MMAP_THRESHOLD ends


@dataclass(frozen=True)
class Scenario:
    """What to measure. `repetitions` are turns of each contender for each rank."""

    layers: int
    lora_ranks: tuple[int, ...]
    repetitions: int


class Timing(msgspec.Struct):
    """One contender at one rank. gb_per_s: weights read and written, over the median."""

    lora_rank: int
    contender: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    gb_per_s: float


class Ratios(msgspec.Struct):
    """Medians at one rank over each other. products: those alone, over the copy."""

    lora_rank: int
    bridge_over_ours: float
    ours_over_copy: float
    products_over_copy: float


class Result(msgspec.Struct):
    """A run of the benchmark. weight_bytes: of W, and as many of W'. load: of the machine, per
    core, before the run and after it, which includes the benchmark's own threads."""

    layers: int
    weight_bytes: int
    threads: int
    cores: int
    load_before: float
    load_after: float
    timings: list[Timing]
    ratios: list[Ratios]
    fresh_pages: list[Timing]


class Weights:
    """Base weights as ranks hold them and as checkpoints do, and merged tensors to write."""

    def __init__(self, layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layers = layers
        self.shards = [w for _ in range(layers) for w in layer.random_weights(generator)]
        self.base = self._checkpoint_tensors()
        self.merged = self._checkpoint_tensors()
        self._generator = generator
        self._copy = CopyKernel(layer.copy_blocks(layers), _types(self.shards), _types(self.base))
        self._copy.copy(self.shards, self.base)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def copy(self) -> None:
        self._copy.copy(self.shards, self.merged)

    def torch_copy(self) -> None:
        for merged, base in zip(self.merged, self.base, strict=True):
            merged.copy_(base)

    def merger(self, lora_rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """What lora_refit and Megatron-Bridge each do at this rank."""
        factors = layer.random_factors(lora_rank, self._generator)
        blocks, segments = layer.merge_program(self.layers, lora_rank, float(ALPHA_OVER_RANK))
        sources = [*self.shards, *factors]
        kernel = MergeKernel(
            blocks, segments, _types(sources), _types(self.merged), len(layer.MODULES) * self.layers
        )
        gathered = [*layer.gathered_factors(factors, lora_rank).values()] * self.layers

        def ours() -> None:
            kernel.merge(sources, self.merged)

        def bridge() -> None:
            for base, (a, b) in zip(self.base, gathered, strict=True):
                _bridge_merge(base, lora_rank, a, b)

        self._check(ours, gathered, lora_rank)
        return ours, bridge

    def _check(
        self,
        ours: Callable[[], None],
        gathered: Sequence[tuple[torch.Tensor, torch.Tensor]],
        lora_rank: int,
    ) -> None:
        """Both merge to the same weights, but for sums that round at another tie."""
        ours()
        for name in ("k_proj", "o_proj"):
            number = layer.TENSORS.index(name)
            expected = _bridge_merge(self.base[number], lora_rank, *gathered[number])
            torch.testing.assert_close(self.merged[number], expected, rtol=2**-7, atol=1e-6)

    def _checkpoint_tensors(self) -> list[torch.Tensor]:
        shapes = [*layer.CHECKPOINT_SHAPES.values()] * self.layers
        return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def run(scenario: Scenario, console: Console) -> Result:
    """Measure all ranks. Takes minutes; shows progress on the console."""
    os.environ["LORA_REFIT_THREADS"] = str(THREADS)
    # Idle OpenMP threads that spin would take the cores from whoever's turn is next.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    torch.set_num_threads(THREADS)
    _keep_freed_memory(True)
    megatron_cpu.enable()
    load_before = _load()
    console.print("filling weights ...")
    weights = Weights(scenario.layers)
    timings: list[Timing] = []
    ratios: list[Ratios] = []
    fresh: list[Timing] = []
    with Progress(console=console, transient=True) as progress:
        turns = (scenario.repetitions + 1) * (len(scenario.lora_ranks) + 1)
        task = progress.add_task("measuring", total=turns + FRESH_REPETITIONS + 1)

        def advance() -> None:
            progress.advance(task)

        per_rank = _marginal_ms(weights, scenario.repetitions, advance)
        for lora_rank in scenario.lora_ranks:
            ours, bridge = weights.merger(lora_rank)
            contenders = {OURS: ours, COPY: weights.copy, TORCH: weights.torch_copy, BRIDGE: bridge}
            samples = _take_turns(contenders, scenario.repetitions, advance)
            samples[PRODUCTS] = [per_rank * lora_rank]
            measured = _timings(lora_rank, samples, weights)
            timings += measured
            ratios.append(_ratios(lora_rank, {t.contender: t.median_ms for t in measured}))
        _keep_freed_memory(False)
        samples = _take_turns({OURS: ours, FRESH: bridge}, FRESH_REPETITIONS, advance)
        fresh = _timings(lora_rank, samples, weights)
    return Result(
        layers=scenario.layers,
        weight_bytes=weights.nbytes,
        threads=THREADS,
        cores=os.cpu_count() or 1,
        load_before=load_before,
        load_after=_load(),
        timings=timings,
        ratios=ratios,
        fresh_pages=fresh,
    )


def _keep_freed_memory(keep: bool) -> None:
    """Whether glibc reuses large freed blocks, or, its default, asks the system for fresh ones."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_MAX, 0 if keep else 65536)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_HEAP_BLOCK)
    libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1 if keep else 2 * _LARGEST_HEAP_BLOCK)
    if not keep:
        libc.malloc_trim(0)


def _bridge_merge(
    base: torch.Tensor, lora_rank: int, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge

    merged: torch.Tensor = MegatronPeftBridge()._merge_single_adapter_weight(
        base, ALPHA_OVER_RANK * lora_rank, lora_rank, a, b
    )
    return merged


def _marginal_ms(weights: Weights, repetitions: int, advance: Callable[[], None]) -> float:
    """Milliseconds that one more rank costs: products, and nothing else."""
    low, high = MARGINAL_RANKS
    contenders = {str(rank): weights.merger(rank)[0] for rank in MARGINAL_RANKS}
    samples = _take_turns(contenders, repetitions, advance)
    return (statistics.median(samples[str(high)]) - statistics.median(samples[str(low)])) / (
        high - low
    )


def _take_turns(
    contenders: dict[str, Callable[[], None]], repetitions: int, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """Times in milliseconds, interleaved so that drift of the machine meets all alike."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 1):
        for name, work in contenders.items():
            started = time.perf_counter()
            work()
            elapsed = (time.perf_counter() - started) * 1e3
            if repetition > 0:
                samples[name].append(elapsed)
        advance()
    return samples


def _timings(lora_rank: int, samples: dict[str, list[float]], weights: Weights) -> list[Timing]:
    return [
        Timing(
            lora_rank=lora_rank,
            contender=name,
            median_ms=statistics.median(ms),
            fastest_ms=min(ms),
            slowest_ms=max(ms),
            gb_per_s=2 * weights.nbytes / statistics.median(ms) / 1e6,
        )
        for name, ms in samples.items()
    ]


def _ratios(lora_rank: int, median_ms: dict[str, float]) -> Ratios:
    return Ratios(
        lora_rank=lora_rank,
        bridge_over_ours=median_ms[BRIDGE] / median_ms[OURS],
        ours_over_copy=median_ms[OURS] / median_ms[COPY],
        products_over_copy=median_ms[PRODUCTS] / median_ms[COPY],
    )


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _types(tensors: Sequence[torch.Tensor]) -> list[BufferType]:
    return [BufferType(tensor.dtype, tensor.numel()) for tensor in tensors]


def render(result: Result) -> Group:
    """Tables of one run: times of every contender, and the ratios that the aims are about."""
    return Group(_times(result), _comparison(result))


def _times(result: Result) -> Table:
    table = Table(
        title=(
            f"merge of {result.weight_bytes / 1e6:.0f} MB bf16 ({result.layers} layer(s) of 8B "
            f"shape, trainer TP {layer.TP}), {result.threads} threads; load per core "
            f"{result.load_before:.1f} before, {result.load_after:.1f} after"
        )
    )
    for column in ("rank", "contender", "median ms", "range ms", "GB/s"):
        table.add_column(column)
    for timing in [*result.timings, *result.fresh_pages]:
        derived = timing.contender == PRODUCTS
        table.add_row(
            str(timing.lora_rank),
            timing.contender,
            f"{timing.median_ms:.1f}",
            "" if derived else f"{timing.fastest_ms:.1f} - {timing.slowest_ms:.1f}",
            "" if derived else f"{timing.gb_per_s:.1f}",
            end_section=derived,
        )
    return table


def _comparison(result: Result) -> Table:
    table = Table(
        title=f"aims: {BRIDGE} / ours >= {BRIDGE_AIM}; ours / copy <= {COPY_AIM} at rank {COPY_AIM_RANK}",
        caption=(
            "Products alone, one fused multiply-add for each weight and rank, take the last "
            f"column: where it exceeds {COPY_AIM}, no merge on these cores is within that of a copy."
        ),
    )
    for column in ("rank", f"{BRIDGE} / ours", "ours / copy", "products alone / copy"):
        table.add_column(column)
    for ratios in result.ratios:
        table.add_row(
            str(ratios.lora_rank),
            f"{ratios.bridge_over_ours:.1f}",
            f"{ratios.ours_over_copy:.2f}",
            f"{ratios.products_over_copy:.2f}",
        )
    return table
