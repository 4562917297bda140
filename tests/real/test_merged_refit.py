"""Refits of merged weights from real Megatron ranks into real vLLM without LoRA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer
from parity import PROMPTS, TOLERANCE, disagreement, sample
from rig import MERGED_LLAMA_TP1, MERGED_QWEN_TP2, Refitted, on_engine


@on_engine(MERGED_LLAMA_TP1, MERGED_QWEN_TP2)
@pytest.mark.parametrize("trainer_tp", [1, 2])
@pytest.mark.parametrize("bucket_bytes", [100_000, 1 << 30], ids=["buckets", "whole"])
def test_the_engine_serves_the_trainers_policy(
    attach_merged: Callable[..., Refitted], trainer_tp: int, bucket_bytes: int
) -> None:
    refitted = attach_merged(trainer_tp, bucket_bytes=bucket_bytes)
    for version in (1, 2, 3):
        report = refitted.refit(version, seed=version)
        assert refitted.engine.lora_request() is None
        assert disagreement(refitted) < TOLERANCE
        assert refitted.attests(version)
        assert report.fidelity is not None
        print(report.buckets, report.peak_extra_bytes, report.fidelity.lost, report.phases_ms)
