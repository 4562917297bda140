"""The engine's policy is the trainer's: equal log-probabilities after every refit, in fp32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mutants import MUTANTS
from parity import TOLERANCE, disagreement
from rig import LLAMA_TP1, LLAMA_TP3, QWEN_TP2, LiveEngine, Refitted, on_engine

REFITS = 20
CONTROL_EVERY = 5
NOTICEABLE = 1e-2


@on_engine(LLAMA_TP1, QWEN_TP2, LLAMA_TP3)
def test_log_probs_follow_the_trainer(attach: Callable[..., Refitted], live: LiveEngine) -> None:
    """20 refits with changing adapters; control: before a refit the engine does not agree."""
    refitted = attach(2)
    refitted.refit(0, seed=100)
    worst, nearest = 0.0, float("inf")
    for version in range(1, REFITS + 1):
        ticket = refitted.publish(version, seed=100 + version)
        if version % CONTROL_EVERY == 0:
            nearest = min(nearest, disagreement(refitted))
        refitted.engine.refit(ticket)
        worst = max(worst, disagreement(refitted))
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
