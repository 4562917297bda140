"""What a run reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningMetrics:
    """What the update of one step saw.

    gen_kl_error, token_prob_error: disagreement of trainer and engine about the sampled tokens
    before the update, see `lora_refit.grpo.math`. kl: to the base model, 0 without reference.
    trained_rows: rows with a learning signal.
    """

    loss: float
    kl: float
    grad_norm: float
    gen_kl_error: float
    token_prob_error: float
    trained_rows: int


@dataclass(frozen=True, kw_only=True)
class StepMetrics(LearningMetrics):
    """One step.

    version: the policy version that sampled this step's rollouts. reward: mean over the batch.
    refit_ms: the phases of the refit in milliseconds, see `lora_refit.RefitReport`.
    Times are wall-clock seconds; refit_s runs from publish to the version being live.
    """

    step: int
    version: int
    reward: float
    refit_bytes: int
    refit_ms: dict[str, float]
    refit_s: float
    rollout_s: float
    train_s: float
    step_s: float

    @property
    def refit_share(self) -> float:
        """Refit time as a part of the step time."""
        return self.refit_s / self.step_s


@dataclass(frozen=True)
class RunReport:
    """A whole run. Held-out rewards are those of greedy decoding."""

    steps: tuple[StepMetrics, ...]
    held_out_before: float
    held_out_after: float
