"""`bench refit`: one refit of an 8B-shaped adapter into a real engine, beside its peers.

All contenders share trainer ranks, engine and process layout, and take turns in one run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lora_refit.bench import trainer
from lora_refit.spec import Spec, Ticket
from lora_refit.testing.engine import cpu_llm, shutdown
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.models import llama8b_shaped
from lora_refit.testing.ranks import TrainerRanks

PEER_ID = 7
OURS = "lora_refit"
DIRECTORY = "PEFT directory"
BYTES = "bytes over RPC"


@dataclass(frozen=True)
class Scenario:
    """One row group of the benchmark: an adapter, its trainer's ranks, and repetitions."""

    layers: int
    lora_rank: int
    trainer_tensor_parallel: int
    repetitions: int


class Timing(msgspec.Struct):
    """One contender in one scenario. ratio: its median over lora_refit's median."""

    trainer_tensor_parallel: int
    contender: str
    median_ms: float
    fastest_ms: float
    slowest_ms: float
    ratio: float
    phases_ms: dict[str, float]


class Result(msgspec.Struct):
    """A run of the benchmark; `adapter_bytes` is the unique bytes over all trainer ranks."""

    layers: int
    lora_rank: int
    cores: int
    adapter_bytes: int
    timings: list[Timing]


def run(scenarios: list[Scenario], console: Console) -> Result:
    """Run all scenarios on one engine. Takes minutes; shows progress on the console."""
    # Idle OpenMP threads that spin would take the cores from whoever's turn is next.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    layers, lora_rank = scenarios[0].layers, scenarios[0].lora_rank
    timings: list[Timing] = []
    adapter_bytes = 0
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="lora-refit-bench-") as folder:
        model = llama8b_shaped(Path(folder) / "model", layers)
        with _engine(model, lora_rank, console) as llm:
            for scenario in scenarios:
                ranks = TrainerRanks(
                    scenario.trainer_tensor_parallel,
                    threads=max(1, (os.cpu_count() or 1) // scenario.trainer_tensor_parallel),
                )
                with ranks:
                    console.print(f"trainer with {ranks.world_size} tensor-parallel rank(s) ...")
                    config = PolicyConfig(
                        model,
                        tensor_parallel=scenario.trainer_tensor_parallel,
                        dtype="bfloat16",
                        lora_rank=lora_rank,
                        lora_alpha=2 * lora_rank,
                        load_weights=False,
                    )
                    adapter_bytes = sum(ranks.call(trainer.build, config))
                    timings += _measure(scenario, ranks, llm, Path(folder), console)
    return Result(layers, lora_rank, os.cpu_count() or 1, adapter_bytes, timings)


@contextmanager
def _engine(model: Path, lora_rank: int, console: Console) -> Iterator[Any]:
    """An 8B-shaped engine whose base weights are never written, so that they take no memory."""
    console.print("starting the engine ...")
    with mock.patch(
        "vllm.model_executor.model_loader.dummy_loader.initialize_single_dummy_weight",
        lambda *args, **kwargs: None,
    ):
        llm = cpu_llm(
            model,
            dtype="bfloat16",
            max_lora_rank=lora_rank,
            max_loras=3,
            in_process=True,
            load_format="dummy",
            worker_extension_cls="lora_refit.bench.worker.BenchWorkerExtension",
            skip_tokenizer_init=True,
            max_num_seqs=1,
            max_model_len=32,
            max_num_batched_tokens=32,
        )
    llm.collective_rpc("bench_use_all_cores", args=(os.cpu_count() or 1,))
    try:
        yield llm
    finally:
        shutdown(llm)


def _measure(
    scenario: Scenario, ranks: TrainerRanks, llm: Any, folder: Path, console: Console
) -> list[Timing]:
    from vllm.lora.request import LoRARequest

    from lora_refit.vllm import RefitEngine

    spec = Spec.from_bytes(ranks.call(trainer.open_publisher, torch.bfloat16)[0])
    engine = RefitEngine(llm)
    engine.attach(spec)
    config = msgspec.json.encode(spec.layout.peft_config)
    version = 0

    def ours() -> dict[str, float]:
        nonlocal version
        version += 1
        started = ranks.submit(trainer.publish, version)
        # As in a training loop, rank 0 goes on with its own ticket; workers wait for the others.
        report = engine.refit(Ticket.from_bytes(ranks.collect(started[:1])[0]))
        ranks.collect(started[1:])
        return report.phases_ms

    def directory() -> dict[str, float]:
        path = folder / "peft"
        started = time.perf_counter()
        ranks.call(trainer.save_peft_directory, path)
        saved = time.perf_counter()
        llm.llm_engine.add_lora(LoRARequest("peer", PEER_ID, str(path), load_inplace=True))
        return _phases(started, export=saved, load=time.perf_counter())

    def over_rpc() -> dict[str, float]:
        started = time.perf_counter()
        data = ranks.call(trainer.export_bytes)[0]
        exported = time.perf_counter()
        llm.collective_rpc("bench_load_bytes", args=(PEER_ID, data, config))
        return _phases(started, export=exported, load=time.perf_counter())

    contenders = {OURS: ours, DIRECTORY: directory, BYTES: over_rpc}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=scenario.repetitions + 1)
        samples = _take_turns(contenders, scenario.repetitions, lambda: progress.advance(task))
    engine.close()
    llm.llm_engine.remove_lora(PEER_ID)
    base = statistics.median(total for total, _ in samples[OURS])
    return [_timing(scenario, name, taken, base) for name, taken in samples.items()]


