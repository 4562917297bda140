"""A movement: where every element of a list of destination tensors comes from.

The trainer's export map and the engine's slot map are both movements, of factors from adapter
parameters and of slot buffers from factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import torch

from lora_refit.errors import CoverageError, NotMovement
from lora_refit.trace import planes as plane_reader
from lora_refit.trace.axis import AxisMap, IntArray
from lora_refit.trace.planes import CompressedPlane
from lora_refit.trace.tags import FIELDS, Plane, matrix_shape, planes_for

MAX_CELLS = 4096


class Cell(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of a destination matrix that comes from one source tensor.

    The destination is seen as slabs, its trailing two dimensions; the source as one matrix (rows =
    all leading dimensions). Not transposed: `along_rows` gives the source row of each destination
    row and `along_cols` the source column of each destination column. Transposed: `along_rows`
    gives the source column and `along_cols` the source row.
    """

    slab: int
    row: int
    col: int
    tensor: int
    transposed: bool
    along_rows: AxisMap
    along_cols: AxisMap

    @property
    def rows(self) -> int:
        return self.along_rows.length

    @property
    def cols(self) -> int:
        return self.along_cols.length

    @property
    def source_rows(self) -> IntArray:
        """Source row of each position of the axis that selects source rows."""
        return (self.along_cols if self.transposed else self.along_rows).coordinates()

    @property
    def source_cols(self) -> IntArray:
        """Source column of each position of the axis that selects source columns."""
        return (self.along_rows if self.transposed else self.along_cols).coordinates()


class TensorMap(msgspec.Struct, frozen=True, array_like=True):
    """Where the elements of one destination tensor come from; uncovered elements are padding."""

    name: str
    shape: tuple[int, ...]
    cells: tuple[Cell, ...]

    @property
    def slab_shape(self) -> tuple[int, int]:
        return slab_shape(self.shape)


def slab_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of one slab of a tensor; a vector is one row."""
    return (1, int(shape[-1])) if len(shape) == 1 else (int(shape[-2]), int(shape[-1]))


def slabs(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of one or more dimensions as [slabs, rows, cols]."""
    return tensor.reshape(-1, *slab_shape(tensor.shape))


