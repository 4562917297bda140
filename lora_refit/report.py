"""What the engine's side reports back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class AttachReport:
    """What attaching found.

    mode: "adapter" or "merged". workers: engine workers. trainer_ranks: arenas mapped by each worker. factors: exported
    factors, all covered. blocks: copy blocks of each worker's scatter plan, by worker.
    slots: LoRA slots taken on each worker (2: the idle one is written and then flipped to).
    plan_digests: by worker. In merged mode there are no slots and no plan; blocks are the buckets. transport: how arenas are reached, by worker. trace_ms: the slowest
    worker's time to trace, prove and compose. warnings: what the caller should know.
    """

    workers: int
    trainer_ranks: int
    factors: int
    blocks: tuple[int, ...]
    slots: int
    plan_digests: tuple[str, ...]
    transport: tuple[str, ...]
    trace_ms: float
    warnings: tuple[str, ...] = ()
    mode: str = "adapter"


@dataclass(frozen=True)
class WeightFidelity:
    """How much of one weight's update D = W' - W reached the engine.

    lost: ||round(W + D) - (W + D)|| / ||D||, 0 for no update. changed: share of the elements that
    differ from the base.
    """

    name: str
    lost: float
    changed: float


@dataclass(frozen=True)
class Fidelity:
    """How much of the update the grid of the merged dtype loses; see WeightFidelity.

    lost, changed: over all weights together. weights: each by itself.
    """

    lost: float
    changed: float
    weights: tuple[WeightFidelity, ...]

    @staticmethod
    def of_sums(names: Sequence[str], sums: npt.NDArray[np.void]) -> Fidelity:
        """From `MERGE_SUMS_DTYPE` records, one for each name."""
        total = np.zeros((), sums.dtype)
        for field_name in sums.dtype.names or ():
            total[field_name] = sums[field_name].sum()
        weights = tuple(
            WeightFidelity(name, *_lost_and_changed(item))
            for name, item in zip(names, sums, strict=True)
        )
        return Fidelity(*_lost_and_changed(total), weights)

    def worst(self, count: int = 3) -> tuple[WeightFidelity, ...]:
        """The weights that lose most."""
        return tuple(sorted(self.weights, key=lambda item: -item.lost)[:count])


def _lost_and_changed(sums: npt.NDArray[np.void] | np.void) -> tuple[float, float]:
    delta, elements = float(sums["delta"]), int(sums["elements"])
    lost = float(np.sqrt(float(sums["residual"]) / delta)) if delta else 0.0
    if not np.isfinite(delta):
        lost = float("nan")
    return lost, int(sums["changed"]) / elements if elements else 0.0


@dataclass(frozen=True)
class RefitReport:
    """One refit that is live on every worker.

    bytes: written into LoRA slots, or loaded as merged weights, over all workers. phases_ms: "pack"
    on the ticket's trainer rank, then "stage" and "commit" as the driver sees them, and the slowest
    worker's share of them: "wait" for the trainer ranks, "verify" digests, "scatter". digest: of
    the adapter's packed bytes, in merged mode of the merged bytes too; equal on every worker.
    launches: copy launches of the worker that made most of them. collectives, allocations: made on
    the data path, trainer and engine.

    Of merged mode: fidelity, buckets, and peak_extra_bytes, the memory that the refit takes: both
    bucket buffers of every trainer rank, and the most that a worker held of merged weights.
    warnings: what the caller should know.
    """

    version: int
    bytes: int
    phases_ms: dict[str, float]
    digest: str
    launches: int
    collectives: int
    allocations: int
    fidelity: Fidelity | None = None
    buckets: int = 0
    peak_extra_bytes: int = 0
    warnings: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Attestation:
    """Whether what is live is the committed version.

    version: the committed version. ok: True if every worker's live slot still has the digests of
    its commit and is registered, active and pinned. workers: a line for each worker, "ok" or what
    differs, naming modules.
    """

    version: int
    ok: bool
    workers: tuple[str, ...]
