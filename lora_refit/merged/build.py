"""What a merged-mode publisher sets up once, together with the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from lora_refit.arena import RingWriter
from lora_refit.arena_set import ArenaSet
from lora_refit.base_samples import BaseSample
from lora_refit.collectives import ProcessGroup, all_gather_bytes, same_outcome
from lora_refit.errors import UnsupportedAdapter
from lora_refit.merged.bases import BaseShards
from lora_refit.merged.delivery import Delivery, Merger
from lora_refit.merged.layout import MergedLayout
from lora_refit.merged.merger import BucketMerger, MergeInputs
from lora_refit.merged.pieces import (
    BaseShard,
    Pieces,
    SourcedPiece,
    adapted_weights,
    describe_shards,
    find_pieces,
)
from lora_refit.merged.row_merger import DoraMerger, ForwardMerger
from lora_refit.merged.samples import sample_bases
from lora_refit.sources.base import Source, lora_scale
from lora_refit.spec import Layout, Spec
from lora_refit.trace.export import ExportMap


@dataclass(frozen=True)
class Bases:
    """The trainer's base weights as all ranks agreed on them.

    pieces: who holds what. samples: for engines to compare with theirs. gaps: a line for every
    weight that has none.
    """

    pieces: Pieces
    samples: tuple[BaseSample, ...]
    gaps: tuple[str, ...]


def survey_bases(
    source: Source, export_map: ExportMap, rank: int, group: ProcessGroup | None
) -> Bases:
    """Find and sample the base weights under the adapter. Collective; the same on every rank."""
    held = same_outcome(source.base_weights, group)
    own = same_outcome(lambda: describe_shards(held, export_map, rank), group)
    shards = [
        shard
        for data in all_gather_bytes(msgspec.msgpack.encode(own), group)
        for shard in msgspec.msgpack.decode(data, type=tuple[BaseShard, ...])
    ]
    pieces = find_pieces(export_map, shards)
    weights = adapted_weights(export_map)
    return Bases(pieces, *sample_bases(held, pieces, weights, rank, group))


def merged_layout(
    export_map: ExportMap,
    pieces: Pieces,
    config: dict[str, Any],
    dtype: torch.dtype,
    bucket_bytes: int,
) -> MergedLayout:
    """Raises what `find_pieces` found wrong with a weight, UnsupportedAdapter for modules of different
    rank or alpha, LayoutMismatch for too small buckets."""
    _require_one_scale(export_map, config)
    for problem in pieces.problems.values():
        raise problem
    layout = MergedLayout(
        dtype=str(dtype).removeprefix("torch."),
        bucket_bytes=bucket_bytes,
        weights=tuple(adapted_weights(export_map)),
        pieces=tuple(item.piece for item in pieces.pieces),
    )
    assert layout.buckets
    return layout


def _require_one_scale(export_map: ExportMap, config: dict[str, Any]) -> None:
    for pattern in ("rank_pattern", "alpha_pattern"):
        if config.get(pattern):
            raise UnsupportedAdapter(
                f"{pattern} {config[pattern]}: merged mode needs one rank and alpha for all modules"
            )
    for factor in export_map.factors:
        rank = factor.shape[0 if factor.name.endswith(".lora_A.weight") else 1]
        if rank != config["r"]:
            raise UnsupportedAdapter(
                f"{factor.name}: has rank {rank}, but the PEFT config says r = {config['r']}, from "
                "which the scale follows; correct the config"
            )


def make_ring(
    layout: Layout, rank: int, timeout_s: float, device: torch.device, memory: str
) -> RingWriter:
    assert layout.merged is not None
    return RingWriter(
        layout.merged.ring_bytes(rank),
        layout.merged.note_words(rank),
        rank,
        layout.digest(),
        timeout_s,
        device=device,
        memory=memory,
    )


@dataclass(frozen=True)
class DeliveryParts:
    """What one rank's Delivery is made of. rounding: see Publisher's merge_rounding."""

    source: Source
    pieces: Pieces
    ring: RingWriter
    rank: int
    timeout_s: float
    device: torch.device
    rounding: str
    group: ProcessGroup | None


def make_delivery(spec: Spec, parts: DeliveryParts) -> Delivery:
    """This rank's merges, and the arenas that they read. Local."""
    layout = spec.layout
    assert layout.merged is not None
    own = [item for item in parts.pieces.pieces if item.piece.rank == parts.rank]
    inputs = MergeInputs(
        layout=layout.merged,
        pieces=parts.pieces.pieces,
        parameters=layout.export_map.parameters,
        adapter_dtype=getattr(torch, layout.dtype),
        bases=BaseShards(parts.source, frozenset(item.base for item in own), parts.device),
        rank=parts.rank,
        scale=lora_scale(layout.peft_config),
    )
    ranks = _ranks_read(own, layout.export_map) | {parts.rank}
    return Delivery(
        _merger(inputs, layout, parts),
        parts.ring,
        ArenaSet(spec, parts.timeout_s, parts.device, ranks),
        len(layout.merged.buckets),
        layout.merged.note_words(parts.rank),
        parts.timeout_s,
    )


def _merger(inputs: MergeInputs, layout: Layout, parts: DeliveryParts) -> Merger:
    dora = bool(layout.peft_config.get("use_dora"))
    for base in parts.source.base_weights():
        if base.weight is not None and dora != (base.magnitude is not None):
            raise UnsupportedAdapter(
                f"{base.b}: {'lacks the' if dora else 'has a'} DoRA magnitude, unlike what the PEFT "
                "config says (use_dora); adapt all modules alike"
            )
    if dora:
        return DoraMerger(inputs, parts.group)
    return ForwardMerger(inputs) if parts.rounding == "forward" else BucketMerger(inputs)


def _ranks_read(pieces: list[SourcedPiece], export_map: ExportMap) -> frozenset[int]:
    """Ranks whose adapter shards these pieces need."""
    used = {item.b.parameter for item in pieces}
    used |= {factor.parameter for item in pieces for _, factor in item.a}
    return frozenset(export_map.parameters[number].rank for number in used)
