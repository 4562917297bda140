"""Publisher(mode="merged") on forked ranks, down to the weights that a worker puts together."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fused_ranks import Case, FusedRank, refit
from fused_trainer import FusedTrainer
from helpers import run_ranks

from lora_refit import LayoutMismatch, Publisher, UnsupportedAdapter


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("size", "bucket_bytes"), [(1, 1 << 20), (2, 3000), (3, 1 << 20)])
def test_versions_reach_a_worker_of_another_process(
    size: int, bucket_bytes: int, dora: bool
) -> None:
    """Column and row parallel, three versions in a row, in one bucket and in many."""
    case = Case(size, dora, bucket_bytes)
    results = run_ranks(size + 1, lambda rank: refit(rank, case))
    worst = max(result.value for result in results)
    print(f"TP {size}: relative error {worst:.1e}")
    assert worst < 1e-6


def test_what_merged_mode_refuses_is_named_on_every_rank() -> None:
    def attempt(rank: int, **settings: Any) -> None:
        source = FusedRank(FusedTrainer(2, 6, torch.float32, torch.float32), rank)
        if settings.pop("quantised", False) and rank == 1:
            held = source.base_weights()
            weight = held[1].weight
            assert weight is not None
            held[1] = replace(held[1], weight=weight.to(torch.int8))
            source.base_weights = lambda: held  # type: ignore[method-assign]
        if settings.pop("alpha_pattern", False):
            config = source.config() | {"alpha_pattern": {"proj": 3}}
            source.config = lambda: config  # type: ignore[method-assign]
        if settings.pop("unknown", False):
            source.base_weights = list  # type: ignore[method-assign]
        Publisher(source, torch.float32, **({"mode": "merged"} | settings))

    for settings, error, message in (
        ({"mode": "both"}, UnsupportedAdapter, 'use "adapter" or "merged"'),
        ({"merge_rounding": "twice"}, UnsupportedAdapter, 'use "once" or "forward"'),
        ({"scale_rounding": "once"}, UnsupportedAdapter, "is of adapter mode"),
        ({"quantised": True}, UnsupportedAdapter, "o.out: its base weight is stored as torch.int8"),
        ({"unknown": True}, UnsupportedAdapter, "the source does not know its base weight"),
        ({"bucket_bytes": 100}, LayoutMismatch, "bucket_bytes=100 holds not one row"),
        ({"bucket_bytes": -1}, LayoutMismatch, "bucket_bytes=-1: give a number of bytes"),
        ({"bucket_bytes": 1e6}, LayoutMismatch, "bucket_bytes=1000000.0: give a number"),
        (
            {"alpha_pattern": True},
            UnsupportedAdapter,
            "alpha_pattern {'proj': 3}: merged mode needs",
        ),
    ):
        results = run_ranks(2, partial(attempt, **settings))
        for result in results:
            assert isinstance(result.error, error), result
            assert message in str(result.error)


def test_ranks_that_were_built_differently_say_so_together() -> None:
    def attempt(rank: int, settings: list[dict[str, Any]]) -> None:
        source = FusedRank(FusedTrainer(2, 6, torch.float32, torch.float32), rank)
        Publisher(source, torch.float32, **settings[rank])

    for settings in (
        [{"mode": "merged"}, {}],
        [{"mode": "merged"}, {"mode": "merged", "bucket_bytes": 5000}],
    ):
        results = run_ranks(2, partial(attempt, settings=settings))
        assert all(isinstance(result.error, LayoutMismatch) for result in results), results


def test_replicas_of_a_base_that_differ_are_named() -> None:
    """Two data-parallel ranks, of which one loaded another checkpoint."""

    def attempt(rank: int) -> None:
        trainer = FusedTrainer(1, 6, torch.float32, torch.float32, seed=0)
        if rank == 1:
            trainer.weights[0][2] *= 2
        Publisher(_Replica(trainer, 0), torch.float32, mode="merged")

    for result in run_ranks(2, attempt):
        assert isinstance(result.error, LayoutMismatch)
        assert "gate.weight: trainer rank 1 holds other base values" in str(result.error)


class _Replica(FusedRank):
    """Exports its own shards, which are whole."""

    def export(self) -> Any:
        yield from self.trainer.export([tensor for _, tensor in self.parameters()]).items()


def test_what_of_the_base_cannot_be_compared_is_in_the_spec() -> None:
    trainer = FusedTrainer(1, 6, torch.float32, torch.float32)
    trainer.weights[0][1][0, 0] = float("nan")
    source = _Replica(trainer, 0)
    held = source.base_weights()
    source.base_weights = lambda: held[:2]  # type: ignore[method-assign]
    with Publisher(source, torch.float32) as publisher:
        layout = publisher.spec.layout
    assert [sample.name for sample in layout.base] == [f"{name}.weight" for name in "qkv"]
    assert [gap.partition(": ")[0] for gap in layout.base_gaps] == [
        f"{name}.weight" for name in ("o", "gate", "up", "down")
    ]
    assert "not numbers" in layout.base_gaps[0]
    assert "does not know its base weight" in layout.base_gaps[1]


def test_a_publisher_that_is_dropped_leaves_no_thread() -> None:
    def serving() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "lora-refit-merge"]

    source = _Replica(FusedTrainer(1, 6, torch.float32, torch.float32), 0)
    publisher = Publisher(source, torch.float32, mode="merged", bucket_bytes=3000)
    publisher.publish(1)
    (thread,) = serving()
    del publisher
    gc.collect()
    thread.join(5)
    assert serving() == []