Sample = tuple[float, dict[str, float]]


def _take_turns(
    contenders: dict[str, Callable[[], dict[str, float]]],
    repetitions: int,
    advance: Callable[[], None],
) -> dict[str, list[Sample]]:
    """Times in milliseconds, interleaved so that drift of the machine meets all alike."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for repetition in range(repetitions + 1):
        for name, refit in contenders.items():
            started = time.perf_counter()
            phases = refit()
            total = (time.perf_counter() - started) * 1e3
            if repetition > 0:
                samples[name].append((total, phases))
        advance()
    return samples


def _timing(scenario: Scenario, name: str, samples: list[Sample], base: float) -> Timing:
    totals = [total for total, _ in samples]
    median = statistics.median(totals)
    return Timing(
        trainer_tensor_parallel=scenario.trainer_tensor_parallel,
        contender=name,
        median_ms=median,
        fastest_ms=min(totals),
        slowest_ms=max(totals),
        ratio=median / base,
        phases_ms={
            phase: statistics.median(phases[phase] for _, phases in samples)
            for phase in samples[0][1]
        },
    )


def _phases(started: float, **ends: float) -> dict[str, float]:
    """Milliseconds of consecutive phases from their end times."""
    phases = {}
    for name, end in ends.items():
        phases[name] = (end - started) * 1e3
        started = end
    return phases


def render(result: Result) -> Table:
    """A table of one run: how many times lora_refit's median each contender takes."""
    table = Table(
        title=(
            f"refit of {result.adapter_bytes / 1e6:.0f} MB ({result.layers} layers of 8B shape, "
            f"rank {result.lora_rank}, bf16) on {result.cores} cores"
        )
    )
    for column in ("trainer TP", "contender", "x lora_refit", "median ms", "range ms", "phases ms"):
        table.add_column(column)
    for timing in result.timings:
        table.add_row(
            str(timing.trainer_tensor_parallel),
            timing.contender,
            f"{timing.ratio:.1f}",
            f"{timing.median_ms:.1f}",
            f"{timing.fastest_ms:.1f} - {timing.slowest_ms:.1f}",
            ", ".join(f"{name} {value:.1f}" for name, value in timing.phases_ms.items()),
        )
    return table