def identity(name: str, shape: tuple[int, ...], tensor: int) -> TensorMap:
    """The map of a tensor that is source tensor number `tensor` itself."""
    rows, cols = slab_shape(shape)
    cells = tuple(
        Cell(
            slab=slab,
            row=0,
            col=0,
            tensor=tensor,
            transposed=False,
            along_rows=AxisMap.from_coordinates(slab * rows + np.arange(rows)),
            along_cols=AxisMap.from_coordinates(np.arange(cols)),
        )
        for slab in range(math.prod(shape) // (rows * cols))
    )
    return TensorMap(name, shape, cells)


class TagReader:
    """Collects the planes of named destination tensors, one tensor at a time.

    source_shapes: of the tagged tensors, in the order of their tags. Each destination is read when
    it is seen and never kept: exporters reuse buffers and alias live parameters.
    """

    def __init__(self, source_shapes: Sequence[Sequence[int]]) -> None:
        self.planes = planes_for(source_shapes)
        self._limits = [matrix_shape(shape) for shape in source_shapes]
        self._seen: dict[str, dict[Plane, list[CompressedPlane]]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the order in which they were first read."""
        return tuple(self._seen)

    def read(self, name: str, tensor: torch.Tensor, plane: Plane) -> None:
        shape = tuple(tensor.shape)
        if math.prod(shape) == 0 or not shape:
            raise NotMovement(f"{name}: shape {shape} holds no rows and columns to trace")
        if self._shapes.setdefault(name, shape) != shape:
            raise NotMovement(f"{name}: shape changed from {self._shapes[name]} to {shape}")
        by_plane = self._seen.setdefault(name, {})
        if plane in by_plane:
            raise CoverageError(f"{name}: yielded twice in one pass; names must be unique")
        by_plane[plane] = [plane_reader.read(slab, name) for slab in slabs(tensor)]

    def tensor_map(self, name: str) -> TensorMap:
        """Decode one tensor's planes. Raises NotMovement if its elements are not just moved."""
        by_plane = self._seen[name]
        missing = [plane for plane in self.planes if plane not in by_plane]
        if missing:
            raise NotMovement(f"{name}: missing from {len(missing)} of {len(self.planes)} passes")
        cells: list[Cell] = []
        for slab in range(len(next(iter(by_plane.values())))):
            fields = {
                field: plane_reader.combine(
                    [by_plane[plane][slab] for plane in self.planes if plane.field == field], name
                )
                for field in FIELDS
            }
            cells += _decode_slab(name, slab, fields, slab_shape(self._shapes[name]))
        for cell in cells:
            self._require_inside(name, cell)
        return TensorMap(name, self._shapes[name], tuple(cells))

    def _require_inside(self, name: str, cell: Cell) -> None:
        """Computed values can look like tags of elements that no source tensor has."""
        if cell.tensor < len(self._limits):
            rows, cols = self._limits[cell.tensor]
            if cell.source_rows.max() < rows and cell.source_cols.max() < cols:
                return
        raise NotMovement(
            f"{name}: its tags name elements that do not exist; the exporter or loader computes "
            "values instead of moving them"
        )


def _decode_slab(
    name: str, slab: int, fields: dict[str, CompressedPlane], shape: tuple[int, int]
) -> list[Cell]:
    tensor, row, column = (fields[field] for field in FIELDS)
    straight = _grid(tensor, along_rows=row, along_cols=column)
    flipped = _grid(tensor, along_rows=column, along_cols=row)
    transposed = len(flipped[0]) * len(flipped[1]) < len(straight[0]) * len(straight[1])
    row_starts, col_starts = flipped if transposed else straight
    along_rows, along_cols = (column, row) if transposed else (row, column)
    if len(row_starts) * len(col_starts) > MAX_CELLS:
        raise NotMovement(
            f"{name}: falls into {len(row_starts) * len(col_starts)} pieces (limit {MAX_CELLS}); "
            "its rows and columns are not moved independently of each other"
        )
    owners = tensor.at(row_starts, col_starts)
    row_stops = np.append(row_starts[1:], shape[0])
    col_stops = np.append(col_starts[1:], shape[1])
    cells = []
    for i, (top, bottom) in enumerate(zip(row_starts, row_stops, strict=True)):
        for j, (left, right) in enumerate(zip(col_starts, col_stops, strict=True)):
            rows = along_rows.at(np.arange(top, bottom), [left])[:, 0]
            cols = along_cols.at([top], np.arange(left, right))[0]
            padding = owners[i, j] < 0
            if ((np.append(rows, cols) < 0) != padding).any():
                raise NotMovement(
                    f"{name}: its padding differs between two passes of the same trace"
                )
            if padding:
                continue
            cells.append(
                Cell(
                    slab=slab,
                    row=int(top),
                    col=int(left),
                    tensor=int(owners[i, j]),
                    transposed=transposed,
                    along_rows=AxisMap.from_coordinates(rows),
                    along_cols=AxisMap.from_coordinates(cols),
                )
            )
    return cells


def _grid(
    tensor: CompressedPlane, along_rows: CompressedPlane, along_cols: CompressedPlane
) -> tuple[IntArray, IntArray]:
    """Row and column starts of rectangles with one owner in which each field follows one axis."""
    return (
        np.union1d(tensor.row_starts, along_cols.row_starts),
        np.union1d(tensor.col_starts, along_rows.col_starts),
    )


def gather(tensor_map: TensorMap, sources: dict[int, torch.Tensor]) -> torch.Tensor:
    """Replay a map in plain torch, in fp64: the slow reference for kernels and for the proofs.

    sources: source tensor by index. Padding is zero.
    """
    out = torch.zeros(tensor_map.shape, dtype=torch.float64)
    view = slabs(out)
    for cell in tensor_map.cells:
        source = sources[cell.tensor]
        matrix = source.detach().reshape(matrix_shape(source.shape))
        piece = matrix[torch.from_numpy(cell.source_rows)][:, torch.from_numpy(cell.source_cols)]
        piece = piece.to("cpu", torch.float64)
        bottom, right = cell.row + cell.rows, cell.col + cell.cols
        view[cell.slab, cell.row : bottom, cell.col : right] = piece.T if cell.transposed else piece
    return out
