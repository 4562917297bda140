"""The CPU merge kernel: within a bound of fp64 (merge_reference.py), and the same bits whatever the
shards, the threads and the instruction set."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from block_reference import BITS, Buffer, digest_of_memory, poisoned
from merge_cases import DTYPES, LAYOUTS, Matrix, Program, layer, random_program
from merge_reference import Result, faults
from merge_run import run

from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.kernels import BufferType, MergeKernel

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SIMD_PATHS = ["auto", "portable"]


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread() -> Iterator[None]:
    """The reference works on small tensors, which torch's own threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=SIMD_PATHS)
def simd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LORA_REFIT_SIMD", request.param)
    return request.param


def explicit_programs() -> list[Program]:
    """All dtypes, all layouts, and sizes around those of vectors, panels, tiles and chunks."""
    dtypes = [
        layer(*choice, (13, 40), 9, seed=i)
        for i, choice in enumerate(itertools.product(DTYPES, DTYPES, DTYPES))
    ]
    layouts = [layer(BF16, BF16, BF16, (70, 40), 24, layout=layout) for layout in set(LAYOUTS)]
    ranks = [layer(BF16, F32, BF16, (7, 33), rank) for rank in (1, 2, 3, 31, 64, 128, 256, 700)]
    sizes = [
        layer(BF16, BF16, BF16, (1, 1), 1),
        layer(F32, F32, F32, (1, 1), 1),
        layer(F16, F16, F16, (65, 129), 5, misaligned=1),
        layer(BF16, BF16, BF16, (3, 2049), 2, misaligned=1),  # column tiles, and a last column
        layer(BF16, F32, F32, (2, 4200), 16, misaligned=1),
        layer(BF16, BF16, BF16, (1021, 17), 3),  # row tiles, and a last row
        layer(F32, F16, BF16, (3, 17), 2100),  # a tile of one panel, and one of one column
    ]
    return [*dtypes, *layouts, *ranks, *sizes]


def test_every_dtype_layout_and_size(simd: str) -> None:
    """W, W' and factors of fp32, fp16 and bf16 in all combinations; ranks 1 to 2100; transposed,
    padded, spread and reversed factors; odd sizes at odd addresses; several tiles."""
    for number, program in enumerate(explicit_programs()):
        assert faults(program, run(program)) == [], f"program {number}"


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(simd: str, seed: int) -> None:
    """Shards over 1 to 3 ranks along rows, columns or K; rows that move; strided factors."""
    program = random_program(DTYPES[seed % 3], 5, seed)
    assert faults(program, run(program, threads=1 + seed % 3)) == []


