"""Refit after refit: one launch, no collective, no allocation, and nothing that grows."""

from __future__ import annotations

from collections.abc import Callable

import trainer
from parity import TOLERANCE, disagreement, sample
from rig import LLAMA_TP1, QWEN_TP2, Refitted, on_engine

WARM_UP = 30
SLACK_BYTES = 1 << 20
"""For the allocators' own habits; 500 refits that leak 2 KiB each exceed it."""


@on_engine(LLAMA_TP1)
def test_500_refits_on_one_worker(attach: Callable[..., Refitted]) -> None:
    check_steady_state(attach(1), refits=500)


@on_engine(QWEN_TP2)
def test_100_refits_on_two_workers(attach: Callable[..., Refitted]) -> None:
    check_steady_state(attach(2), refits=100)


def check_steady_state(refitted: Refitted, refits: int) -> None:
    for version in range(WARM_UP):
        refitted.refit(version, seed=version)
    before = resources(refitted)
    for version in range(WARM_UP, WARM_UP + refits):
        # New values now and then: they take longer to draw than to refit.
        report = refitted.refit(version, seed=version if version % 50 == 0 else None)
        assert (report.launches, report.collectives, report.allocations) == (1, 0, 0)
    after = resources(refitted)
    for name in before:
        growth = after[name]["rss"] - before[name]["rss"]
        print(f"{name}: {growth >> 10} KiB in {refits} refits, {after[name]['fds']} descriptors")
        assert growth < SLACK_BYTES
        assert after[name]["fds"] == before[name]["fds"]
    assert set(refitted.ranks.call(trainer.launches)) == {WARM_UP + refits}
    assert refitted.engine.attest().ok
    assert disagreement(refitted) < TOLERANCE


def resources(refitted: Refitted) -> dict[str, dict[str, int]]:
    trainers = refitted.ranks.call(trainer.resources)
    workers = refitted.live.inspect("resources")
    return {
        "driver": trainer.resources({}),
        **{f"trainer rank {rank}": item for rank, item in enumerate(trainers)},
        **{f"engine worker {rank}": item for rank, item in enumerate(workers)},
    }


@on_engine(QWEN_TP2)
def test_no_collective_is_called(attach: Callable[..., Refitted]) -> None:
    """Counted in torch's dispatcher; control: exporting and generating are seen to use some."""
    refitted = attach(2)
    refitted.ranks.call(trainer.start_counting)
    refitted.live.inspect("start_counting")
    for version in range(3):
        refitted.refit(version)
    assert refitted.engine.attest().ok
    assert refitted.ranks.call(trainer.stop_counting) == [0, 0]
    assert refitted.live.inspect("stop_counting") == [0, 0]

    refitted.ranks.call(trainer.start_counting)
    refitted.live.inspect("start_counting")
    refitted.ranks.call(trainer.export)
    sample(refitted)
    counts = refitted.ranks.call(trainer.stop_counting), refitted.live.inspect("stop_counting")
    print(f"collectives of one export and one generate, by rank and worker: {counts}")
    assert min(counts[0]) > 0
    assert min(counts[1]) > 0
