"""Two adapters of different trainers live side by side in one engine, each under its own handle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from parity import TOLERANCE, disagreement
from rig import QWEN_TP2, Refitted, on_engine

from lora_refit import LayoutMismatch
from lora_refit.testing.ranks import TrainerRanks


@on_engine(QWEN_TP2)
def test_two_adapters_do_not_touch_each_other(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    """Same layout, other weights: each engine policy stays that of its own trainer."""
    from lora_refit.vllm import RefitEngine

    policy = attach(1)
    critic_engine = RefitEngine(policy.live.llm, adapter="critic", timeout_s=20.0)
    try:
        critic = attach(2, ranks=mortals, engine=critic_engine)
        for version in range(1, 4):
            policy.refit(version, seed=version)
            critic.refit(version, seed=100 + version)
            assert policy.attests(version)
            assert critic.attests(version)
            assert disagreement(policy) < TOLERANCE
            assert disagreement(critic) < TOLERANCE
        assert disagreement(policy, critic_engine.lora_request()) > TOLERANCE
        critic_engine.close()
        assert policy.attests(3)
        assert disagreement(policy) < TOLERANCE
    finally:
        critic_engine.close()


@on_engine(QWEN_TP2)
def test_a_name_belongs_to_one_handle(
    attach: Callable[..., Refitted], mortals: TrainerRanks
) -> None:
    """A second handle of the same name is refused and changes nothing for the first."""
    from lora_refit.vllm import RefitEngine

    first = attach(1)
    first.refit(1, seed=1)
    second = RefitEngine(first.live.llm, timeout_s=20.0)
    with pytest.raises(LayoutMismatch, match="'policy' belongs to another RefitEngine"):
        attach(2, ranks=mortals, engine=second)
    second.close()
    assert first.attests(1)
    first.refit(2, seed=2)
    assert first.attests(2)
    assert disagreement(first) < TOLERANCE
