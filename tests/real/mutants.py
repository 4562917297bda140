"""Refits that are wrong on purpose, to show that the tests would notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import weight_inspections

from lora_refit.engines.vllm.extension import state_of
from lora_refit.engines.vllm.worker import Attached
from lora_refit.plan import Plan
from lora_refit.testing.worker import InspectableWorkerExtension


class MutantWorkerExtension(InspectableWorkerExtension):
    """Adds the inspection "mutate", without which a worker refits as it should, and those of its
    model's weights."""

    def lora_refit_inspections(self) -> dict[str, Callable[..., Any]]:
        return (
            super().lora_refit_inspections() | {"mutate": mutate} | weight_inspections.INSPECTIONS
        )


def mutate(worker: Any, mutant: str) -> None:
    """Make this worker's refits wrong in one way; "" makes them right again."""
    attached = state_of(worker)._attached
    attached.kernel = attached.plan.kernel()
    if mutant:
        MUTANTS[mutant](attached)


class _ReadsTheOtherHalf:
    """A copy kernel that is given the half after the one that was checked."""

    def __init__(self, attached: Attached) -> None:
        self._kernel = attached.kernel
        self._arenas = attached.arenas

    def run(self, sources: Any, destinations: Any) -> Any:
        other = self._arenas._by_half[1 - self._arenas._pinned_half]
        return self._kernel.run(other, destinations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _read_other_half(attached: Attached) -> None:
    attached.kernel = _ReadsTheOtherHalf(attached)


def _with_blocks(blocks: Callable[[Attached], Any]) -> Callable[[Attached], None]:
    def apply(attached: Attached) -> None:
        plan = attached.plan
        mutated = Plan(plan.format, plan.sources, plan.destinations, blocks(attached).tobytes())
        attached.kernel = mutated.kernel()

    return apply


def _drop_block(attached: Attached) -> Any:
    return np.delete(attached.plan.blocks, len(attached.plan.blocks) // 2)


def _double_scale(attached: Attached) -> Any:
    blocks = attached.plan.blocks.copy()
    blocks["scale"][blocks["scale"] != 1] *= 2
    return blocks


def _swap_query_and_key_rows(attached: Attached) -> Any:
    """In every layer, the first row of q and the first row of k change places."""
    rows = _single_rows(attached.plan.blocks)
    names = [buffer.name for buffer in attached.plan.destinations]
    for query, name in enumerate(names):
        if name.endswith("qkv_proj.lora_b_stacked[0]"):
            key = names.index(name.replace("[0]", "[1]"))
            a, b = (
                np.flatnonzero((rows["dst"] == d) & (rows["dst_offset"] == 0))[0]
                for d in (query, key)
            )
            for part in ("src", "src_offset", "src_stride"):
                rows[part][[a, b]] = rows[part][[b, a]]
    return rows


def _single_rows(blocks: Any) -> Any:
    """The same movement with a block for each row."""
    single = []
    for block in blocks:
        batches, count, _ = block["size"].tolist()
        for batch in range(batches):
            for row in range(count):
                one = block.copy()
                one["size"][:2] = 1
                for side in ("src", "dst"):
                    stride = block[f"{side}_stride"]
                    one[f"{side}_offset"] += batch * stride[0] + row * stride[1]
                single.append(one)
    return np.array(single, blocks.dtype)


MUTANTS: dict[str, Callable[[Attached], None]] = {
    "other half": _read_other_half,
    "dropped block": _with_blocks(_drop_block),
    "doubled scale": _with_blocks(_double_scale),
    "swapped q and k rows": _with_blocks(_swap_query_and_key_rows),
}
