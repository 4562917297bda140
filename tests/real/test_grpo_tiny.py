"""The whole GRPO loop on a tiny random model: real Megatron ranks, real vLLM, a refit each step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lora_refit import RefitReport, Ticket
from lora_refit.grpo.config import GrpoConfig
from lora_refit.grpo.driver import train
from lora_refit.grpo.metrics import RunReport
from lora_refit.grpo.rollout import RolloutEngine
from lora_refit.testing.models import tiny_model
from lora_refit.testing.ranks import TrainerRanks

LOST_STEP = 2
"""The step whose refit the mutant drops: the engine goes on with the policy of the step before."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("grpo") / "qwen3", vocab=384)


@pytest.fixture(scope="module")
def ranks() -> Iterator[TrainerRanks]:
    """Two ranks for all tests here: rank 0 starts engines from one server, which takes long."""
    with TrainerRanks(2) as ranks:
        yield ranks


def run_losing_one_refit(state: dict[str, Any], config: GrpoConfig) -> RunReport | None:
    refit = RolloutEngine.refit
    reports: list[RefitReport] = []

    def lossy(self: RolloutEngine, ticket: Ticket) -> RefitReport:
        if ticket.version != LOST_STEP:
            reports.append(refit(self, ticket))
        return reports[-1]

    with mock.patch.object(RolloutEngine, "refit", lossy):
        return train(config)


def train_here(state: dict[str, Any], config: GrpoConfig) -> RunReport | None:
    return train(config)


def test_reward_rises_and_the_engine_follows(checkpoint: Path, ranks: TrainerRanks) -> None:
    """Each step samples from the policy of that step, as the trainer itself scores it.

    One dropped refit must show up in exactly its own step.
    """
    config = GrpoConfig(
        model=checkpoint,
        task="letters",
        steps=9,
        max_new_tokens=6,
        learning_rate=1e-2,
        kl_coefficient=0.001,
        tensor_parallel=2,
        engine_threads=1,
    )
    report, other = ranks.call(run_losing_one_refit, config)
    assert other is None
    assert isinstance(report, RunReport)
    for step in report.steps:
        print(
            f"step {step.step} version {step.version} reward {step.reward:.3f} kl {step.kl:.4f} "
            f"gen_kl_error {step.gen_kl_error:.1e} token_prob_error {step.token_prob_error:.1e}"
        )
    for step in report.steps:
        if step.step == LOST_STEP:
            assert step.version == LOST_STEP - 1
            assert step.gen_kl_error > 1e-3
            assert step.token_prob_error > 1e-3
        else:
            assert step.version == step.step
            assert step.gen_kl_error < 1e-9
            assert step.token_prob_error < 1e-5
    rewards = [step.reward for step in report.steps]
    assert sum(rewards[-3:]) / 3 > rewards[0] + 0.1
    assert report.steps[0].kl == 0.0
    assert report.steps[-1].kl > 1e-3


def test_the_engine_follows_in_merged_mode(checkpoint: Path, ranks: TrainerRanks) -> None:
    """The same loop with an engine that knows no LoRA: only the mode differs."""
    config = GrpoConfig(
        model=checkpoint,
        task="letters",
        steps=3,
        max_new_tokens=6,
        learning_rate=1e-2,
        tensor_parallel=2,
        engine_threads=1,
        refit_mode="merged",
    )
    report, _ = ranks.call(train_here, config)
    for step in report.steps:
        print(f"step {step.step} reward {step.reward:.3f} gen_kl_error {step.gen_kl_error:.1e}")
        assert step.version == step.step
        assert step.gen_kl_error < 1e-9
        assert step.token_prob_error < 1e-5
