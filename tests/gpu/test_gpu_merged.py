"""Merged mode between processes on the stand-in driver: every rank's base, adapter and ring, and the
worker's weights, lie in GPU memory."""

from __future__ import annotations

import pytest
from cpu_as_gpu import GPU, pretend
from fused_ranks import Case, refit
from helpers import run_ranks


@pytest.mark.parametrize(
    ("size", "dora", "bucket_bytes", "memory"),
    [(2, False, 3000, "ipc"), (3, False, 1 << 20, "vmm"), (2, True, 1 << 20, "host")],
)
def test_merged_weights_reach_a_worker_through_gpu_memory(
    size: int, dora: bool, bucket_bytes: int, memory: str
) -> None:
    case = Case(size, dora, bucket_bytes, memory, GPU, pretend)
    results = run_ranks(size + 1, lambda rank: refit(rank, case))
    worst = max(result.value for result in results)
    print(f"TP {size} over {memory}: relative error {worst:.1e}")
    assert worst < 1e-6
