"""The Megatron policy of the GRPO driver against Hugging Face with PEFT, at every topology."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from lora_refit.grpo.batch import RolloutBatch, pack_rollouts
from lora_refit.grpo.policy import MegatronPolicy
from lora_refit.testing import megatron
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.models import tiny_model
from lora_refit.testing.ranks import RankError, TrainerRanks

RANK, ALPHA, LEARNING_RATE, MAX_GRAD_NORM = 6, 12, 1e-2, 0.5
TOLERANCE = 2e-5

TOPOLOGIES: dict[str, dict[str, Any]] = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp3": {"tensor_parallel": 3},
    "pp2": {"pipeline_parallel": 2},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("policy") / "llama", architecture="llama")


@pytest.fixture(scope="module")
def batch() -> RolloutBatch:
    """Six rows of different prompt and response lengths; the longest sequence is odd.

    The fourth row repeats the third, so one micro-batch holds the same row twice.
    """
    generator = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 259, (count,), generator=generator).tolist()

    shape = [(4, 3), (1, 5), (6, 1), (7, 4), (2, 2)]
    rows = [(tokens(prompt), tokens(response)) for prompt, response in shape]
    rows.insert(3, rows[2])
    return pack_rollouts(
        prompts=[prompt for prompt, _ in rows],
        responses=[response for _, response in rows],
        log_probs=[[-1.0] * len(response) for _, response in rows],
        rewards=[0.0] * len(rows),
    )


def build(state: dict[str, Any], config: PolicyConfig) -> None:
    # Two rows a micro-batch, so there are three of them.
    policy = MegatronPolicy(config, LEARNING_RATE, MAX_GRAD_NORM, micro_batch_rows=2)
    megatron.randomize_adapters(policy.chunks, seed=7, std=0.2)
    state["policy"] = policy


def score(state: dict[str, Any], batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    policy = state["policy"]
    return policy.reference_log_probs(batch), policy.log_probs(batch)


def step(state: dict[str, Any], batch: RolloutBatch) -> tuple[float, float]:
    """One step that makes the responses likelier, the later rows more so."""
    weights = (torch.arange(batch.rows)[:, None] + 1) * batch.mask

    def loss(log_probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return -(weights[rows] * log_probs).sum()

    report = state["policy"].update(batch, loss)
    return report.loss, report.grad_norm


def export_adapter(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    policy = state["policy"]
    exported = policy.bridge.export_adapter_weights(policy.chunks, cpu=True, show_progress=False)
    return {name: tensor.clone() for name, tensor in exported}


class HuggingFacePolicy:
    """The same policy as one PEFT model, trained by plain torch.

    Megatron adapts the fused q/k/v and gate/up projections with one shared lora_A, so modules
    whose exported lora_A is the same share one parameter here as well.
    """

    def __init__(self, checkpoint: Path, adapter: dict[str, torch.Tensor]) -> None:
        base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
        self.model = peft.get_peft_model(base, config)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        shared: dict[bytes, torch.nn.Parameter] = {}
        for name, tensor in adapter.items():
            module, factor, _ = f"base_model.model.{name}".rsplit(".", 2)
            parameter = torch.nn.Parameter(tensor.clone())
            parameter = shared.setdefault(tensor.numpy().tobytes(), parameter)
            getattr(self.model.get_submodule(module), factor)["default"].weight = parameter
            self.parameters[name] = parameter

    def log_probs(self, batch: RolloutBatch) -> torch.Tensor:
        """Row by row and without padding, so that padding has nothing to go wrong in."""
        result = torch.zeros_like(batch.rollout_log_probs)
        lengths = zip(batch.prompt_lengths.tolist(), batch.response_lengths.tolist(), strict=True)
        rows = []
        for index, (prompt, response) in enumerate(lengths):
            tokens = batch.tokens[index : index + 1, : prompt + response]
            logits = self.model(tokens).logits[0, prompt - 1 : -1].log_softmax(-1)
            chosen = logits.gather(1, tokens[0, prompt:, None])[:, 0]
            rows.append(torch.nn.functional.pad(chosen, (0, result.shape[1] - response)))
        return torch.stack(rows)

    def step(self, batch: RolloutBatch) -> tuple[float, float]:
        weights = (torch.arange(batch.rows)[:, None] + 1) * batch.mask
        unique = list(dict.fromkeys(self.parameters.values()))
        optimizer = torch.optim.AdamW(unique, lr=LEARNING_RATE, weight_decay=0.0)
        loss = -(weights * self.log_probs(batch)).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(unique, MAX_GRAD_NORM)
        optimizer.step()
        return loss.item(), norm.item()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_policy_equals_huggingface(topology: str, checkpoint: Path, batch: RolloutBatch) -> None:
    """Log-probs with and without adapter, then one optimizer step: loss, norm and new weights."""
    config = PolicyConfig(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, **TOPOLOGIES[topology])
    with TrainerRanks(config.tensor_parallel * config.pipeline_parallel) as ranks:
        ranks.call(build, config)
        oracle = HuggingFacePolicy(checkpoint, ranks.call(export_adapter)[0])
        scores = ranks.call(score, batch)
        steps = ranks.call(step, batch)
        stepped = ranks.call(export_adapter)[0]

    with torch.no_grad():
        expected = oracle.log_probs(batch)
        with oracle.model.disable_adapter():
            reference = oracle.log_probs(batch)
    assert (expected - reference).abs().max() > 0.05
    real = batch.mask.bool()
    for without, with_adapter in scores:
        torch.testing.assert_close(without[real], reference[real], atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(with_adapter[real], expected[real], atol=TOLERANCE, rtol=0)

    expected_loss, expected_norm = oracle.step(batch)
    assert expected_norm > MAX_GRAD_NORM, "the step must be a clipped one"
    for loss, norm in steps:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for name, parameter in oracle.parameters.items():
        # AdamW's first step is nearly +-lr for every element, so compare with a part of it.
        difference = (stepped[name] - parameter).abs()
        assert difference.median() < 1e-5, name
        assert (difference > 0.1 * LEARNING_RATE).float().mean() < 1e-3, name


def test_data_parallelism_is_refused(checkpoint: Path) -> None:
    with (
        TrainerRanks(2) as ranks,
        pytest.raises(RankError, match="no data parallelism, start 1 ranks"),
    ):
        ranks.call(build, PolicyConfig(checkpoint))
