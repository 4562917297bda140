"""The arithmetic of GRPO on token log-probabilities: pure functions of tensors.

`mask` is 1 for response tokens and 0 for padding; it and all log-probabilities are `[rows, tokens]`.
Sums are divided by `token_count`, the number of response tokens of the whole batch, so that
micro-batches add up to the batch.
"""

from __future__ import annotations

import torch


def group_relative_advantages(
    rewards: torch.Tensor, group_size: int, epsilon: float = 1e-4
) -> torch.Tensor:
    """(reward - group mean) / (group standard deviation + epsilon), for groups of successive rows.

    rewards: `[rows]`, rows a multiple of `group_size` (at least 2). Returns `[rows]`.
    Source: GRPO, DeepSeekMath (arXiv 2402.03300), section 4.1.
    """
    groups = rewards.reshape(-1, group_size)
    centered = groups - groups.mean(dim=1, keepdim=True)
    return (centered / (groups.std(dim=1, keepdim=True) + epsilon)).reshape(-1)


def clipped_policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    token_count: torch.Tensor,
    clip_ratio: float,
    importance_cap: float,
) -> torch.Tensor:
    """PPO's clipped objective with truncated importance sampling against the rollout engine.

    log_probs: of the policy that is trained (with gradient). old_log_probs: of the trainer's policy
    at the start of this step. rollout_log_probs: as the engine sampled. advantages: `[rows]`.

    Each token's loss is weighted by min(exp(old - rollout), importance_cap), which corrects the
    difference between engine and trainer. Returns a scalar to be minimised.
    """
    log_probs, old_log_probs, rollout_log_probs = _without_padding(
        mask, log_probs, old_log_probs, rollout_log_probs
    )
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    per_row = advantages[:, None]
    surrogate = torch.minimum(ratio * per_row, clipped * per_row)
    weight = torch.exp(old_log_probs - rollout_log_probs).clamp(max=importance_cap).detach()
    return -(weight * surrogate * mask).sum() / token_count


def reference_kl(
    log_probs: torch.Tensor,
    reference_log_probs: torch.Tensor,
    mask: torch.Tensor,
    token_count: torch.Tensor,
) -> torch.Tensor:
    """Mean of the k3 estimator of KL(policy || reference): exp(d) - d - 1, d = reference - policy.

    Source: J. Schulman, "Approximating KL divergence". Never negative. Returns a scalar.
    """
    policy, reference = _without_padding(mask, log_probs, reference_log_probs)
    return _k3(reference - policy).sum() / token_count


def gen_kl_error(
    trainer_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Mean k3 estimate of KL(rollout || trainer): NeMo RL's metric of the same name.

    Zero if engine and trainer give every sampled token the same probability.
    """
    trainer, rollout = _without_padding(mask, trainer_log_probs, rollout_log_probs)
    # In double precision: the square of a small difference vanishes beside 1.
    return _k3(trainer.double() - rollout.double()).sum() / mask.sum()


def token_prob_error(
    trainer_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Mean |p_trainer - p_rollout| over the sampled tokens, in probability."""
    trainer, rollout = _without_padding(mask, trainer_log_probs, rollout_log_probs)
    return (trainer.exp() - rollout.exp()).abs().sum() / mask.sum()


def _k3(difference: torch.Tensor) -> torch.Tensor:
    return torch.expm1(difference) - difference


def _without_padding(mask: torch.Tensor, *log_probs: torch.Tensor) -> list[torch.Tensor]:
    """Zero where the mask is zero: padding may hold anything, also infinities.

    It is replaced before anything is computed from it, because the gradient of a function at
    infinity is no number even if its result is dropped.
    """
    return [torch.where(mask > 0, values, torch.zeros_like(values)) for values in log_probs]
