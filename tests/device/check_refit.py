"""200 refits between real processes on one GPU, over every kind of shared memory."""

from __future__ import annotations

import pytest
import torch
from refit_processes import DEVICE, Setting, run

REFITS = 200


def place(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def used_bytes() -> int:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return total - free


@pytest.mark.parametrize("memory", ["ipc", "vmm", "host"])
@pytest.mark.parametrize("trainers", [1, 2, 4])
def test_refits_between_processes(trainers: int, memory: str) -> None:
    outcome = run(Setting(trainers, memory, REFITS, 4096, place, used_bytes))
    print(f"{trainers} trainer ranks over {outcome.transport}: {REFITS} refits")
    assert outcome.pack_launches == [REFITS] * trainers
    assert outcome.scatter_launches == REFITS
    drift = max(outcome.used) - min(outcome.used)
    assert drift < 8 << 20, f"GPU memory in use moved by {drift} bytes over {REFITS} refits"
