"""Comparing the engine's policy with the trainer's."""

from __future__ import annotations

from typing import Any

import torch
import trainer
from rig import Refitted

TOLERANCE = 1e-4
"""Float32 noise between Megatron's and vLLM's forward; adapters here move log-probs by over 1."""
PROMPTS = torch.randint(3, 259, (3, 40), generator=torch.Generator().manual_seed(11)).tolist()
"""Longer than a block of 32 tokens, so that the prefix cache would serve them again."""
NEW_TOKENS = 8


def disagreement(refitted: Refitted, request: Any = None) -> float:
    """Largest difference between the engine's and the trainer's log-probability of a token that
    the engine samples."""
    responses, engine = sample(refitted, request)
    policy = refitted.ranks.call(trainer.log_probs, PROMPTS, responses)[0]
    return distance(engine, policy)


def sample(refitted: Refitted, request: Any = None) -> tuple[list[list[int]], torch.Tensor]:
    """Sampled responses to PROMPTS and their log-probabilities, with a fixed seed."""
    from vllm import SamplingParams

    outputs = refitted.live.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True, seed=1),
        lora_request=request or refitted.engine.lora_request(),
        use_tqdm=False,
    )
    done = [output.outputs[0] for output in outputs]
    log_probs = [
        [step[token].logprob for step, token in zip(item.logprobs, item.token_ids, strict=True)]
        for item in done
    ]
    return [list(item.token_ids) for item in done], torch.tensor(log_probs, dtype=torch.float64)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
