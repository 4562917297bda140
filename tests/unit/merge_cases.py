"""Random programs for the merge kernel, built from matrices as trainers and engines lay them out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from block_reference import Buffer, poisoned
from numpy.typing import NDArray

from lora_refit.kernels import DTYPE_CODES
from lora_refit.kernels.records import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE

DTYPES = list(DTYPE_CODES)
LAYOUTS = ["rows", "rows", "columns", "padded", "spread", "reversed"]
"""How a factor may lie in memory; "columns" is a transposed one."""

ROWS = [1, 3, 16, 63, 64, 65, 100, 128, 129, 200]
COLS = [1, 2, 7, 8, 30, 64, 120, 128, 136, 200, 264]
RANKS = [1, 2, 3, 5, 8, 8, 12, 16, 16, 17, 31, 32, 48, 64, 65, 96, 128, 129, 200, 256]
SCALES = [1.0, 2.0, -0.5, 0.03, 0.0]
MOST_PRODUCTS = 400_000
"""Of one module, so that simulators stay quick."""


@dataclass(frozen=True)
class Matrix:
    """Where a matrix lies: a buffer, and an offset and strides in elements."""

    buffer: int
    offset: int
    row_stride: int
    col_stride: int


@dataclass
class Program:
    """A merge program and the memory that it works on."""

    blocks: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, MERGE_BLOCK_DTYPE))
    segments: NDArray[np.void] = field(default_factory=lambda: np.zeros(0, MERGE_SEGMENT_DTYPE))
    sources: list[Buffer] = field(default_factory=list)
    destinations: list[Buffer] = field(default_factory=list)
    modules: int = 0

    def fresh_destinations(self) -> list[Buffer]:
        return [Buffer(buffer.tensor, buffer.misaligned) for buffer in self.destinations]

    def add_source(self, tensor: torch.Tensor, misaligned: int = 0) -> int:
        self.sources.append(Buffer(tensor, misaligned))
        return len(self.sources) - 1

    def add_destination(self, tensor: torch.Tensor, misaligned: int = 0) -> int:
        self.destinations.append(Buffer(tensor, misaligned))
        return len(self.destinations) - 1

    def add_segments(self, factors: Sequence[tuple[Matrix, Matrix, int]]) -> tuple[int, int]:
        """Segments of (B, A, rank): the number of the first, and how many."""
        first = len(self.segments)
        rows = [
            (b.buffer, a.buffer, b.offset, a.offset, b.row_stride, b.col_stride, a.row_stride,
             a.col_stride, rank)
            for b, a, rank in factors
        ]  # fmt: skip
        added = np.array(rows, MERGE_SEGMENT_DTYPE)
        self.segments = np.concatenate([self.segments, added])
        return first, len(rows)

    def add_block(
        self,
        weight: Matrix,
        merged: Matrix,
        size: tuple[int, int],
        segments: tuple[int, int],
        module: int,
        scale: float,
    ) -> None:
        row = (weight.buffer, merged.buffer, weight.offset, merged.offset, *size,
               weight.row_stride, merged.row_stride, *segments, module, scale)  # fmt: skip
        self.blocks = np.concatenate([self.blocks, np.array([row], MERGE_BLOCK_DTYPE)])


def random_program(
    adapter: torch.dtype, modules: int, seed: int, most_products: int = MOST_PRODUCTS
) -> Program:
    rng = np.random.default_rng(seed)
    program = Program()
    for _ in range(modules):
        _add_module(program, rng, adapter, most_products)
    return program


def layer(
    adapter: torch.dtype,
    weight: torch.dtype,
    merged: torch.dtype,
    size: tuple[int, int],
    rank: int,
    *,
    scale: float = 0.5,
    misaligned: int = 0,
    layout: str = "rows",
    integers: bool = False,
    seed: int = 0,
) -> Program:
    """One weight, one block, one segment.

    Args:
        misaligned: elements by which every base misses a multiple of 16 bytes.
        integers: factors are -8 to 8, so that scale * B @ A is exact.
    """
    rng = np.random.default_rng(seed)
    program = Program(modules=1)
    rows, cols = size
    factors = _integers if integers else _values
    b = _put(program, rng, factors(rng, (rows, rank), adapter), layout, misaligned)
    a = _put(program, rng, factors(rng, (rank, cols), adapter), layout, misaligned)
    base = _put(program, rng, 0.1 * _values(rng, size, weight), "rows", misaligned)
    out = program.add_destination(poisoned(merged, rows * cols), misaligned * merged.itemsize)
    segments = program.add_segments([(b, a, rank)])
    program.add_block(base, Matrix(out, 0, cols, 1), size, segments, 0, scale)
    return program


def _add_module(
    program: Program, rng: np.random.Generator, adapter: torch.dtype, most_products: int
) -> None:
    """A weight whose factors are whole, or shards over 2 or 3 ranks along one of their axes."""
    rank = int(rng.choice(RANKS))
    rows = _choose(rng, ROWS, most_products // rank)
    cols = _choose(rng, COLS, most_products // (rank * rows))
    shards = int(rng.integers(1, 4))
    axis = str(rng.choice(["rows", "cols", "rank"]))
    row_cuts = _cuts(rows, shards if axis == "rows" else 1)
    col_cuts = _cuts(cols, shards if axis == "cols" else 1)
    rank_cuts = _cuts(rank, shards if axis == "rank" else 1)
    b_shards = _shards(program, rng, (rows, rank), (row_cuts, rank_cuts), adapter)
    a_shards = _shards(program, rng, (rank, cols), (rank_cuts, col_cuts), adapter)

    weight = _weight(program, rng, rows, cols)
    merged, rows_to = _destination(program, rng, rows, cols)
    scale = float(rng.choice(SCALES))
    for i, row_shard in enumerate(row_cuts):
        for j, col_shard in enumerate(col_cuts):
            factors = [(b_shards[i][k], a_shards[k][j], len(ks)) for k, ks in enumerate(rank_cuts)]
            for run in _runs(rows_to, row_shard):
                skipped = run.start - row_shard.start
                moved = [(_at(b, skipped, 0), a, k) for b, a, k in factors]
                segments = program.add_segments(moved) if rng.random() < 0.95 else (0, 0)
                program.add_block(
                    _at(weight, run.start, col_shard.start),
                    _at(merged, int(rows_to[run.start]), col_shard.start),
                    (len(run), len(col_shard)),
                    segments,
                    program.modules,
                    scale,
                )
    program.modules += 1


def _choose(rng: np.random.Generator, sizes: list[int], most: int) -> int:
    return int(rng.choice([size for size in sizes if size <= max(1, most)]))


def _cuts(length: int, shards: int) -> list[range]:
    """About equal parts; some are empty where `length` is smaller than `shards`."""
    ends = [length * i // shards for i in range(shards + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def _runs(rows_to: NDArray[np.int64], shard: range) -> list[range]:
    """The parts of a shard whose rows stay neighbours in the destination."""
    breaks = [row for row in shard[1:] if rows_to[row] != rows_to[row - 1] + 1]
    edges = [shard.start, *breaks, shard.stop]
    return [range(begin, end) for begin, end in itertools.pairwise(edges)]


def _at(matrix: Matrix, row: int, col: int) -> Matrix:
    offset = matrix.offset + row * matrix.row_stride + col * matrix.col_stride
    return Matrix(matrix.buffer, offset, matrix.row_stride, matrix.col_stride)


def _shards(
    program: Program,
    rng: np.random.Generator,
    size: tuple[int, int],
    cuts: tuple[list[range], list[range]],
    dtype: torch.dtype,
) -> list[list[Matrix]]:
    values = _values(rng, size, dtype)
    layout = str(rng.choice(LAYOUTS))
    misaligned = int(rng.choice([0, 0, 0, 1, 4]))
    return [
        [
            _put(program, rng, values[r.start : r.stop, c.start : c.stop], layout, misaligned)
            for c in cuts[1]
        ]
        for r in cuts[0]
    ]


def _weight(program: Program, rng: np.random.Generator, rows: int, cols: int) -> Matrix:
    dtype = DTYPES[rng.integers(3)]
    values = 0.1 * _values(rng, (rows, cols), dtype)
    layout = str(rng.choice(["rows", "rows", "padded"]))
    return _put(program, rng, values, layout, int(rng.choice([0, 0, 0, 1])))


def _destination(
    program: Program, rng: np.random.Generator, rows: int, cols: int
) -> tuple[Matrix, NDArray[np.int64]]:
    """A packed destination, and the row of it where each row goes: rows move in runs."""
    dtype = DTYPES[rng.integers(3)]
    stride = cols + int(rng.choice([0, 0, 8, 3]))
    offset = int(rng.choice([0, 0, 8, 512, 1]))
    tensor = poisoned(dtype, offset + rows * stride)
    buffer = program.add_destination(tensor, int(rng.choice([0, 0, 0, 1])) * dtype.itemsize)
    runs = _cuts(rows, int(rng.integers(1, 4)))
    order = rng.permutation(len(runs))
    rows_to = np.argsort(np.concatenate([np.array(runs[i], np.int64) for i in order]))
    return Matrix(buffer, offset, stride, 1), rows_to


def _values(rng: np.random.Generator, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(size)).to(dtype)


def _integers(rng: np.random.Generator, size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(rng.integers(-8, 9, size)).to(dtype)


def _put(
    program: Program,
    rng: np.random.Generator,
    values: torch.Tensor,
    layout: str,
    misaligned: int,
) -> Matrix:
    """Puts a matrix into a buffer of its own, with NaNs in the gaps."""
    rows, cols = values.shape
    gap = int(rng.choice([1, 8]))
    strides = {
        "rows": (cols, 1),
        "padded": (cols + gap, 1),
        "columns": (1, rows),
        "spread": (2 * cols + gap, 2),
        "reversed": (-cols, 1),
    }
    row_stride, col_stride = strides[layout]
    offset = int(rng.choice([0, 8, 3])) + max(0, rows - 1) * max(0, -row_stride)
    index = offset + np.arange(rows)[:, None] * row_stride + np.arange(cols) * col_stride
    length = offset + max(0, rows - 1) * max(0, row_stride) + max(0, cols - 1) * col_stride + 1
    tensor = torch.full((length,), float("nan"), dtype=values.dtype)
    tensor[torch.from_numpy(index)] = values
    buffer = program.add_source(tensor, misaligned * values.dtype.itemsize)
    return Matrix(buffer, offset, row_stride, col_stride)
