"""The whole GRPO loop on a tiny random model: real Megatron ranks, real vLLM, a refit each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_refit.grpo.config import GrpoConfig
from lora_refit.grpo.driver import train
from lora_refit.grpo.metrics import RunReport
from lora_refit.testing.models import tiny_model
from lora_refit.testing.ranks import TrainerRanks


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("grpo") / "qwen3", vocab=384)


def run(state: dict[str, Any], config: GrpoConfig) -> RunReport | None:
    return train(config)


def test_reward_rises_and_the_engine_follows(checkpoint: Path) -> None:
    """Each step the engine samples from the policy of that step, as the trainer itself scores it."""
    tensor_parallel = 2
    config = GrpoConfig(
        model=checkpoint,
        task="letters",
        steps=6,
        prompts_per_step=4,
        samples_per_prompt=8,
        max_new_tokens=6,
        learning_rate=1e-2,
        kl_coefficient=0.001,
        tensor_parallel=tensor_parallel,
        engine_threads=1,
    )
    with TrainerRanks(tensor_parallel) as ranks:
        report, *others = ranks.call(run, config)
    assert others == [None] * (tensor_parallel - 1)
    assert isinstance(report, RunReport)
    rewards = [step.reward for step in report.steps]
    print("rewards", [round(reward, 3) for reward in rewards])
    assert rewards[-1] > rewards[0] + 0.2
    assert report.held_out_after > report.held_out_before
    for step in report.steps:
        assert step.version == step.step
        assert step.gen_kl_error < 1e-6
        assert step.token_prob_error < 1e-4
    assert report.steps[0].kl == 0.0
    assert report.steps[-1].kl > 1e-3
