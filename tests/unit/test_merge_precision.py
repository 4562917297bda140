"""Merges as two or three tensor-parallel ranks make them, against fp64: every element within half
an ulp of the weights' dtype plus the bound of an fp32 accumulation (merge_reference.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from block_reference import addresses_of, poisoned
from merge_cases import DTYPES, Matrix, Program, layer
from merge_reference import faults
from merge_run import run, shapes

from lora_refit import _C
from lora_refit.kernels.records import MERGE_SUMS_DTYPE

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS, COLS = 39, 50
RANKS = [1, 3, 8, 16, 31, 64, 128, 255, 256]
SCALINGS = {
    "odd alpha": lambda lora_rank: 7 / lora_rank,
    "rsLoRA": lambda lora_rank: 11 / math.sqrt(lora_rank),
}

QUIET_NAN = {BF16: 0x7FC0, F16: 0x7E00, F32: 0x7FC00000}


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors, which torch's own threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Shards:
    """W, B and A of one layer, cut for `tp` ranks into parts that may differ by one row, column or
    rank, and the whole W' that the ranks write together."""

    def __init__(self, dtype: torch.dtype, lora_rank: int, tp: int) -> None:
        generator = torch.Generator().manual_seed(1000 * lora_rank + tp)

        def normal(rows: int, cols: int, deviation: float) -> torch.Tensor:
            return (deviation * torch.randn(rows, cols, generator=generator)).to(dtype)

        self.weight = normal(ROWS, COLS, 0.02)
        self.b = normal(ROWS, lora_rank, 0.02)
        self.a = normal(lora_rank, COLS, 1.0)
        self.tp = tp
        self.program = Program(modules=tp)
        self.out = self.program.add_destination(poisoned(dtype, ROWS * COLS))

    def column_parallel(self, scale: float) -> Program:
        """A rank has its rows of W and B; A it reads from every rank, which has a part of its K."""
        weights = [self._put(part) for part in self.weight.tensor_split(self.tp)]
        b_parts = [self._put(part) for part in self.b.tensor_split(self.tp)]
        a_parts = [self._put(part) for part in self.a.tensor_split(self.tp)]
        depths = [len(part) for part in self.a.tensor_split(self.tp)]
        starts = np.cumsum([0, *depths])
        first_row = 0
        for rank, part in enumerate(self.weight.tensor_split(self.tp)):
            b = b_parts[rank]
            segments = [
                (Matrix(b.buffer, int(start), b.row_stride, 1), a, depth)
                for a, start, depth in zip(a_parts, starts, depths, strict=False)
            ]
            self.program.add_block(
                weights[rank], self._to(first_row, 0), tuple(part.shape),
                self.program.add_segments(segments), rank, scale,
            )  # fmt: skip
            first_row += len(part)
        return self.program

    def row_parallel(self, scale: float) -> Program:
        """A rank has its columns of W and A; B it reads from every rank, which has some rows."""
        lora_rank = len(self.a)
        b_parts = self.b.tensor_split(self.tp)
        b_at = [self._put(part) for part in b_parts]
        first_col = 0
        for rank, part in enumerate(self.weight.tensor_split(self.tp, 1)):
            weight, a = self._put(part), self._put(self.a.tensor_split(self.tp, 1)[rank])
            first_row = 0
            for b, rows in zip(b_at, map(len, b_parts), strict=True):
                offset = first_row * weight.row_stride
                self.program.add_block(
                    Matrix(weight.buffer, offset, weight.row_stride, 1),
                    self._to(first_row, first_col), (rows, part.shape[1]),
                    self.program.add_segments([(b, a, lora_rank)]), rank, scale,
                )  # fmt: skip
                first_row += rows
            first_col += part.shape[1]
        return self.program

    def _put(self, part: torch.Tensor) -> Matrix:
        return Matrix(self.program.add_source(part.flatten()), 0, part.shape[1], 1)

    def _to(self, row: int, col: int) -> Matrix:
        return Matrix(self.out, row * COLS + col, COLS, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("parallel", ["column_parallel", "row_parallel"])
def test_every_element_is_rounded_once_from_an_fp32_sum(
    dtype: torch.dtype, tp: int, parallel: str
) -> None:
    """Ranks 1 to 256, uneven over the shards; alpha 7, and rsLoRA with alpha 11."""
    for lora_rank, scaling in itertools.product(RANKS, SCALINGS):
        shards = Shards(dtype, lora_rank, tp)
        program = getattr(shards, parallel)(SCALINGS[scaling](lora_rank))
        assert faults(program, run(program)) == [], f"rank {lora_rank}, {scaling}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_merges_start_from_the_same_base(dtype: torch.dtype) -> None:
    """The kernel never writes W, A or B, and what it writes does not drift."""
    program = Shards(dtype, 16, 2).column_parallel(0.5)
    before = [source.memory.copy() for source in program.sources]
    destinations = program.fresh_destinations()
    compiled = _C.MergeProgram(
        program.blocks.tobytes(), program.segments.tobytes(), *shapes(program.sources),
        *shapes(destinations), program.modules,
    )  # fmt: skip
    addresses = addresses_of(program.sources), addresses_of(destinations)
    found = set()
    for _ in range(1000):
        digests = np.zeros(1, np.uint64)
        sums = np.zeros(program.modules, MERGE_SUMS_DTYPE)
        compiled.run(*addresses, digests, sums, 1)
        found.add((digests.tobytes(), sums.tobytes()))
    assert len(found) == 1
    for source, memory in zip(program.sources, before, strict=True):
        assert np.array_equal(source.memory, memory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nans_have_the_same_bits_on_every_cpu(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few NaNs of different payloads among many numbers: vectors and plain loops agree on each
    byte, on the digest, and on what changed; numbers beside NaNs are right."""
    program = layer(BF16, dtype, dtype, (7, 2100), 16)
    weight = program.sources[program.blocks["weight"][0]]
    bits = weight.memory.view(f"<u{dtype.itemsize}")
    for payload, index in enumerate((100, 1700, 4321, 8000)):
        bits[index] = QUIET_NAN[dtype] + payload
    results = []
    for simd in ("auto", "portable"):
        monkeypatch.setenv("LORA_REFIT_SIMD", simd)
        results.append(run(program))
    fast, plain = results
    assert np.array_equal(fast.destinations[0].memory, plain.destinations[0].memory)
    assert fast.digests == plain.digests
    assert fast.sums["changed"] == plain.sums["changed"]
    assert int(fast.destinations[0].read().isnan().sum()) == 4
