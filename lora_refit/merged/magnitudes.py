"""DoRA's magnitudes of all trainer ranks, in the order of the checkpoint's rows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from lora_refit.collectives import ProcessGroup, all_gather_bytes
from lora_refit.errors import UnsupportedAdapter
from lora_refit.merged.layout import MergedWeight
from lora_refit.merged.pieces import SourcedPiece
from lora_refit.sources.base import BaseWeight


class RowValues(msgspec.Struct, frozen=True, array_like=True):
    """Magnitudes of rows `row`, `row` + 1, ... of a weight: little-endian fp32."""

    weight: int
    row: int
    values: bytes


def gather_magnitudes(
    pieces: Sequence[SourcedPiece],
    held: Sequence[BaseWeight],
    weights: Sequence[MergedWeight],
    rank: int,
    group: ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Module -> fp32 [out], for every weight that has magnitudes; the same on every rank.

    pieces: of all ranks. held: this rank's base weights. Collective, anew for each version.

    Raises UnsupportedAdapter, naming weight and row, if ranks that hold the same row differ.
    """
    own = magnitudes_of_rank(pieces, held, rank)
    gathered = all_gather_bytes(msgspec.msgpack.encode(own), group)
    parts = [msgspec.msgpack.decode(data, type=list[RowValues]) for data in gathered]
    return assemble_magnitudes([part for of_rank in parts for part in of_rank], weights)


def magnitudes_of_rank(
    pieces: Sequence[SourcedPiece], held: Sequence[BaseWeight], rank: int
) -> list[RowValues]:
    """What a rank holds, in the order of the checkpoint's rows."""
    parts = []
    for item in pieces:
        magnitude = held[item.base].magnitude if item.piece.rank == rank else None
        if magnitude is not None:
            rows = torch.from_numpy(item.weight_rows).to(magnitude.device)
            values = magnitude.detach()[rows].float().cpu().numpy().astype("<f4")
            parts.append(RowValues(item.piece.weight, item.piece.row, values.tobytes()))
    return parts


def assemble_magnitudes(
    parts: Sequence[RowValues], weights: Sequence[MergedWeight]
) -> dict[str, torch.Tensor]:
    """As `gather_magnitudes`, of the parts of all ranks."""
    full: dict[int, torch.Tensor] = {}
    for part in parts:
        name, (out, _) = weights[part.weight].name, weights[part.weight].shape
        values = torch.from_numpy(np.frombuffer(part.values, "<f4").copy())
        known = full.setdefault(part.weight, torch.full((out,), torch.nan))
        rows = known[part.row : part.row + len(values)]
        differ = (~rows.isnan() & (rows != values)).nonzero()
        if len(differ):
            raise UnsupportedAdapter(
                f"{name}, row {part.row + int(differ[0])}: trainer ranks hold different DoRA "
                "magnitudes for it, so each trains another model; keep the magnitudes of a "
                "row-parallel weight equal over its tensor-parallel ranks"
            )
        rows.copy_(values)
    return {weights[index].name.removesuffix(".weight"): known for index, known in full.items()}