def test_simd_paths_write_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts with different CPUs must compute the same digest."""
    for program in [*explicit_programs(), *(random_program(BF16, 5, seed) for seed in range(5))]:
        results = []
        for path in SIMD_PATHS:
            monkeypatch.setenv("LORA_REFIT_SIMD", path)
            results.append(run(program))
        assert same_memory(*results)
        assert results[0].digests == results[1].digests
        assert np.array_equal(results[0].sums["changed"], results[1].sums["changed"])


def same_memory(first: Result, second: Result) -> bool:
    pairs = zip(first.destinations, second.destinations, strict=True)
    return all(np.array_equal(a.memory, b.memory) for a, b in pairs)


def test_threads_do_not_change_anything(simd: str) -> None:
    """One to eight threads write the same bytes, digests and sums, to the last bit."""
    for program in [layer(BF16, BF16, BF16, (600, 4100), 2), random_program(F32, 6, 3)]:
        expected = run(program)
        for threads in (0, 2, 3, 8):
            result = run(program, threads)
            assert same_memory(result, expected)
            assert result.digests == expected.digests
            assert result.sums.tobytes() == expected.sums.tobytes()


def test_concurrent_runs_of_one_program() -> None:
    """Four Python threads merge the same program into their own destinations."""
    program = layer(BF16, BF16, BF16, (600, 4100), 8)
    expected = run(program)
    results: list[Result] = []
    threads = [
        threading.Thread(target=lambda: results.append(run(program, threads=2))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.digests for result in results] == [expected.digests] * 4
    assert all(result.sums.tobytes() == expected.sums.tobytes() for result in results)


ROWS, COLS, RANK = 48, 72, 12


class Factors:
    """W, B and A of one layer, and programs that read them whole or in shards."""

    def __init__(self, adapter: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        self.weight = torch.randn(ROWS, COLS, generator=generator).to(BF16)
        self.b = torch.randn(ROWS, RANK, generator=generator).to(adapter)
        self.a = torch.randn(RANK, COLS, generator=generator).to(adapter)

    def merged(
        self,
        b_cuts: tuple[int, int] = (1, 1),
        a_cuts: tuple[int, int] = (1, 1),
        row_runs: Sequence[tuple[int, int, int]] = ((0, ROWS, 0),),
    ) -> Result:
        """Shards (rows, columns) of B and A are buffers of their own. A run of rows is its first
        row, their number, and the first row of W' where they go."""
        program = Program(modules=1)
        weight = put(program, self.weight)
        out = program.add_destination(poisoned(BF16, ROWS * COLS))
        b_shards = [[put(program, s) for s in row] for row in shards(self.b, b_cuts)]
        a_shards = [[put(program, s) for s in row] for row in shards(self.a, a_cuts)]
        depth = RANK // a_cuts[0]
        cols = COLS // a_cuts[1]
        for first, count, to in row_runs:
            b_row, skipped = divmod(first, ROWS // b_cuts[0])
            for j in range(a_cuts[1]):
                segments = program.add_segments(
                    [
                        (at(b_shards[b_row][k], skipped), a_shards[k][j], depth)
                        for k in range(a_cuts[0])
                    ]
                )
                program.add_block(
                    Matrix(weight.buffer, first * COLS + j * cols, COLS, 1),
                    Matrix(out, to * COLS + j * cols, COLS, 1),
                    (count, cols),
                    segments,
                    0,
                    0.25,
                )
        result = run(program)
        assert faults(program, result) == []
        return result


def shards(matrix: torch.Tensor, cuts: tuple[int, int]) -> list[tuple[torch.Tensor, ...]]:
    return [row.chunk(cuts[1], 1) for row in matrix.chunk(cuts[0], 0)]


def put(program: Program, matrix: torch.Tensor) -> Matrix:
    return Matrix(program.add_source(matrix.flatten()), 0, matrix.shape[1], 1)


def at(matrix: Matrix, row: int) -> Matrix:
    return Matrix(matrix.buffer, row * matrix.row_stride, matrix.row_stride, 1)


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("adapter", DTYPES)
def test_tensor_parallel_shards_merge_to_the_same_bits(tp: int, adapter: torch.dtype) -> None:
    """Column parallel: B over rows, A over K. Row parallel: A over columns, B over K or rows."""
    factors = Factors(adapter)
    whole = factors.merged()
    rows = ROWS // tp
    runs = [(i * rows, rows, i * rows) for i in range(tp)]
    column_parallel = factors.merged(b_cuts=(tp, tp), a_cuts=(tp, 1), row_runs=runs)
    row_parallel = factors.merged(b_cuts=(tp, tp), a_cuts=(tp, tp), row_runs=runs)
    for sharded in (column_parallel, row_parallel):
        assert same_memory(sharded, whole)
        assert sharded.digests == whole.digests


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_fused_qkv_rows_move(tp: int) -> None:
    """Megatron interleaves q, k and v by group, vLLM wants q of all groups, then k, then v."""
    factors = Factors(BF16)
    groups, head, queries = 6, 2, 2
    per_group = (queries + 2) * head
    assert groups * per_group == ROWS
    runs = []
    for group in range(groups):
        first = group * per_group
        q_rows = queries * head
        runs += [
            (first, q_rows, group * q_rows),
            (first + q_rows, head, groups * q_rows + group * head),
            (first + q_rows + head, head, groups * (q_rows + head) + group * head),
        ]
    order = np.concatenate(
        [np.arange(f, f + n) for f, n, _ in sorted(runs, key=lambda row_run: row_run[2])]
    )
    fused = factors.merged(b_cuts=(tp, 1), row_runs=runs).destinations[0].read().view(ROWS, COLS)
    straight = factors.merged().destinations[0].read().view(ROWS, COLS)
    assert torch.equal(fused.view(torch.int16), straight[torch.from_numpy(order)].view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_factors_the_weight_is_cast(simd: str, dtype: torch.dtype) -> None:
    """Bit for bit, -0 too: blocks without segments, and with segments of rank 0."""
    program = layer(F32, F32, dtype, (40, 72), 4)
    weight = program.sources[program.blocks["weight"][0]]
    weight.memory.view("<f4")[::3] = -0.0
    for field, array in (("segment_count", program.blocks), ("rank", program.segments)):
        emptied = array.copy()
        array[field] = 0
        result = run(program)
        array[:] = emptied
        offset = int(program.blocks["weight_offset"][0])
        expected = weight.read()[offset:][: 40 * 72].to(dtype)
        got = result.destinations[0].read()
        assert torch.equal(got.view(BITS[dtype]), expected.view(BITS[dtype]))
        assert result.sums["delta"][0] == 0 and result.sums["changed"][0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_updates_round_once(simd: str, dtype: torch.dtype) -> None:
    """Where the update is exact in fp32, W' equals torch's eager merge bit for bit, for each dtype
    of the factors, and so does the residual."""
    for adapter in DTYPES:
        program = layer(adapter, F32, dtype, (40, 40), 16, integers=True)
        result = run(program)
        assert faults(program, result, exact_delta=True) == []
        block, segment = program.blocks[0], program.segments[0]
        b, a = (
            dense(program, segment[f], segment[f"{f}_offset"], size)
            for f, size in (("b", (40, 16)), ("a", (16, 40)))
        )
        weight = dense(program, block["weight"], block["weight_offset"], (40, 40))
        expected = (weight + float(block["scale"]) * (b.float() @ a.float())).to(dtype)
        got = result.destinations[0].read().view(40, 40)
        assert torch.equal(got.view(BITS[dtype]), expected.view(BITS[dtype]))


def dense(program: Program, buffer: int, offset: int, size: tuple[int, int]) -> torch.Tensor:
    return program.sources[buffer].tensor[int(offset) :][: size[0] * size[1]].view(size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nans_and_overflow(simd: str, dtype: torch.dtype) -> None:
    """A NaN stays one, an infinity its sign; what is beyond the dtype becomes infinite."""
    program = layer(BF16, dtype, dtype, (16, 64), 4)
    offset = int(program.blocks["weight_offset"][0])
    weight = program.sources[program.blocks["weight"][0]]
    values = weight.read()
    largest = torch.finfo(dtype).max
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), largest]).to(dtype)
    values[offset : offset + 16 * 64] = special.repeat(16 * 16)
    program.sources[program.blocks["weight"][0]] = Buffer(values, weight.misaligned)
    result = run(program)
    got = result.destinations[0].read().view(-1, 4)
    assert got[:, 0].isnan().all()
    assert (got[:, 1] == float("inf")).all() and (got[:, 2] == float("-inf")).all()
    assert (got[:, 3] > largest / 2).all()
    assert result.digests == digest_of_memory(result.destinations)


def test_an_empty_program_does_nothing() -> None:
    """Blocks without rows or columns leave digests and sums at zero."""
    for field in ("rows", "cols"):
        program = layer(BF16, BF16, BF16, (8, 8), 2)
        program.blocks[field] = 0
        result = run(program)
        assert result.digests == [0] and result.sums.tobytes() == bytes(32)
        assert (result.destinations[0].memory == poisoned(BF16, 64).view(torch.uint8).numpy()).all()


def merge_kernel(program: Program) -> MergeKernel:
    types = [
        [BufferType(buffer.tensor.dtype, buffer.tensor.numel()) for buffer in side]
        for side in (program.sources, program.destinations)
    ]
    return MergeKernel(program.blocks, program.segments, *types, program.modules)


def test_the_kernel_merges_tensors() -> None:
    """lora_refit.kernels.MergeKernel on the CPU, its default: the same as the extension."""
    program = layer(BF16, BF16, BF16, (30, 50), 8)
    kernel = merge_kernel(program)
    out = program.destinations[0].tensor.clone()
    merged = kernel.merge([source.tensor for source in program.sources], [out])
    expected = run(program)
    assert torch.equal(out.view(torch.int16), expected.destinations[0].read().view(torch.int16))
    assert merged.digests.tolist() == expected.digests
    assert merged.sums.tobytes() == expected.sums.tobytes()
    assert kernel.launches == 1 and kernel.bytes_written == 30 * 50 * 2


@pytest.mark.parametrize(
    ("table", "field", "value", "message"),
    [
        ("blocks", "rows", 31, "block 0: weight elements"),
        ("blocks", "scale", float("inf"), "block 0: the scale is not a finite number"),
        ("blocks", "module", 1, "block 0: module 1 does not exist; there are 1"),
        ("blocks", "segment_count", 2, "block 0: segments 0 to 1 do not exist"),
        ("segments", "rank", 9, "segment 0: "),
        ("segments", "rank", 1 << 21, "add up to more than 1048576"),
        ("segments", "a", 2, "A buffer 2 is fp32, but A and B of this program begin with bf16"),
    ],
)
def test_bad_programs_are_refused(table: str, field: str, value: float, message: str) -> None:
    """A program that would leave its buffers, or that contradicts itself, is never made."""
    program = layer(BF16, F32, BF16, (30, 50), 8)
    getattr(program, table)[field] = value
    with pytest.raises(LayoutMismatch, match=message):
        merge_kernel(program)


def test_bad_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing buffer, and a bad environment, stop a run before it writes."""
    program = layer(BF16, F32, BF16, (30, 50), 8)
    kernel = merge_kernel(program)
    nothing = np.zeros(3, np.uint64)
    with pytest.raises(LayoutMismatch, match="source buffer 0 has address 0"):
        kernel.run(nothing, np.ones(1, np.uint64))
    with pytest.raises(ValueError, match="threads=65 must be from 0 to 64"):
        run(program, threads=65)
    monkeypatch.setenv("LORA_REFIT_SIMD", "sse")
    with pytest.raises(TransportUnavailable, match="LORA_REFIT_SIMD=sse is not known"):
        merge_kernel(program)
