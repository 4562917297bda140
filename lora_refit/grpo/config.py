"""Everything that a run depends on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_refit.grpo.tasks import TASKS
from lora_refit.testing.megatron import PolicyConfig

REFIT_MODES = ("adapter", "merged")


@dataclass(frozen=True)
class GrpoConfig:
    """A GRPO run. The defaults teach SmolLM2-135M to add on two CPU cores in a few minutes.

    model: a Hugging Face checkpoint. task: a name in `lora_refit.grpo.tasks.TASKS`.
    updates_per_batch: optimizer steps on each batch of rollouts.
    kl_coefficient: weight of the KL to the base model; 0 leaves the reference pass out.
    importance_cap: upper limit of the trainer / engine probability ratio.
    stop_reward: end early once the mean reward of three successive steps reaches it.
    engine_tensor_parallel, engine_threads: of vLLM; the trainer waits while it generates.
    trainer_threads: torch threads of each trainer rank; None shares the cores among the ranks.
    refit_mode: "adapter" serves the policy as LoRA, "merged" in the engine's own weights.
    """

    model: Path
    task: str = "addition"
    steps: int = 25
    prompts_per_step: int = 8
    samples_per_prompt: int = 8
    max_new_tokens: int = 5
    updates_per_batch: int = 1
    learning_rate: float = 5e-4
    max_grad_norm: float = 1.0
    clip_ratio: float = 0.2
    importance_cap: float = 2.0
    kl_coefficient: float = 0.0
    stop_reward: float | None = None
    seed: int = 0
    dtype: str = "float32"
    lora_rank: int = 8
    lora_alpha: int = 16
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    sequence_parallel: bool = False
    micro_batch_rows: int = 64
    trainer_threads: int | None = None
    engine_tensor_parallel: int = 1
    engine_threads: int = 2
    refit_mode: str = "adapter"

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"task {self.task!r}: choose one of {sorted(TASKS)}")
        if self.refit_mode not in REFIT_MODES:
            raise ValueError(f"refit_mode {self.refit_mode!r}: choose one of {REFIT_MODES}")
        if self.samples_per_prompt < 2:
            raise ValueError(
                f"samples_per_prompt={self.samples_per_prompt}: advantages compare the samples of "
                "one prompt, so there must be at least 2"
            )
        if self.updates_per_batch < 1:
            raise ValueError(f"updates_per_batch={self.updates_per_batch}: must be at least 1")

    @property
    def trainer_ranks(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def policy(self) -> PolicyConfig:
        return PolicyConfig(
            model=self.model,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            sequence_parallel=self.sequence_parallel,
            dtype=self.dtype,
            lora_rank=self.lora_rank,
            lora_alpha=self.lora_alpha,
        )
