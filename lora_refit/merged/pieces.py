"""Who computes which rectangle of a merged weight, and from what: read off the export map.

Row i of lora_B adapts row i of its weight, column j of lora_A column j. So the export map of the
adapter says where every element of the weight lies in the trainer's shards, and the base itself
needs no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from lora_refit.errors import CoverageError, RefitError, UnsupportedAdapter
from lora_refit.merged.layout import MergedWeight, Piece
from lora_refit.sources.base import PEFT_PREFIX, BaseWeight
from lora_refit.trace.axis import IntArray
from lora_refit.trace.export import ExportMap, Parameter
from lora_refit.trace.movement import Cell, TensorMap

_A, _B = ".lora_A.weight", ".lora_B.weight"


class BaseShard(msgspec.Struct, frozen=True, array_like=True):
    """A BaseWeight as the other ranks know it.

    index: its number among the rank's base weights. a, b: numbers of its adapter's parameters.
    """

    rank: int
    index: int
    a: int
    b: int
    shape: tuple[int, int]
    dtype: str
    first_row: int
    refused: str


@dataclass(frozen=True)
class FactorRows:
    """Part of a factor as a matrix of one parameter: element (i, j) is at (rows[i], cols[j])."""

    parameter: int
    rows: IntArray
    cols: IntArray


@dataclass(frozen=True)
class SourcedPiece:
    """A piece and where its operands lie.

    base: which of the rank's base weights; its rows and columns are weight_rows and weight_cols.
    b: [piece rows, r]. a: matrices of the k that each parameter holds, [k, piece columns], with
    those k.
    """

    piece: Piece
    base: int
    weight_rows: IntArray
    weight_cols: IntArray
    b: FactorRows
    a: tuple[tuple[IntArray, FactorRows], ...]


def describe_shards(
    weights: Sequence[BaseWeight], export_map: ExportMap, rank: int
) -> tuple[BaseShard, ...]:
    """This rank's base weights for the other ranks."""
    numbers = {
        parameter.name: index
        for index, parameter in enumerate(export_map.parameters)
        if parameter.rank == rank
    }
    return tuple(
        BaseShard(
            rank=rank,
            index=index,
            a=numbers[base.a],
            b=numbers[base.b],
            shape=(0, 0) if base.weight is None else _matrix(base),
            dtype="" if base.weight is None else str(base.weight.dtype).removeprefix("torch."),
            first_row=base.first_row,
            refused=base.refused,
        )
        for index, base in enumerate(weights)
    )


def _matrix(base: BaseWeight) -> tuple[int, int]:
    assert base.weight is not None
    if base.weight.dim() != 2:
        raise UnsupportedAdapter(
            f"{base.b}: its base weight has shape {tuple(base.weight.shape)}, not [out, in]"
        )
    rows, cols = base.weight.shape
    return int(rows), int(cols)


@dataclass(frozen=True)
class _Module:
    """One adapted checkpoint weight."""

    weight: MergedWeight
    a: TensorMap
    b: TensorMap


def adapted_weights(export_map: ExportMap) -> list[MergedWeight]:
    """Every weight that the adapter changes, in the order of the exporter."""
    return [module.weight for module in _modules(export_map)]


def _modules(export_map: ExportMap) -> list[_Module]:
    maps = {factor.name: factor for factor in export_map.factors}
    modules = []
    for name, a in maps.items():
        if name.endswith(_A):
            module = name.removesuffix(_A)
            b = maps[module + _B]
            checkpoint_name = module.removeprefix(PEFT_PREFIX) + ".weight"
            shape = (int(b.shape[0]), int(a.shape[-1]))
            modules.append(_Module(MergedWeight(checkpoint_name, shape), a, b))
    return modules


@dataclass(frozen=True)
class Pieces:
    """What the ranks can merge.

    pieces: they tile each weight exactly once; of ranks that hold the same rectangle the lowest
    computes it. replicas: the rectangles of the others. problems: why a weight of
    `adapted_weights` has no pieces, by its number.
    """

    pieces: tuple[SourcedPiece, ...]
    replicas: tuple[SourcedPiece, ...]
    problems: dict[int, RefitError]


def find_pieces(export_map: ExportMap, shards: Sequence[BaseShard]) -> Pieces:
    """The pieces of all ranks in the order of `adapted_weights`; the same on every rank.

    problems: UnsupportedAdapter, naming module and reason, for a weight that no rank can merge,
    CoverageError for one that the ranks' shards do not tile.
    """
    finder = _PieceFinder(export_map, shards)
    pieces: list[SourcedPiece] = []
    replicas: list[SourcedPiece] = []
    problems: dict[int, RefitError] = {}
    for index, module in enumerate(_modules(export_map)):
        try:
            first: dict[tuple[int, int, int, int], SourcedPiece] = {}
            others = []
            for item in finder.of_module(index, module):
                at = item.piece
                if first.setdefault((at.row, at.rows, at.col, at.cols), item) is not item:
                    others.append(item)
            _require_tiled(module.weight, list(first.values()))
        except RefitError as problem:
            problems[index] = problem
        else:
            pieces += first.values()
            replicas += others
    return Pieces(tuple(pieces), tuple(replicas), problems)


