"""Real Megatron ranks and real vLLM workers on the CUDA backend; only the GPU is a stand-in.

The kernels are the product's, run by the emulator; arenas travel through CUDA IPC, file descriptors
or pinned host memory between the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trainer
from rig import LLAMA_TP2_GPU, Refitted, on_engine
from test_bitwise import REFITS, differing, refitted_slots, slots_by_vllm

from lora_refit.testing.ranks import TrainerRanks

TRANSPORTS = {
    "auto": "CUDA IPC",
    "vmm": "CUDA VMM file descriptor",
    "host": "pinned host memory (memfd)",
}


@pytest.fixture(scope="module")
def gpu_ranks() -> Iterator[TrainerRanks]:
    """Two trainer ranks whose adapters pass for GPU memory."""
    with TrainerRanks(2, timeout_s=120.0) as ranks:
        ranks.call(trainer.pretend_gpu)
        yield ranks


@on_engine(LLAMA_TP2_GPU)
@pytest.mark.parametrize("memory", TRANSPORTS)
def test_slots_equal_vllms_loader(
    attach: Callable[..., Refitted], gpu_ranks: TrainerRanks, memory: str, tmp_path: Path
) -> None:
    refitted = attach(2, ranks=gpu_ranks, memory=memory)
    print(f"two ranks to two workers over {refitted.report.transport}")
    assert set(refitted.report.transport) == {TRANSPORTS[memory]}
    for version in range(1, REFITS + 1):
        report = refitted.refit(version, seed=version)
        assert report.launches == 1
        gpu_ranks.call(trainer.save, str(tmp_path / str(version)))
        expected = slots_by_vllm(refitted.live, tmp_path / str(version))
        assert differing(refitted_slots(refitted), expected) == []
        assert refitted.attests(version)


@on_engine(LLAMA_TP2_GPU)
def test_a_refit_is_one_launch_and_no_allocation(
    attach: Callable[..., Refitted], gpu_ranks: TrainerRanks
) -> None:
    """Of a worker's driver calls in the steady state, two launch: the check of what was published,
    and the scatter. None allocates, opens or maps."""
    refitted = attach(2, ranks=gpu_ranks)
    for version in range(1, 6):
        refitted.live.inspect("driver_calls")
        refitted.refit(version, seed=version)
    for calls in refitted.live.inspect("driver_calls"):
        print(" ".join(calls))
        assert calls.count("cuLaunchKernel") == 2
        forbidden = ("Alloc", "Open", "Map", "Create", "Register", "Load")
        assert not [call for call in calls if any(word in call for word in forbidden)]
