"""Live engines and trainer ranks that the tests of real refits share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trainer

from lora_refit import AttachReport, RefitReport, Spec, Ticket
from lora_refit.testing.engine import cpu_llm, shutdown
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.ranks import TrainerRanks

MODELS: dict[str, dict[str, Any]] = {
    "llama-gqa": {"architecture": "llama", "heads": 12, "kv_heads": 6},
    "qwen3-mqa": {"architecture": "qwen3", "heads": 6, "kv_heads": 1, "head_dim": 96},
}
"""Sizes of `tiny_model`: grouped queries, and one key-value head for all workers and ranks."""


@dataclass(frozen=True)
class EngineCase:
    """An engine that tests share. Four LoRA slots: two for refits, two for vLLM's own loader."""

    model: str = "llama-gqa"
    tensor_parallel: int = 1
    dtype: str = "float32"
    max_loras: int = 4
    max_lora_rank: int = 16

    def __str__(self) -> str:
        slots = "" if self.max_loras == 4 else f"-{self.max_loras}slot"
        return f"{self.model}-{self.dtype}-TP{self.tensor_parallel}{slots}"


@dataclass
class LiveEngine:
    """A running engine, and what was made for it."""

    case: EngineCase
    llm: Any
    model: Path
    inspect: Any
    tokens: Iterator[int] = field(default_factory=itertools.count)


def on_engine(*cases: EngineCase) -> Any:
    """Parametrize a test with engines; tests of one engine run next to each other."""
    return pytest.mark.parametrize("live", cases, ids=str, indirect=True, scope="session")


@pytest.fixture(scope="session")
def live(request: pytest.FixtureRequest, tiny: Callable[..., Path]) -> Iterator[LiveEngine]:
    """The engine of an EngineCase; lives as long as tests ask for it in a row."""
    from lora_refit.testing.worker import Inspector

    case: EngineCase = request.param
    model = tiny(**MODELS[case.model])
    llm = cpu_llm(
        model,
        tensor_parallel=case.tensor_parallel,
        dtype=case.dtype,
        max_lora_rank=case.max_lora_rank,
        max_loras=case.max_loras,
        worker_extension_cls="mutants.MutantWorkerExtension",
    )
    yield LiveEngine(case, llm, model, Inspector(llm))
    shutdown(llm)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], TrainerRanks]]:
    """`ranks(n)` are n trainer ranks, the same ones at every call."""
    groups: dict[int, TrainerRanks] = {}

    def of_size(size: int) -> TrainerRanks:
        if size not in groups:
            groups[size] = TrainerRanks(size, timeout_s=120.0)
            groups[size].__enter__()
        return groups[size]

    yield of_size
    for group in groups.values():
        group.__exit__(None, None, None)


@dataclass
class Refitted:
    """A trainer attached to an engine: what most tests work with."""

    live: LiveEngine
    ranks: TrainerRanks
    engine: Any
    report: AttachReport

    def publish(self, version: int, seed: int | None = None) -> Ticket:
        """Publish on every rank, with new random values if there is a seed."""
        return Ticket.from_bytes(self.ranks.call(trainer.publish, version, seed)[0])

    def refit(self, version: int, seed: int | None = None) -> RefitReport:
        report: RefitReport = self.engine.refit(self.publish(version, seed))
        assert report.version == version
        return report


@pytest.fixture
def attach(
    live: LiveEngine, ranks: Callable[[int], TrainerRanks]
) -> Iterator[Callable[..., Refitted]]:
    """`attach(2, lora_rank=6)` builds a policy on two trainer ranks and attaches the engine to it.

    With `engine`, that handle is attached again. Slots are given back after the test.
    """
    from lora_refit.vllm import RefitEngine

    engines = []

    def make(
        trainer_tp: int | TrainerRanks,
        scale_rounding: str = "engine",
        timeout_s: float = 20.0,
        engine: Any = None,
        **policy: Any,
    ) -> Refitted:
        group = trainer_tp if isinstance(trainer_tp, TrainerRanks) else ranks(trainer_tp)
        config = policy_config(live.model, group.world_size, **policy)
        group.call(trainer.build, config)
        spec = group.call(trainer.offer, live.case.dtype, scale_rounding)[0]
        if engine is None:
            engine = RefitEngine(live.llm, timeout_s=timeout_s)
            engines.append(engine)
        return Refitted(live, group, engine, engine.attach(Spec.from_bytes(spec)))

    yield make
    for engine in engines:
        engine.close()


def policy_config(model: Path, tensor_parallel: int, **settings: Any) -> PolicyConfig:
    """Rank 6 divides by 1, 2 and 3 ranks; alpha / r is no power of two."""
    return PolicyConfig(
        model,
        tensor_parallel=tensor_parallel,
        **({"lora_rank": 6, "lora_alpha": 9} | settings),
    )