class _PieceFinder:
    def __init__(self, export_map: ExportMap, shards: Sequence[BaseShard]) -> None:
        copies = {copy: first for first, copy in export_map.replicas}
        self._parameters = export_map.parameters
        self._shards = [
            msgspec.structs.replace(
                shard, a=copies.get(shard.a, shard.a), b=copies.get(shard.b, shard.b)
            )
            for shard in shards
        ]
        self._by_b: dict[int, BaseShard] = {}
        for shard in self._shards:
            self._by_b.setdefault(shard.b, shard)

    def of_module(self, index: int, module: _Module) -> Iterator[SourcedPiece]:
        """Every rank's pieces, replicas among them, in rank order."""
        self._require_mergeable(module)
        for shard in self._shards:
            for cell, weight_rows in self._rows(shard, module.b):
                yield from self._pieces(index, module, shard, cell, weight_rows)

    def _require_mergeable(self, module: _Module) -> None:
        owners = [self._by_b.get(cell.tensor) for cell in module.b.cells]
        for owner, cell in zip(owners, module.b.cells, strict=True):
            if owner is None or owner.refused:
                reason = owner.refused if owner else "the source does not know its base weight"
                raise UnsupportedAdapter(
                    f"{module.weight.name} ({self._parameters[cell.tensor].label}): cannot be "
                    f"merged: {reason}. Use adapter mode, or leave this module out of the adapter"
                )

    def _rows(self, shard: BaseShard, b: TensorMap) -> Iterator[tuple[Cell, IntArray]]:
        """The cells of lora_B whose rows this shard holds, and which of its rows those are."""
        if shard.refused:
            return
        sharded_alike = shard.shape[0] == self._parameters[shard.b].shape[0]
        for cell in b.cells:
            owner = self._by_b[cell.tensor]
            if cell.tensor == shard.b:
                yield cell, shard.first_row + cell.source_rows
            elif not sharded_alike and _are_peers(self._parameters, owner, shard):
                yield cell, owner.first_row + cell.source_rows

    def _pieces(
        self, index: int, module: _Module, shard: BaseShard, b_cell: Cell, weight_rows: IntArray
    ) -> Iterator[SourcedPiece]:
        """One piece for each range of columns of lora_A that this shard's own part of it names."""
        weight = module.weight
        rank = int(module.a.shape[0])
        if b_cell.transposed or (b_cell.col, b_cell.cols) != (0, rank):
            raise UnsupportedAdapter(
                f"{weight.name}: rows of lora_B come from several parameters or transposed ones, "
                "which merged mode does not follow; use adapter mode"
            )
        own = {(c.col, c.cols): c.source_cols for c in module.a.cells if c.tensor == shard.a}
        for (col, cols), weight_cols in own.items():
            if int(weight_rows.max()) >= shard.shape[0] or int(weight_cols.max()) >= shard.shape[1]:
                raise CoverageError(
                    f"{weight.name}: the export map names row {int(weight_rows.max())} and column "
                    f"{int(weight_cols.max())} of its shard on trainer rank {shard.rank}, which "
                    f"has shape {shard.shape}"
                )
            yield SourcedPiece(
                Piece(index, shard.rank, b_cell.row, b_cell.rows, col, cols),
                shard.index,
                weight_rows,
                weight_cols,
                FactorRows(b_cell.tensor, b_cell.source_rows, b_cell.source_cols),
                _a_parts(module, col, cols),
            )


def _are_peers(parameters: Sequence[Parameter], owner: BaseShard, shard: BaseShard) -> bool:
    """Whether two shards are of one module: tensor-parallel ranks give it the same name."""
    return parameters[owner.b].name == parameters[shard.b].name


def _a_parts(module: _Module, col: int, cols: int) -> tuple[tuple[IntArray, FactorRows], ...]:
    """lora_A over some columns, by the parameter that holds each k."""
    parts = []
    for cell in sorted(module.a.cells, key=lambda cell: cell.row):
        if cell.col + cell.cols <= col or col + cols <= cell.col:
            continue
        if cell.transposed or cell.col > col or col + cols > cell.col + cell.cols:
            raise UnsupportedAdapter(
                f"{module.weight.name}: the parts of lora_A over columns {col} to {col + cols - 1} "
                "end at different columns, which merged mode does not follow; use adapter mode"
            )
        inside = slice(col - cell.col, col - cell.col + cols)
        ks = cell.row + np.arange(cell.rows)
        parts.append((ks, FactorRows(cell.tensor, cell.source_rows, cell.source_cols[inside])))
    covered = np.concatenate([ks for ks, _ in parts]) if parts else np.zeros(0, np.int64)
    if not np.array_equal(covered, np.arange(int(module.a.shape[0]))):
        raise CoverageError(
            f"{module.weight.name}: columns {col} to {col + cols - 1} of lora_A are not covered by "
            "exactly one parameter for each k"
        )
    return tuple(parts)


def _require_tiled(weight: MergedWeight, pieces: Sequence[SourcedPiece]) -> None:
    """The pieces are rectangles, so an area that fits without an overlap is a tiling."""
    area = sum(item.piece.rows * item.piece.cols for item in pieces)
    overlap = next(
        (
            (one.piece, other.piece)
            for position, one in enumerate(pieces)
            for other in pieces[:position]
            if _overlap(one.piece, other.piece)
        ),
        None,
    )
    if overlap is not None or area != math.prod(weight.shape):
        raise CoverageError(
            f"{weight.name}: the trainer ranks' shards cover {area} elements of its "
            f"{math.prod(weight.shape)}"
            + (f", and {overlap[0]} overlaps {overlap[1]}" if overlap else "")
            + "; all ranks of its tensor-parallel group must take part in the publisher"
        )


def _overlap(one: Piece, other: Piece) -> bool:
    return (
        one.row < other.row + other.rows
        and other.row < one.row + one.rows
        and one.col < other.col + other.cols
        and other.col < one.col + one.cols
    )
