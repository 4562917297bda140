"""Merged mode between processes on the stand-in driver: every rank's base, adapter and ring, and the
worker's weights, lie in GPU memory.

The script part runs in a process of its own: forked ranks must not inherit a driver that is in use.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import stand_in
from cpu_as_gpu import GPU, pretend
from fused_ranks import Case, refit
from helpers import run_ranks


@pytest.mark.parametrize(
    ("size", "kind", "bucket_bytes", "memory"),
    [(2, "lora", 3000, "ipc"), (3, "lora", 1 << 20, "vmm"), (2, "dora", 1 << 20, "host")],
)
def test_merged_weights_reach_a_worker_through_gpu_memory(
    size: int, kind: str, bucket_bytes: int, memory: str
) -> None:
    result = subprocess.run(
        [sys.executable, __file__, str(size), kind, str(bucket_bytes), memory],
        env=stand_in.environment(PYTHONPATH=":".join(sys.path)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout.strip())


def main(size: int, kind: str, bucket_bytes: int, memory: str) -> None:
    case = Case(size, kind == "dora", bucket_bytes, memory, GPU, pretend)
    results = run_ranks(size + 1, lambda rank: refit(rank, case))
    worst = max(result.value for result in results)
    print(f"{kind} at TP {size} over {memory}: relative error {worst:.1e}")
    assert worst < 1e-6


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
