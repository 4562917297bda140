"""What the tests of real refits share: engines, and trainers attached to them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trainer

from lora_refit import AttachReport, RefitReport, Ticket
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

    model: str
    tensor_parallel: int
    dtype: str
    max_loras: int = 4
    max_lora_rank: int = 16
    worker: str = "mutants.MutantWorkerExtension"
    enable_lora: bool = True
    load_format: str = "auto"
    takes_merged: bool = False
    """With LoRA, whether merged weights are accepted too."""

    def __str__(self) -> str:
        slots = f"{self.max_loras}slots" if self.enable_lora else "merged"
        name = f"{self.model}-{self.dtype}-TP{self.tensor_parallel}-{slots}"
        name += "" if self.load_format == "auto" else f"-{self.load_format}"
        name += "-and-merged" if self.takes_merged else ""
        return name if self.worker == EngineCase.worker else f"{name}-{self.worker.split('.')[0]}"


LLAMA_TP1 = EngineCase("llama-gqa", 1, "float32")
LLAMA_TP2 = EngineCase("llama-gqa", 2, "bfloat16")
LLAMA_TP3 = EngineCase("llama-gqa", 3, "float32")
QWEN_TP1 = EngineCase("qwen3-mqa", 1, "bfloat16")
QWEN_TP2 = EngineCase("qwen3-mqa", 2, "float32")
QWEN_TP3 = EngineCase("qwen3-mqa", 3, "bfloat16")
LLAMA_TP2_GPU = EngineCase("llama-gqa", 2, "bfloat16", worker="gpu_worker.GpuWorkerExtension")
MERGED_LLAMA_TP1 = EngineCase("llama-gqa", 1, "float32", enable_lora=False)
MERGED_LLAMA_TP2 = EngineCase("llama-gqa", 2, "bfloat16", enable_lora=False)
MERGED_AND_LORA_TP1 = EngineCase("llama-gqa", 1, "float32", takes_merged=True)
MERGED_DUMMY_TP1 = EngineCase("llama-gqa", 1, "float32", enable_lora=False, load_format="dummy")
MERGED_QWEN_TP2 = EngineCase("qwen3-mqa", 2, "float32", enable_lora=False)
ONE_SLOT_TP2 = EngineCase("qwen3-mqa", 2, "float32", max_loras=1)


def on_engine(*cases: EngineCase) -> Any:
    """Parametrize a test with engines; tests of one engine run next to each other."""
    return pytest.mark.parametrize("live", cases, ids=str, indirect=True, scope="session")


@dataclass
class LiveEngine:
    """A running engine. model: its checkpoint; inspect: the Inspector of its workers."""

    case: EngineCase
    llm: Any
    model: Path
    inspect: Any
    _tokens: Iterator[int] = field(default_factory=itertools.count)

    def rpc_in_step(self) -> bool:
        """Whether every worker answers this call, and in its own place."""
        token = next(self._tokens)
        workers = range(self.case.tensor_parallel)
        return bool(self.inspect("echo", token) == [[worker, token] for worker in workers])


@dataclass
class Refitted:
    """A trainer and the engine that is attached to it."""

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

    def attests(self, version: int) -> bool:
        """Whether the version is live and whole on every worker."""
        attestation = self.engine.attest()
        return bool(attestation.ok and attestation.version == version)


def policy_config(model: Path, tensor_parallel: int, **settings: Any) -> PolicyConfig:
    """Rank 6 divides by 1, 2 and 3 ranks; alpha / r is no power of two."""
    chosen: dict[str, Any] = {"lora_rank": 6, "lora_alpha": 9} | settings
    return PolicyConfig(model, tensor_parallel=tensor_parallel, **chosen)
