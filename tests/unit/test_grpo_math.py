"""GRPO's arithmetic against values worked out by hand, and its batches against plain lists."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch

from lora_refit.grpo import math as grpo_math
from lora_refit.grpo.batch import pack_rollouts
from lora_refit.grpo.config import GrpoConfig
from lora_refit.grpo.driver import grpo_loss
from lora_refit.grpo.tasks import Addition, Letters, Problem

ONE = torch.ones(1, 1)
COUNT = torch.tensor(1.0)


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    advantages = grpo_math.group_relative_advantages(rewards, group_size=2, epsilon=0.0)
    # First group: mean 1/2, unbiased deviation sqrt(1/2).
    assert advantages[:2].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
    assert advantages[2:].isnan().all(), "0 / 0 without epsilon"
    advantages = grpo_math.group_relative_advantages(rewards, group_size=2)
    assert advantages[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),  # within the clip range
        (1.5, 2.0, -2.4),  # clipped at 1.2
        (0.5, 2.0, -1.0),  # a worse ratio is never clipped away
        (1.5, -2.0, 3.0),  # and neither is one that makes a bad token likelier
        (0.5, -2.0, 1.6),  # clipped at 0.8
    ],
)
def test_clipping(ratio: float, advantage: float, expected: float) -> None:
    loss = grpo_math.clipped_policy_loss(
        log_probs=math.log(ratio) * ONE,
        old_log_probs=0.0 * ONE,
        rollout_log_probs=0.0 * ONE,
        advantages=torch.tensor([advantage]),
        mask=ONE,
        token_count=COUNT,
        clip_ratio=0.2,
        importance_cap=2.0,
    )
    assert float(loss) == pytest.approx(expected)


@pytest.mark.parametrize(("weight", "expected"), [(0.5, -0.5), (1.5, -1.5), (4.0, -2.0)])
def test_importance_weight_is_truncated_and_has_no_gradient(weight: float, expected: float) -> None:
    log_probs = torch.zeros(1, 1, requires_grad=True)
    loss = grpo_math.clipped_policy_loss(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        rollout_log_probs=-math.log(weight) * ONE,
        advantages=torch.tensor([1.0]),
        mask=ONE,
        token_count=COUNT,
        clip_ratio=0.2,
        importance_cap=2.0,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert log_probs.grad is not None
    assert float(log_probs.grad) == pytest.approx(expected)


def test_padding_counts_for_nothing() -> None:
    """Padding is poisoned with infinities; the gradient must stay finite, too."""
    mask = torch.tensor([[1.0, 0.0]])
    log_probs = torch.tensor([[-1.0, -math.inf]], requires_grad=True)
    poisoned = torch.tensor([[-1.0, math.inf]])
    values = [
        grpo_math.clipped_policy_loss(
            log_probs, poisoned, poisoned, torch.tensor([1.0]), mask, COUNT, 0.2, 2.0
        ),
        grpo_math.reference_kl(log_probs, poisoned, mask, COUNT),
        grpo_math.gen_kl_error(log_probs, poisoned, mask),
        grpo_math.token_prob_error(log_probs, poisoned, mask),
    ]
    assert [value.item() for value in values] == pytest.approx([-1.0, 0.0, 0.0, 0.0])
    torch.stack(values[:2]).sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[-1.0, 0.0]]


def test_divergences_by_hand() -> None:
    policy, other = math.log(0.5) * ONE, math.log(0.25) * ONE
    # d = log(0.25) - log(0.5) = -log 2: exp(d) - d - 1 = log 2 - 1/2.
    kl = grpo_math.reference_kl(policy, other, ONE, COUNT)
    assert float(kl) == pytest.approx(math.log(2) - 0.5)
    # d = trainer - rollout = log 2: exp(d) - d - 1 = 1 - log 2.
    near = grpo_math.gen_kl_error(policy, policy + 1e-5, ONE)
    assert near.item() == pytest.approx(0.5e-10, rel=0.05), "half the squared difference"
    assert float(grpo_math.gen_kl_error(policy, other, ONE)) == pytest.approx(1 - math.log(2))
    assert float(grpo_math.token_prob_error(policy, other, ONE)) == pytest.approx(0.25)


def test_batch_positions_predict_the_response() -> None:
    batch = pack_rollouts(
        prompts=[[5, 6, 7], [8]],
        responses=[[1], [2, 3, 4]],
        log_probs=[[-0.1], [-0.2, -0.3, -0.4]],
        rewards=[1.0, 0.0],
    )
    assert batch.tokens.tolist() == [[5, 6, 7, 1], [8, 2, 3, 4]]
    assert batch.mask.tolist() == [[1, 0, 0], [1, 1, 1]]
    assert batch.positions.tolist() == [[2, 2, 2], [0, 1, 2]]
    assert batch.targets.tolist() == [[1, 1, 1], [2, 3, 4]]
    assert batch.select(torch.tensor([1])).tokens.tolist() == [[8, 2, 3, 4]]


def test_loss_of_later_updates_compares_with_the_first() -> None:
    """The second update's ratio is to the old log-probs, and its rows are found by their index."""
    batch = pack_rollouts([[1], [1]], [[2], [3]], [[-1.0], [-1.0]], [1.0, 0.0])
    advantages, count = torch.tensor([1.0, -1.0]), torch.tensor(2.0)
    config = GrpoConfig(model=Path("unused"), kl_coefficient=0.5)
    reference = torch.tensor([[-1.0], [-1.0 - math.log(2)]])
    old = torch.tensor([[-1.0], [-1.0]])
    now = torch.tensor([[-1.0 + math.log(1.1)]])  # of row 1 only

    first = grpo_loss(config, batch, advantages, count, None, None)
    assert first(now, torch.tensor([1])).item() == pytest.approx(1.1 / 2), "weight 1.1, ratio 1"
    later = grpo_loss(config, batch, advantages, count, None, old)
    assert later(now, torch.tensor([1])).item() == pytest.approx(1.1 / 2), "weight 1, ratio 1.1"
    far = torch.tensor([[-1.0 + math.log(1.5)]])
    assert later(far, torch.tensor([0])).item() == pytest.approx(-1.2 / 2), "clipped"

    with_kl = grpo_loss(config, batch, advantages, count, reference, old)
    kl = 1 / 2.2 + math.log(2.2) - 1
    expected = (1.1 + 0.5 * kl) / 2
    assert with_kl(now, torch.tensor([1])).item() == pytest.approx(expected)


