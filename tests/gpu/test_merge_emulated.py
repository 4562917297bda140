"""The source of the merge kernels, run by the emulator under random schedules.

Results lie within the bound of merge_reference.py, digests are exact, nothing outside the blocks
changes, no access strays and none races. Each planted fault is noticed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import emulated_build
import pytest
import torch
from emulated_build import Edit
from merge_cases import DTYPES, LAYOUTS, Program, layer, random_program
from merge_emulated import EXECUTABLE, EmulatorError, Launch, run
from merge_reference import faults

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMALL = 20_000
"""Products of a module under a sanitizer, which is slow."""


def random_programs(seeds: range, most_products: int) -> list[Program]:
    return [
        random_program(DTYPES[seed % len(DTYPES)], 4, seed, most_products=most_products)
        for seed in seeds
    ]


def explicit_programs() -> list[Program]:
    """All dtypes, all layouts, and sizes around those of tiles, K-blocks and vectors."""
    dtypes = [
        layer(*choice, (66, 40), 9, seed=i)
        for i, choice in enumerate(itertools.product(DTYPES, DTYPES, DTYPES))
    ]
    layouts = [layer(BF16, BF16, BF16, (70, 40), 24, layout=layout) for layout in set(LAYOUTS)]
    sizes = [
        layer(BF16, BF16, BF16, (1, 1), 1),
        layer(F32, F32, F32, (1, 1), 1),
        layer(F16, F16, F16, (65, 129), 5, misaligned=1),
        layer(BF16, F32, BF16, (33, 256), 128, misaligned=8),
        layer(BF16, BF16, BF16, (72, 136), 144),
        layer(F32, BF16, F32, (72, 136), 72),
        layer(F32, F16, BF16, (3, 5), 65),
    ]
    return [*dtypes, *layouts, *sizes]


def check(executable: Path, programs: list[Program], launch: Launch) -> None:
    for number, (program, result) in enumerate(
        zip(programs, run(executable, programs, launch), strict=True)
    ):
        assert faults(program, result) == [], f"program {number}"


@pytest.fixture(scope="module", autouse=True)
def compile_ahead() -> None:
    """All executables at once, in the background."""
    for sanitizer in ("plain", "address", "thread"):
        emulated_build.start(EXECUTABLE, sanitizer)
    for fault in FAULTS:
        emulated_build.start(EXECUTABLE, fault.sanitizer, fault.edit)


@cache
def executable(sanitizer: str) -> Path:
    return emulated_build.build(EXECUTABLE, sanitizer)


def test_every_dtype_layout_and_size() -> None:
    """W, W' and factors of fp32, fp16 and bf16 in all combinations; ranks below and above a
    K-block; one element; odd sizes at odd addresses."""
    check(executable("plain"), explicit_programs(), Launch(grid=2, thread_blocks=3))


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_programs(seed: int) -> None:
    """Shards over 1 to 3 ranks along rows, columns or K; rows that move; strided factors; strips of
    all lengths; threads in random order."""
    programs = random_programs(range(4 * seed, 4 * seed + 4), 60_000)
    check(executable("plain"), programs, Launch(grid=seed, thread_blocks=3 * seed, seed=seed))


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_no_access_strays_and_none_races(sanitizer: str) -> None:
    """Under AddressSanitizer and UBSan, and under ThreadSanitizer."""
    seeds = range(100, 101) if sanitizer == "thread" else range(100, 103)
    programs = [
        *random_programs(seeds, SMALL),
        layer(BF16, BF16, BF16, (66, 136), 8),
        layer(F32, F32, BF16, (66, 7), 4),
        layer(BF16, BF16, BF16, (70, 8), 130),
    ]
    check(executable(sanitizer), programs, Launch(grid=2, seed=5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_factors_the_weight_is_cast(dtype: torch.dtype) -> None:
    """Bit for bit, -0 too: blocks without segments, and with segments of rank 0."""
    program = layer(F32, F32, dtype, (40, 72), 4)
    weight = program.sources[program.blocks["weight"][0]]
    weight.memory.view("<f4")[::3] = -0.0
    for field, array in (("segment_count", program.blocks), ("rank", program.segments)):
        emptied = array.copy()
        array[field] = 0
        (result,) = run(executable("plain"), [program], Launch())
        array[:] = emptied
        offset = int(program.blocks["weight_offset"][0])
        expected = weight.read()[offset:][: 40 * 72].to(dtype)
        got = result.destinations[0].read()
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
        assert result.sums["delta"][0] == 0 and result.sums["changed"][0] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_integers_are_exact(dtype: torch.dtype) -> None:
    """Where the update is exact, so is every sum in fp32, and the residual is what rounding lost."""
    programs = [layer(adapter, F32, dtype, (40, 40), 16, integers=True) for adapter in DTYPES]
    for program, result in zip(programs, run(executable("plain"), programs, Launch()), strict=True):
        assert faults(program, result, exact_delta=True) == []


def test_an_empty_program_does_nothing() -> None:
    """Blocks without rows or columns leave digests and sums at zero."""
    program = layer(BF16, BF16, BF16, (8, 8), 2)
    program.blocks["rows"] = 0
    (result,) = run(executable("plain"), [program], Launch())
    assert result.digests == [0] and result.sums["elements"][0] == 0
    assert result.destinations[0].outside_is_untouched()


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_nans_and_overflow(dtype: torch.dtype) -> None:
    """A NaN stays one, an infinity its sign; what is beyond the dtype becomes infinite."""
    program = layer(BF16, dtype, dtype, (16, 64), 4)
    offset = int(program.blocks["weight_offset"][0])
    weight = program.sources[program.blocks["weight"][0]]
    values = weight.read()
    special = torch.tensor([float("nan"), float("inf"), float("-inf"), torch.finfo(dtype).max])
    values[offset : offset + 16 * 64] = special.to(dtype).repeat(16 * 16)
    program.sources[program.blocks["weight"][0]] = type(weight)(values, weight.misaligned)
    (result,) = run(executable("plain"), [program], Launch())
    got = result.destinations[0].read().view(-1, 4)
    assert got[:, 0].isnan().all()
    assert (got[:, 1] == float("inf")).all() and (got[:, 2] == float("-inf")).all()
    assert (got[:, 3] > torch.finfo(dtype).max / 2).all()


@dataclass(frozen=True)
class Fault:
    """An edit that breaks the kernel, and the build whose run shows it."""

    name: str
    edit: Edit
    sanitizer: str = "plain"


FAULTS = [
    Fault(
        "products are made before all operands are there",
        Edit("merge.cu", "wait_for_copies();\n  __syncthreads();", "wait_for_copies();"),
    ),
    Fault(
        "operands are overwritten while others multiply",
        Edit("merge.cu", "__syncthreads();  // the tile before,", "// the tile before,"),
        "thread",
    ),
    Fault(
        "copies are not waited for",
        Edit("merge.cu", "ptx::wait_for_copies();", ""),
    ),
    Fault(
        "a lane takes the products of another column",
        Edit("merge_multiply.cuh", "tiles[r / 2][i / 2]", "tiles[r / 2][3 - i / 2]"),
    ),
    Fault(
        "rows beyond the strip are written",
        Edit("merge_write.cuh", "if (!octets.has(octet)) break;\n    if", "if"),
        "address",
    ),
    Fault(
        "columns beyond the tile are written",
        Edit("merge_edge.cuh", "if (col >= tile.cols) return;", ""),
        "address",
    ),
    Fault(
        "a segment's part of A begins at its first k",
        Edit("merge_operands.cuh", "run.first * s.a_k_stride", "0"),
    ),
    Fault(
        "segments overlap in shared memory",
        Edit("merge_stage.cuh", "segment_first += rank;", "segment_first += rank / 2;"),
    ),
    Fault(
        "the padding of K is not zeroed",
        Edit("merge_operands.cuh", "ColLayout<kAdapter>>(cols(), depth(k), padded_depth(k))",
             "ColLayout<kAdapter>>(cols(), depth(k), depth(k))"),
    ),
    Fault(
        "small * big of a tf32 product is dropped",
        Edit("merge_multiply.cuh",
             "ptx::mma_tf32(products.tiles[m][n], b_small[m], a_big);", ""),
    ),
    Fault(
        "bits below tf32 count as the value's",
        Edit("merge_multiply.cuh", "(bits + 0x1000u) & kTf32", "bits + 0x1000u"),
    ),
    Fault(
        "chunk weights of the tile before are kept",
        Edit("merge_tally.cuh", "step != 0 && first == (at - step) / kChunkBytes", "step != 0"),
    ),
    Fault(
        "the residual leaves out the rounding of fp32",
        Edit("merge_tally.cuh", "(weight - weight_used) + ptx::", "ptx::"),
    ),
]  # fmt: skip


def fault_programs(sanitizer: str) -> list[Program]:
    """A few of the programs that the kernels pass."""
    programs = [
        layer(BF16, BF16, BF16, (72, 264), 20),
        layer(F32, F32, F32, (70, 136), 12),
        layer(BF16, BF16, F32, (2, 4608), 8),  # rows of several digest chunks
        layer(F16, F16, F16, (9, 31), 3),
        layer(BF16, BF16, BF16, (9, 16), 130),
        *random_programs(range(103, 106), SMALL),  # one has several segments
    ]
    return programs[:2] if sanitizer == "thread" else programs


EXACT = layer(BF16, F32, F32, (40, 40), 16, integers=True)
FAULT_LAUNCH = Launch(grid=2, thread_blocks=1, seed=7)


def all_faults(executable: Path, sanitizer: str) -> list[str]:
    programs = fault_programs(sanitizer)
    *results, exact = run(executable, [*programs, EXACT], FAULT_LAUNCH)
    found = [faults(program, result) for program, result in zip(programs, results, strict=True)]
    return [*itertools.chain(*found), *faults(EXACT, exact, exact_delta=True)]


def test_programs_that_show_faults_are_right_without_them() -> None:
    assert all_faults(executable("plain"), "plain") == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_noticed(fault: Fault) -> None:
    """By wrong results, or by the sanitizer."""
    faulty = emulated_build.build(EXECUTABLE, fault.sanitizer, fault.edit)
    if fault.sanitizer == "plain":
        assert all_faults(faulty, fault.sanitizer) != []
    else:
        with pytest.raises(EmulatorError, match="data race|heap-buffer-overflow"):
            all_faults(faulty, fault.sanitizer)
