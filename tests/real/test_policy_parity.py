"""The engine's policy is the trainer's: equal log-probabilities after every refit, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import trainer
from conftest import EngineCase, LiveEngine, Refitted, on_engine
from mutants import MUTANTS

REFITS = 20
TOLERANCE = 1e-4
NOTICEABLE = 1e-2
PROMPTS = torch.randint(3, 259, (3, 40), generator=torch.Generator().manual_seed(11)).tolist()
"""Longer than a block of 32 tokens, so that the prefix cache would serve them again."""
NEW_TOKENS = 8

QWEN_TP2 = EngineCase("qwen3-mqa", 2, "float32")
LLAMA_TP1 = EngineCase("llama-gqa", 1, "float32")
LLAMA_TP3 = EngineCase("llama-gqa", 3, "float32")


@on_engine(LLAMA_TP1, QWEN_TP2, LLAMA_TP3)
def test_log_probs_follow_the_trainer(
    attach: Callable[..., Refitted], live: LiveEngine, trainer_tp: int = 2
) -> None:
    """20 refits with changing adapters; before each, the engine must not know the new values."""
    refitted = attach(trainer_tp, lora_alpha=9)
    refitted.refit(0, seed=100)
    worst, nearest = 0.0, float("inf")
    for version in range(1, REFITS + 1):
        ticket = refitted.publish(version, seed=100 + version)
        nearest = min(nearest, disagreement(refitted, version))
        refitted.engine.refit(ticket)
        worst = max(worst, disagreement(refitted, version))
    print(f"{live.case}: max |dlogp| {worst:.1e} after a refit, {nearest:.1e} or more without")
    assert worst < TOLERANCE
    assert nearest > NOTICEABLE


@on_engine(QWEN_TP2)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_refit_is_noticed(attach: Callable[..., Refitted], mutant: str) -> None:
    refitted = attach(2)
    refitted.refit(1, seed=1)
    refitted.live.inspect("mutate", mutant)
    refitted.refit(2, seed=2)
    wrong = disagreement(refitted)
    refitted.live.inspect("mutate", "")
    refitted.refit(3, seed=3)
    right = disagreement(refitted)
    print(f"{mutant}: max |dlogp| {wrong:.1e}, unmutated {right:.1e}")
    assert right < TOLERANCE < wrong


@on_engine(QWEN_TP2)
def test_a_reused_request_identity_is_noticed(attach: Callable[..., Refitted]) -> None:
    """Mutant: one name and path for all versions, so the prefix cache serves an old version."""
    from vllm.lora.request import LoRARequest

    refitted = attach(2)

    def same_name() -> LoRARequest:
        return LoRARequest("policy", refitted.engine.lora_request().lora_int_id, "policy")

    refitted.refit(1, seed=1)
    assert disagreement(refitted, request=same_name()) < TOLERANCE
    refitted.refit(2, seed=2)
    stale = disagreement(refitted, request=same_name())
    right = disagreement(refitted)
    print(f"one identity for two versions: max |dlogp| {stale:.1e}, own identity {right:.1e}")
    assert right < TOLERANCE
    assert stale > NOTICEABLE


def disagreement(refitted: Refitted, seed: int = 0, request: Any = None) -> float:
    """Largest difference between the engine's and the trainer's log-probability of a token that
    the engine samples."""
    request = request or refitted.engine.lora_request()
    responses, engine = sample(refitted.live.llm, request, seed)
    policy = refitted.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
    return float((torch.tensor(engine, dtype=torch.float64) - policy).abs().max())


def sample(llm: Any, request: Any, seed: int) -> tuple[list[list[int]], list[list[float]]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(
            temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, seed=seed
        ),
        lora_request=request,
        use_tqdm=False,
    )
    done = [output.outputs[0] for output in outputs]
    log_probs = [
        [step[token].logprob for step, token in zip(item.logprobs, item.token_ids, strict=True)]
        for item in done
    ]
    return [list(item.token_ids) for item in done], log_probs
