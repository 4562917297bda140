"""`bench merge`: merging LoRA into layers of 8B shape, beside Megatron-Bridge's merge and copies.

All contenders work on the same weights, far more than caches hold, and take turns in one run:

- lora_refit: gathers both ranks' factors, merges, packs for the checkpoint's layout, digests and
  measures fidelity in one launch.
- Megatron-Bridge: its own `_merge_single_adapter_weight` for every checkpoint tensor, given weights
  and factors that are gathered and split already, which its export would do first. It makes several
  temporaries for each tensor: by default glibc gives them fresh pages each time, which is measured
  first, at one rank; then it is told to keep freed memory for them, as GPU allocators do.
- lora_refit copy: moves and digests the same weights without merging.
- torch copy_: the same bytes, contiguous, without a digest.

The products alone are what rank costs at the margin, the difference between merges of two ranks: all
else in a merge does not depend on it. At the rate of these products no merge takes less.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from rich.console import Console, Group
from rich.progress import Progress
from rich.table import Table

from lora_refit.bench import layer
from lora_refit.bench.merge_contenders import Weights, keep_freed_memory
from lora_refit.testing import megatron_cpu

THREADS = 2
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
    fresh_pages: list[Timing]
    timings: list[Timing]
    ratios: list[Ratios]


def run(scenario: Scenario, console: Console) -> Result:
    """Measure all ranks. Takes minutes; shows progress on the console."""
    os.environ["LORA_REFIT_THREADS"] = str(THREADS)
    # Idle OpenMP threads that spin would take the cores from whoever's turn is next.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    torch.set_num_threads(THREADS)
    megatron_cpu.enable()
    load_before = _load()
    console.print("filling weights ...")
    weights = Weights(scenario.layers)
    with Progress(console=console, transient=True) as progress:
        turns = (scenario.repetitions + 1) * len(scenario.lora_ranks) + FRESH_REPETITIONS + 1
        task = progress.add_task("measuring", total=turns)
        fresh_pages = _measure_fresh_pages(scenario, weights, lambda: progress.advance(task))
        keep_freed_memory()
        timings = _measure(scenario, weights, lambda: progress.advance(task))
    return Result(
        layers=scenario.layers,
        weight_bytes=weights.nbytes,
        threads=THREADS,
        cores=os.cpu_count() or 1,
        load_before=load_before,
        load_after=_load(),
        fresh_pages=fresh_pages,
        timings=timings,
        ratios=[_ratios(lora_rank, timings) for lora_rank in scenario.lora_ranks],
    )


def _measure_fresh_pages(
    scenario: Scenario, weights: Weights, advance: Callable[[], None]
) -> list[Timing]:
    lora_rank = scenario.lora_ranks[0]
    ours, bridge = weights.merger(lora_rank)
    samples = _take_turns({OURS: ours, FRESH: bridge}, FRESH_REPETITIONS, advance)
    return _timings(lora_rank, samples, weights)


def _measure(scenario: Scenario, weights: Weights, advance: Callable[[], None]) -> list[Timing]:
    timings: list[Timing] = []
    marginal = {str(lora_rank): weights.merger(lora_rank)[0] for lora_rank in MARGINAL_RANKS}
    for lora_rank in scenario.lora_ranks:
        ours, bridge = weights.merger(lora_rank)
        contenders = {OURS: ours, COPY: weights.copy, TORCH: weights.torch_copy, BRIDGE: bridge}
        samples = _take_turns(contenders | marginal, scenario.repetitions, advance)
        samples[PRODUCTS] = _products(lora_rank, *(samples.pop(name) for name in marginal))
        timings += _timings(lora_rank, samples, weights)
    return timings


def _products(lora_rank: int, low: list[float], high: list[float]) -> list[float]:
    """Milliseconds of the products of a rank, from merges of the marginal ranks in each turn."""
    step = MARGINAL_RANKS[1] - MARGINAL_RANKS[0]
    return [(more - less) / step * lora_rank for less, more in zip(low, high, strict=True)]


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


def _ratios(lora_rank: int, timings: list[Timing]) -> Ratios:
    median_ms = {t.contender: t.median_ms for t in timings if t.lora_rank == lora_rank}
    return Ratios(
        lora_rank=lora_rank,
        bridge_over_ours=median_ms[BRIDGE] / median_ms[OURS],
        ours_over_copy=median_ms[OURS] / median_ms[COPY],
        products_over_copy=median_ms[PRODUCTS] / median_ms[COPY],
    )


def _load() -> float:
    return os.getloadavg()[0] / (os.cpu_count() or 1)


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
    for timing in [*result.fresh_pages, *result.timings]:
        table.add_row(
            str(timing.lora_rank),
            timing.contender,
            f"{timing.median_ms:.1f}",
            f"{timing.fastest_ms:.1f} - {timing.slowest_ms:.1f}",
            f"{timing.gb_per_s:.1f}",
            end_section=timing.contender in (PRODUCTS, FRESH),
        )
    return table


def _comparison(result: Result) -> Table:
    table = Table(
        title=f"aims: {BRIDGE} / ours >= {BRIDGE_AIM}; ours / copy <= {COPY_AIM} at rank {COPY_AIM_RANK}",
        caption=(
            "Products alone, one fused multiply-add for each weight and rank, take the last "
            f"column: where it exceeds {COPY_AIM}, that aim is out of reach at this rate of them."
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
