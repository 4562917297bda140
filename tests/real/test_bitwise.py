"""Slots after a refit equal, byte for byte, the slots that vLLM's own loader fills from disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trainer
from mutants import MUTANTS
from rig import (
    LLAMA_TP1,
    LLAMA_TP2,
    LLAMA_TP3,
    QWEN_TP1,
    QWEN_TP2,
    QWEN_TP3,
    LiveEngine,
    Refitted,
    on_engine,
)

ORACLE_ID = 1
REFITS = 3
"""Two fill both slots and both arena halves; the third overwrites what a slot held before."""


@dataclass(frozen=True)
class PolicyCase:
    name: str
    trainer_tp: int
    settings: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-trainerTP{self.trainer_tp}"


POLICIES = (
    PolicyCase("r1", 1, {"lora_rank": 1, "lora_alpha": 3}),
    PolicyCase("r8", 2, {"lora_rank": 8, "lora_alpha": 12}),
    PolicyCase("r6", 3, {"lora_rank": 6, "lora_alpha": 20}),
)
CANONICAL = (
    *("linear_q", "linear_k", "linear_v", "linear_proj"),
    *("linear_fc1_gate", "linear_fc1_up", "linear_fc2"),
)
OTHER_POLICIES = (
    PolicyCase("r16-fills-the-slot", 2, {"lora_rank": 16, "lora_alpha": 24}),
    PolicyCase("sequence-parallel", 2, {"sequence_parallel": True}),
    PolicyCase("some-modules", 2, {"targets": ("linear_qkv", "linear_fc2")}),
    PolicyCase("canonical", 2, {"targets": CANONICAL}),
)


@on_engine(LLAMA_TP1, LLAMA_TP2, LLAMA_TP3, QWEN_TP1, QWEN_TP2, QWEN_TP3)
@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_slots_equal_vllms_loader(
    attach: Callable[..., Refitted], case: PolicyCase, tmp_path: Path
) -> None:
    """Every trainer TP against every engine TP, of two architectures, from fp32 parameters."""
    check_refits(attach(case.trainer_tp, **case.settings), tmp_path)


@on_engine(LLAMA_TP2)
@pytest.mark.parametrize("case", OTHER_POLICIES, ids=str)
def test_other_policies(attach: Callable[..., Refitted], case: PolicyCase, tmp_path: Path) -> None:
    """A rank without padding, sequence parallelism, some modules only, unfused projections."""
    check_refits(attach(case.trainer_tp, **case.settings), tmp_path)


@on_engine(LLAMA_TP2)
def test_scaling_once_is_within_one_unit_in_the_last_place(
    attach: Callable[..., Refitted], tmp_path: Path
) -> None:
    """scale_rounding="once" rounds another way than vLLM: seldom off, and never by more than 1 ulp."""
    refitted = attach(2, scale_rounding="once", lora_rank=6, lora_alpha=20)
    refitted.refit(1, seed=1)
    refitted.ranks.call(trainer.save, str(tmp_path))
    distances = []
    for found, expected in zip(
        refitted_slots(refitted), slots_by_vllm(refitted.live, tmp_path), strict=True
    ):
        for name, data in expected.items():
            apart = np.abs(bfloat16_steps(found[name]) - bfloat16_steps(data))
            if "lora_b" in name:
                distances.append(apart[bfloat16_steps(data) != 0])
            else:
                assert not apart.any()
    share = float((np.concatenate(distances) > 0).mean())
    furthest = int(np.concatenate(distances).max())
    print(f"scaled once: {share:.1%} of the elements of lora_B differ, by {furthest} ulp at most")
    assert furthest == 1
    assert share < 0.5


@on_engine(LLAMA_TP2)
def test_mutants_differ(attach: Callable[..., Refitted], tmp_path: Path) -> None:
    """Each wrong refit on one worker shows in the slots, and the right one after it does not."""
    refitted = attach(2)
    refitted.refit(1, seed=1)
    for version, mutant in enumerate(MUTANTS, start=2):
        for name in (mutant, ""):
            refitted.live.inspect.on(1, "mutate", name)
            refitted.refit(version, seed=version)
            path = tmp_path / f"{version}"
            refitted.ranks.call(trainer.save, str(path))
            wrong = differing(refitted_slots(refitted), slots_by_vllm(refitted.live, path))
            print(f"{name or 'unmutated'}: {len(wrong)} buffers differ")
            assert bool(wrong) == bool(name)
            assert all(line.startswith("worker 1:") for line in wrong)


def check_refits(refitted: Refitted, folder: Path) -> None:
    for version in range(1, REFITS + 1):
        refitted.refit(version, seed=version)
        path = folder / str(version)
        refitted.ranks.call(trainer.save, str(path))
        assert differing(refitted_slots(refitted), slots_by_vllm(refitted.live, path)) == []


def slots_by_vllm(live: LiveEngine, folder: Path) -> list[dict[str, bytes]]:
    """What vLLM makes of an adapter directory, in a slot of its own, by worker."""
    from vllm.lora.request import LoRARequest

    assert live.llm.llm_engine.add_lora(LoRARequest("oracle", ORACLE_ID, str(folder)))
    slots = live.inspect("slot_bytes", ORACLE_ID)
    assert live.llm.llm_engine.remove_lora(ORACLE_ID)
    return slots


def refitted_slots(refitted: Refitted) -> list[dict[str, bytes]]:
    return refitted.live.inspect("slot_bytes", refitted.engine.lora_request().lora_int_id)


def differing(found: list[dict[str, bytes]], expected: list[dict[str, bytes]]) -> list[str]:
    """The buffers that differ."""
    assert all(any(any(data) for data in slots.values()) for slots in expected)
    return [
        f"worker {worker}: {name}"
        for worker, (a, b) in enumerate(zip(found, expected, strict=True))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def bfloat16_steps(data: bytes) -> np.ndarray:
    """Numbers whose difference is the distance of bfloat16 values in units in the last place."""
    bits = np.frombuffer(data, np.int16).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFF), bits)
