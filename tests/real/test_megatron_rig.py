"""The test rig itself: Megatron on CPU ranks computes what Hugging Face computes.

Everything else that uses real Megatron ranks leans on this.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from lora_refit.testing import megatron
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.models import tiny_model
from lora_refit.testing.ranks import RankError, TrainerRanks

RANK, ALPHA = 6, 12
TOLERANCE = 2e-5
"""Float32 noise on logits of magnitude one; the adapter moves them by more than 0.1."""

TOPOLOGIES = {
    "tp1": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "tp3": {"tensor_parallel": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("rig") / "qwen3")


@pytest.fixture(scope="module")
def token_ids() -> torch.Tensor:
    return torch.randint(3, 259, (3, 12), generator=torch.Generator().manual_seed(1))


def build(state: dict[str, Any], config: PolicyConfig) -> None:
    state["policy"] = megatron.build_policy(config)


def randomize(state: dict[str, Any], seed: int) -> None:
    megatron.randomize_adapters(state["policy"].chunks, seed, std=0.2)


@torch.no_grad()
def logits(state: dict[str, Any], token_ids: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    rows, length = token_ids.shape
    positions = torch.arange(length).expand(rows, -1)
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    (chunk,) = state["policy"].chunks
    return gather_from_tensor_model_parallel_region(chunk(token_ids, positions, hidden))


def export_adapter(state: dict[str, Any], base: str, folder: str) -> None:
    policy = state["policy"]
    policy.bridge.save_hf_adapter(
        policy.chunks,
        folder,
        peft_config=policy.peft,
        base_model_name_or_path=base,
        show_progress=False,
    )


def huggingface_logits(
    checkpoint: Path, adapter: Path | None, token_ids: torch.Tensor
) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(token_ids).logits


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_logits_equal_huggingface(
    topology: str, checkpoint: Path, token_ids: torch.Tensor, tmp_path: Path
) -> None:
    """Base logits, and logits with a random adapter loaded by PEFT from Bridge's own export."""
    config = PolicyConfig(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, **TOPOLOGIES[topology])
    base = huggingface_logits(checkpoint, None, token_ids)
    with TrainerRanks(config.tensor_parallel) as ranks:
        ranks.call(build, config)
        untouched = ranks.call(logits, token_ids)
        ranks.call(randomize, 7)
        adapted = ranks.call(logits, token_ids)
        ranks.call(export_adapter, str(checkpoint), str(tmp_path))
    expected = huggingface_logits(checkpoint, tmp_path, token_ids)
    assert (expected - base).abs().max() > 0.1
    for rank in range(config.tensor_parallel):
        torch.testing.assert_close(untouched[rank], base, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(adapted[rank], expected, atol=TOLERANCE, rtol=0)


def test_random_adapter_is_the_same_at_every_topology(
    checkpoint: Path, token_ids: torch.Tensor
) -> None:
    results = {}
    for name, topology in TOPOLOGIES.items():
        config = PolicyConfig(checkpoint, lora_rank=RANK, lora_alpha=ALPHA, **topology)
        with TrainerRanks(config.tensor_parallel) as ranks:
            ranks.call(build, config)
            ranks.call(randomize, 7)
            results[name] = ranks.call(logits, token_ids)[0]
    for name, result in results.items():
        torch.testing.assert_close(
            result, results["tp1"], atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def fail_on(state: dict[str, Any], rank: int) -> int:
    if torch.distributed.get_rank() == rank:
        raise ValueError("told to")
    torch.distributed.barrier()
    return rank


def collective_sum(state: dict[str, Any]) -> float:
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return float(total)


def test_a_failing_or_dead_rank_is_named() -> None:
    with TrainerRanks(2) as ranks:
        assert ranks.call(collective_sum) == [2.0, 2.0]
        with pytest.raises(RankError, match=r"trainer rank 1: fail_on raised(.|\n)*told to"):
            ranks.call(fail_on, 1)
    with TrainerRanks(2) as ranks:
        pid = ranks.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match=f"rank 1: process {pid} died in collective_sum"):
            ranks.call(collective_sum)
