"""Whole refits between processes on the stand-in driver, over every kind of shared memory.

The script part runs in a process of its own: forked ranks must not inherit a driver that is in use.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import stand_in
from cpu_as_gpu import pretend
from refit_processes import Setting, run

TRANSPORTS = {
    "auto": "CUDA IPC",
    "ipc": "CUDA IPC",
    "vmm": "CUDA VMM file descriptor",
    "host": "pinned host memory (memfd)",
}
REFITS = 53


@pytest.mark.parametrize(
    ("trainers", "memory"),
    [(1, "auto"), (2, "ipc"), (1, "vmm"), (2, "vmm"), (1, "host"), (3, "host")],
)
def test_refits_between_processes(trainers: int, memory: str) -> None:
    result = subprocess.run(
        [sys.executable, __file__, str(trainers), memory],
        env=stand_in.environment(PYTHONPATH=":".join(sys.path)),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout.strip())


def used_objects() -> int:
    return sum(stand_in.load().live().values())


def main(trainers: int, memory: str) -> None:
    setting = Setting(
        trainers,
        memory,
        REFITS,
        width=96 * trainers,
        place=lambda tensor: tensor,
        used=used_objects,
        within=pretend,
    )
    outcome = run(setting)
    assert outcome.transport == TRANSPORTS[memory], outcome
    assert outcome.pack_launches == [REFITS] * trainers, outcome
    assert outcome.scatter_launches == REFITS, outcome
    assert len(set(outcome.used)) == 1, f"objects of the driver come and go: {outcome.used}"
    print(f"{trainers} trainer ranks over {outcome.transport}: {REFITS} refits")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