def test_distinct_rows_expand_to_the_batch() -> None:
    """Rows that differ only in where the prompt ends, or in a token that is the pad, differ."""
    rows = [([5, 6], [7]), ([5], [6, 7]), ([5, 6], [7]), ([5], [6, 7, 0]), ([5], [6, 7])]
    batch = pack_rollouts(
        prompts=[prompt for prompt, _ in rows],
        responses=[response for _, response in rows],
        log_probs=[[0.0] * len(response) for _, response in rows],
        rewards=[0.0] * len(rows),
    )
    distinct, expand = batch.distinct()
    assert distinct.rows == 3
    for name in ("tokens", "prompt_lengths", "response_lengths"):
        assert torch.equal(getattr(distinct, name)[expand], getattr(batch, name))


def test_addition_keeps_held_out_pairs_out() -> None:
    task = Addition()
    held_out = set(task.held_out())
    generator = random.Random(0)
    assert len(held_out) == 20
    assert held_out.isdisjoint(task.sample(generator) for _ in range(1000))
    problem = Problem("Question: What is 3 + 4?\nAnswer:", "7")
    responses = {" 7": 1.0, " 7\n9": 1.0, " 70": 0.0, " is 9, not 7": 0.0, " seven": 0.0}
    assert {text: task.reward(problem, text) for text in responses} == responses


def test_letters_reward_is_the_share_of_letters() -> None:
    task = Letters()
    problem = Problem("1:", "")
    assert [task.reward(problem, text) for text in ("ab", "a1", "é", "")] == [1.0, 0.5, 0.0, 0.0]
