"""The CPU engine against Hugging Face with PEFT, and the ways it is started and ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import peft
import psutil
import pytest
import torch
import transformers

from lora_refit.testing.engine import cpu_llm, shutdown
from lora_refit.testing.engine_processes import EngineCoreContext

PROMPTS = ([5, 9, 200, 31], list(range(40, 110)), [17])
NEW_TOKENS = 8
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapter(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PEFT directory of rank 8 on every linear layer, with random A and B."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny())
    config = peft.LoraConfig(r=8, lora_alpha=24, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.2, generator=generator)
    path = tmp_path_factory.mktemp("adapter")
    adapted.save_pretrained(str(path))
    return path


def rollout(llm: Any, adapter: Path | None) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and the log-probability that the engine gave each."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0, max_tokens=NEW_TOKENS, logprobs=0, ignore_eos=True),
        lora_request=LoRARequest("adapter", 1, str(adapter)) if adapter else None,
        use_tqdm=False,
    )
    completions = [output.outputs[0] for output in outputs]
    return [
        (list(done.token_ids), [next(iter(step.values())).logprob for step in done.logprobs])
        for done in completions
    ]


def reference_log_probs(model: Any, tokens: list[list[int]]) -> list[list[float]]:
    scores = []
    for prompt, response in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        chosen = torch.tensor(response)[:, None]
        scores.append(logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist())
    return scores


def difference(actual: list[list[float]], expected: list[list[float]]) -> float:
    pairs = zip(chain.from_iterable(actual), chain.from_iterable(expected), strict=True)
    return max(abs(a - b) for a, b in pairs)


def rollout_in_process(model: Path, adapter: Path, result: Path) -> None:
    llm = cpu_llm(model, in_process=True)
    lengths = [len(tokens) for tokens, _ in rollout(llm, adapter)]
    shutdown(llm)
    if not torch.distributed.is_initialized():
        result.write_text(str(lengths))


def descendants() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize("tensor_parallel", [1, 2, 3])
def test_log_probs_equal_peft(
    tiny: Callable[..., Path], adapter: Path, tensor_parallel: int
) -> None:
    llm = cpu_llm(tiny(), tensor_parallel=tensor_parallel)
    try:
        rollouts = rollout(llm, adapter)
    finally:
        shutdown(llm)
    tokens, log_probs = [list(part) for part in zip(*rollouts, strict=True)]
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny())
    without_adapter = reference_log_probs(base, tokens)
    adapted = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    error = difference(log_probs, reference_log_probs(adapted, tokens))
    control = difference(log_probs, without_adapter)
    print(f"TP {tensor_parallel}: max |dlogp| {error:.1e}; against the bare model {control:.1e}")
    assert error < TOLERANCE
    assert control > 100 * TOLERANCE


def test_engine_of_a_process_that_is_in_a_process_group(
    tiny: Callable[..., Path], adapter: Path, tmp_path: Path
) -> None:
    """A trainer rank may own the engine: neither sees the other's process group."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        before = descendants()
        llm = cpu_llm(tiny())
        started = descendants() - before
        tokens = [response for response, _ in rollout(llm, adapter)]
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        shutdown(llm)
    finally:
        torch.distributed.destroy_process_group()
    print(f"processes started: {len(started)}, left after shutdown: {len(descendants() - before)}")
    assert [len(response) for response in tokens] == [NEW_TOKENS] * len(PROMPTS)
    assert total.item() == 1
    assert len(started) == 2
    assert descendants() <= before


def test_shutdown_ends_a_worker_that_hangs(tiny: Callable[..., Path]) -> None:
    before = descendants()
    llm = cpu_llm(tiny())
    _core, worker = sorted(descendants() - before)
    os.kill(worker, signal.SIGSTOP)
    shutdown(llm)
    assert descendants() <= before


def test_in_process_engine(tiny: Callable[..., Path], adapter: Path, tmp_path: Path) -> None:
    """In a child, because vLLM patches torch where it runs."""
    child = EngineCoreContext().Process(
        target=rollout_in_process, args=(tiny(), adapter, tmp_path / "tokens")
    )
    child.start()
    child.join()
    assert child.exitcode == 0
    assert (tmp_path / "tokens").read_text() == "[8, 8, 8]"


def test_tensor_parallel_in_process_is_refused(tiny: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="tensor_parallel=2"):
        cpu_llm(tiny(), tensor_parallel=2, in_process=True)
