"""The GRPO loop: publish, refit, roll out, update. Every trainer rank runs it; rank 0 has the engine.

The refit is the few lines around `publisher.publish` and `engine.refit`; everything else is GRPO.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict

import torch
import torch.distributed as dist

import lora_refit
from lora_refit.grpo import math
from lora_refit.grpo.batch import RolloutBatch, broadcast_rollouts
from lora_refit.grpo.config import GrpoConfig
from lora_refit.grpo.metrics import LearningMetrics, RunReport, StepMetrics
from lora_refit.grpo.policy import MegatronPolicy, TokenLoss
from lora_refit.grpo.rollout import RolloutEngine
from lora_refit.grpo.tasks import TASKS
from lora_refit.report import RefitReport

STOP_WINDOW = 3
"""Steps whose mean reward decides about stopping early."""


def train(
    config: GrpoConfig, on_step: Callable[[StepMetrics], None] | None = None
) -> RunReport | None:
    """Run GRPO. Collective over the `config.trainer_ranks` ranks of the default process group.

    Rank 0 also starts the vLLM engine, calls `on_step` after each step and returns the report;
    other ranks return None.
    """
    torch.set_num_threads(config.trainer_threads or _fair_threads())
    policy = MegatronPolicy(
        config.policy, config.learning_rate, config.max_grad_norm, config.micro_batch_rows
    )
    source = lora_refit.MegatronSource(policy.chunks, bridge=policy.bridge)
    dtype = getattr(torch, config.dtype)
    with lora_refit.Publisher(source, dtype, mode=config.refit_mode) as publisher:
        loop = _Loop(config, policy, publisher)
        try:
            return loop.run(on_step)
        finally:
            loop.close()


class _Loop:
    def __init__(
        self, config: GrpoConfig, policy: MegatronPolicy, publisher: lora_refit.Publisher
    ) -> None:
        self._config = config
        self._policy = policy
        self._publisher = publisher
        self._task = TASKS[config.task]
        self._problems = random.Random(config.seed)
        self._device = next(policy.chunks[0].parameters()).device
        # Only rank 0 talks to the engine.
        self._engine = (
            RolloutEngine(config, self._task, publisher.spec) if dist.get_rank() == 0 else None
        )
        # Ranks publish together, and starting an engine takes longer than they wait for each other.
        dist.barrier()

    def run(self, on_step: Callable[[StepMetrics], None] | None) -> RunReport | None:
        config = self._config
        history: list[StepMetrics] = []
        rewards: list[float] = []
        self._refit(version=0)
        before = self._engine.held_out_reward() if self._engine else 0.0
        for step in range(config.steps):
            reward, metrics = self._step(step)
            rewards.append(reward)
            if metrics is not None:
                history.append(metrics)
                if on_step is not None:
                    on_step(metrics)
            if _reached(rewards, config.stop_reward):
                break
        self._refit(version=len(rewards))
        if self._engine is None:
            return None
        return RunReport(tuple(history), before, self._engine.held_out_reward())

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _refit(self, version: int) -> RefitReport | None:
        """Bring the engine to the trainer's current policy. Every rank publishes its shards."""
        ticket = self._publisher.publish(version)
        return self._engine.refit(ticket) if self._engine else None

    def _step(self, step: int) -> tuple[float, StepMetrics | None]:
        """One GRPO step. Returns its mean reward, and on rank 0 its metrics."""
        started = time.perf_counter()
        refit = self._refit(version=step)
        refitted = time.perf_counter()
        batch = broadcast_rollouts(self._roll_out(step), self._device)
        rolled_out = time.perf_counter()
        learned = self._learn(batch)
        finished = time.perf_counter()

        reward = batch.rewards.mean().item()
        if refit is None:
            return reward, None
        return reward, StepMetrics(
            step=step,
            version=refit.version,
            reward=reward,
            refit_bytes=refit.bytes,
            refit_ms=dict(refit.phases_ms),
            refit_s=refitted - started,
            rollout_s=rolled_out - refitted,
            train_s=finished - rolled_out,
            step_s=finished - started,
            **asdict(learned),
        )

    def _roll_out(self, step: int) -> RolloutBatch | None:
        if self._engine is None:
            return None
        count = self._config.prompts_per_step
        problems = [self._task.sample(self._problems) for _ in range(count)]
        return self._engine.sample(problems, seed=(self._config.seed * 1_000 + step) * count)

    def _learn(self, batch: RolloutBatch) -> LearningMetrics:
        """Update the policy on the rows that carry a learning signal."""
        config = self._config
        advantages = math.group_relative_advantages(batch.rewards, config.samples_per_prompt)
        token_count = batch.mask.sum()
        rows = advantages.nonzero()[:, 0]
        if not len(rows):  # every group agrees; still measure how far trainer and engine differ
            rows = torch.arange(config.samples_per_prompt, device=batch.tokens.device)
        part, advantages = batch.select(rows), advantages[rows]

        reference = self._policy.reference_log_probs(part) if config.kl_coefficient else None
        old_log_probs: torch.Tensor | None = None
        for _ in range(config.updates_per_batch):
            loss = grpo_loss(config, part, advantages, token_count, reference, old_log_probs)
            report = self._policy.update(part, loss)
            if old_log_probs is None:
                old_log_probs = report.log_probs
        assert old_log_probs is not None
        sampled = old_log_probs, part.rollout_log_probs, part.mask
        kl = 0.0
        if reference is not None:
            kl = math.reference_kl(old_log_probs, reference, part.mask, part.mask.sum()).item()
        return LearningMetrics(
            loss=report.loss,
            kl=kl,
            grad_norm=report.grad_norm,
            gen_kl_error=math.gen_kl_error(*sampled).item(),
            token_prob_error=math.token_prob_error(*sampled).item(),
            trained_rows=part.rows,
        )


def grpo_loss(
    config: GrpoConfig,
    batch: RolloutBatch,
    advantages: torch.Tensor,
    token_count: torch.Tensor,
    reference_log_probs: torch.Tensor | None,
    old_log_probs: torch.Tensor | None,
) -> TokenLoss:
    """GRPO's loss as a function of a micro-batch's log-probs.

    old_log_probs: of the policy before the first update on this batch; None in that first update,
    where they are the log-probs themselves.
    """
    mask = batch.mask

    def loss(log_probs: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        old = log_probs.detach() if old_log_probs is None else old_log_probs[rows]
        total = math.clipped_policy_loss(
            log_probs,
            old,
            batch.rollout_log_probs[rows],
            advantages[rows],
            mask[rows],
            token_count,
            config.clip_ratio,
            config.importance_cap,
        )
        if reference_log_probs is not None:
            reference = reference_log_probs[rows]
            kl = math.reference_kl(log_probs, reference, mask[rows], token_count)
            total = total + config.kl_coefficient * kl
        return total

    return loss


def _reached(rewards: list[float], stop_reward: float | None) -> bool:
    window = rewards[-STOP_WINDOW:]
    return (
        stop_reward is not None
        and len(window) == STOP_WINDOW
        and sum(window) / STOP_WINDOW >= stop_reward
    )


def _fair_threads() -> int:
    """The cores of this machine, shared among the trainer ranks."""
    return max(1, len(os.sched_getaffinity(0)) // dist.get_world_size())
