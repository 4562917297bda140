"""What the engine's side reports back."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttachReport:
    """What attaching found.

    workers: engine workers. trainer_ranks: arenas mapped by each worker. factors: exported
    factors, all covered. blocks: copy blocks of each worker's scatter plan, by worker.
    slots: LoRA slots taken on each worker (2: the idle one is written and then flipped to).
    plan_digests: by worker. transport: how arenas are reached, by worker. trace_ms: the slowest
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


@dataclass(frozen=True)
class RefitReport:
    """One refit that is live on every worker.

    bytes: written into LoRA slots, over all workers. phases_ms: "pack" on the ticket's trainer
    rank, then "stage" and "commit" as the driver sees them, and the slowest worker's share of
    them: "wait" for the trainer ranks, "verify" digests, "scatter". digest: of the adapter's
    packed bytes, equal on every worker. launches: copy launches of the worker that made most of
    them. collectives, allocations: made on the data path, trainer and engine.
    """

    version: int
    bytes: int
    phases_ms: dict[str, float]
    digest: str
    launches: int
    collectives: int
    allocations: int


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
