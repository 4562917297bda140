"""Rollouts: a vLLM engine that is refitted each step and samples from the live version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lora_refit.grpo.batch import RolloutBatch, pack_rollouts
from lora_refit.grpo.config import GrpoConfig
from lora_refit.grpo.tasks import Problem, Task
from lora_refit.report import AttachReport, RefitReport
from lora_refit.spec import Spec, Ticket


class RolloutEngine:
    """vLLM in processes of its own, attached to the trainer's adapter."""

    def __init__(self, config: GrpoConfig, task: Task, spec: Spec) -> None:
        from lora_refit.vllm import RefitEngine

        self._config = config
        self._task = task
        self._llm = _start_vllm(config)
        self._tokenizer = self._llm.get_tokenizer()
        self._engine = RefitEngine(self._llm, adapter="policy")
        self.attach_report: AttachReport = self._engine.attach(spec)

    def refit(self, ticket: Ticket) -> RefitReport:
        """Make the published version live."""
        return self._engine.refit(ticket)

    def sample(self, problems: Sequence[Problem], seed: int) -> RolloutBatch:
        """`samples_per_prompt` responses to each problem at temperature 1, scored by the task."""
        from vllm import SamplingParams

        settings = [
            SamplingParams(
                n=self._config.samples_per_prompt,
                temperature=1.0,
                max_tokens=self._config.max_new_tokens,
                logprobs=0,  # of the sampled token only
                seed=seed + index,
            )
            for index in range(len(problems))
        ]
        prompts: list[list[int]] = []
        responses: list[list[int]] = []
        log_probs: list[list[float]] = []
        rewards: list[float] = []
        for problem, result in zip(problems, self._generate(problems, settings), strict=True):
            for output in result.outputs:
                tokens = list(output.token_ids)
                prompts.append(list(result.prompt_token_ids))
                responses.append(tokens)
                log_probs.append(
                    [
                        choices[token].logprob
                        for choices, token in zip(output.logprobs, tokens, strict=True)
                    ]
                )
                rewards.append(self._task.reward(problem, output.text))
        return pack_rollouts(prompts, responses, log_probs, rewards)

    def held_out_reward(self) -> float:
        """Mean reward of greedy responses to the held-out problems."""
        from vllm import SamplingParams

        problems = self._task.held_out()
        settings = SamplingParams(temperature=0.0, max_tokens=self._config.max_new_tokens)
        results = self._generate(problems, settings)
        rewards = [
            self._task.reward(problem, result.outputs[0].text)
            for problem, result in zip(problems, results, strict=True)
        ]
        return sum(rewards) / len(rewards)

    def close(self) -> None:
        """Detach and end the engine."""
        from lora_refit.testing.engine import shutdown

        self._engine.close()
        shutdown(self._llm)

    def _generate(self, problems: Sequence[Problem], settings: Any) -> list[Any]:
        prompts = [
            {"prompt_token_ids": self._tokenizer.encode(problem.prompt)} for problem in problems
        ]
        results: list[Any] = self._llm.generate(
            prompts, settings, lora_request=self._engine.lora_request(), use_tqdm=False
        )
        return results


def _mode_settings(config: GrpoConfig) -> dict[str, Any]:
    """How an engine is started for a mode of refits."""
    if config.refit_mode == "merged":
        return {"enable_lora": False, "weight_transfer_config": {"backend": "lora_refit"}}
    rank = _engine_lora_rank(config.lora_rank)
    return {"enable_lora": True, "max_loras": 2, "max_lora_rank": rank}


def _start_vllm(config: GrpoConfig) -> Any:
    rows = config.prompts_per_step * config.samples_per_prompt
    settings: dict[str, Any] = {
        "max_num_seqs": rows,
        "max_model_len": 256,
        **_mode_settings(config),
    }
    if torch.cuda.is_available():
        from vllm import LLM

        return LLM(
            model=str(config.model),
            dtype=config.dtype,
            tensor_parallel_size=config.engine_tensor_parallel,
            worker_extension_cls="lora_refit.vllm.WorkerExtension",
            gpu_memory_utilization=0.4,  # the trainer shares the device
            **settings,
        )
    from lora_refit.testing.engine import cpu_llm

    return cpu_llm(
        config.model,
        dtype=config.dtype,
        tensor_parallel=config.engine_tensor_parallel,
        threads=config.engine_threads,
        kv_cache_memory_bytes=512 << 20,
        **settings,
    )


def _engine_lora_rank(rank: int) -> int:
    """vLLM takes `max_lora_rank` from a fixed list."""
    return next(allowed for allowed in (1, 8, 16, 32, 64, 128, 256, 320, 512) if allowed >= rank)
