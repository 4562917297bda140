"""Faults planted in the CPU merge kernel are found by the reference that the kernel itself passes."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from merge_cases import Program, layer, random_program
from merge_reference import faults
from merge_run import run
from numpy.typing import NDArray

from lora_refit.kernels.records import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Mutant:
    """A text that occurs once in a file of csrc/cpu, and its wrong replacement."""

    file: str
    right: str
    wrong: str
    simd: str = "auto"


MUTANTS = {
    "all of K comes from the first segment": Mutant(
        "merge_tile.cpp", "visit(job.segments[i], first)", "visit(job.segments[0], first)"
    ),
    "segments overlap in K": Mutant(
        "merge_tile.cpp", "first += job.segments[i].rank", "first = job.segments[i].rank"
    ),
    "the scale is dropped": Mutant("merge_tile.cpp", "? -1.0f : block.scale", "? -1.0f : 1.0f"),
    "the update is rounded before it is added": Mutant(
        "merge_avx2.cpp",
        "_mm256_fmadd_ps(scale, products, weights);",
        "_mm256_add_ps(round_floats<kOut>(_mm256_mul_ps(scale, products)), weights);",
    ),
    "the last column of a tile is missed": Mutant(
        "merge_tiles.cpp", "std::min(cols, block.cols - col)", "std::min(cols, block.cols - col - 1)"
    ),
    "the last k is missed": Mutant("merge_avx2.cpp", "k < job.depth", "k + 1 < job.depth"),
    "the first k is missed": Mutant("merge_portable.cpp", "k = 0", "k = 1", simd="portable"),
    "every tile takes B of the block's first rows": Mutant(
        "merge_tile.cpp", "tile.row + row, rows, b.data()", "row, rows, b.data()"
    ),
    "every group of columns takes the tile's first panels": Mutant(
        "merge_tile.cpp", "operands.a.data() + col / kPanelCols * tile.depth", "operands.a.data()"
    ),
    "the digest ignores where a run begins": Mutant(
        "merge_avx2.cpp", "weigh_vector(after, (first + done) /", "weigh_vector(after, done /"
    ),
    "tiles share one tally": Mutant("merge.cpp", "run.tallies[number]", "run.tallies[0]"),
    "the residual leaves out the rounding of fp32": Mutant(
        "merge_avx2.cpp",
        "? rounding_errors(scale, products, weights, sums)",
        "? _mm256_sub_ps(after, sums)",
    ),
    "nothing counts as changed": Mutant(
        "merge_avx2.cpp", "count_equal<kOut>(equal, before, after)",
        "count_equal<kOut>(equal, after, after)",
    ),
}  # fmt: skip

EXACT = layer(BF16, F32, F32, (40, 40), 16, integers=True)
PROGRAMS = [
    layer(BF16, BF16, BF16, (72, 264), 20),
    layer(F32, F32, F32, (70, 136), 12),
    layer(F16, F16, F16, (9, 31), 3),
    layer(BF16, BF16, BF16, (2, 2304), 4),  # tiles and groups of columns, several digest chunks
    layer(BF16, BF16, BF16, (1100, 20), 4),  # tiles of rows
    *(random_program(BF16, 3, seed, most_products=50_000) for seed in range(3)),
]


@dataclass(frozen=True)
class LibraryProgram:
    """_C.MergeProgram of a library made of merge_library.cpp."""

    library: ctypes.CDLL
    tables: tuple[NDArray[np.generic], ...]
    modules: int

    def run(
        self,
        src_addresses: NDArray[np.uint64],
        dst_addresses: NDArray[np.uint64],
        digests: NDArray[np.uint64],
        sums: NDArray[np.void],
        threads: int,
    ) -> None:
        blocks, segments, src_dtypes, src_sizes, dst_dtypes, dst_sizes = self.tables
        self.library.run_merge(
            *counted(blocks), *counted(segments),
            pointer(src_dtypes), *counted(src_sizes), pointer(dst_dtypes), *counted(dst_sizes),
            ctypes.c_int32(self.modules), pointer(src_addresses), pointer(dst_addresses),
            pointer(digests), pointer(sums), ctypes.c_int(threads),
        )  # fmt: skip


def pointer(array: NDArray[np.generic]) -> object:
    return array.ctypes.data_as(ctypes.c_void_p)


def counted(array: NDArray[np.generic]) -> tuple[object, ctypes.c_int64]:
    return pointer(array), ctypes.c_int64(len(array))


def all_faults(library: Path) -> list[str]:
    loaded = ctypes.CDLL(str(library))

    def make(
        blocks: bytes,
        segments: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        modules: int,
    ) -> LibraryProgram:
        tables = (
            np.frombuffer(blocks, MERGE_BLOCK_DTYPE),
            np.frombuffer(segments, MERGE_SEGMENT_DTYPE),
            np.array(src_dtypes, np.int32),
            np.array(src_sizes, np.int64),
            np.array(dst_dtypes, np.int32),
            np.array(dst_sizes, np.int64),
        )
        return LibraryProgram(loaded, tables, modules)

    def faults_of(program: Program, exact_delta: bool = False) -> list[str]:
        return faults(program, run(program, make=make), exact_delta)

    found = [fault for program in PROGRAMS for fault in faults_of(program)]
    return found + faults_of(EXACT, exact_delta=True)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The kernel as a library: of each mutant, and under "" of the kernel as it is."""
    folder = tmp_path_factory.mktemp("merge")
    parts = [HERE / "merge_library.cpp", *CSRC.glob("cpu/*.cpp"), *CSRC.glob("plan/*.cpp")]

    def compile_part(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        compile_cpp("-c", source, "-o", target)
        return target

    def mutant_library(name: str, number: int) -> Path:
        changed = compile_mutant(MUTANTS[name], folder / str(number))
        kept = [part for stem, part in objects.items() if stem != changed.stem]
        return link([*kept, changed], folder / f"mutant{number}.so")

    with ThreadPoolExecutor(max_workers=2) as pool:
        compiled = pool.map(compile_part, parts)
        objects = {source.stem: target for source, target in zip(parts, compiled, strict=True)}
        built = pool.map(mutant_library, MUTANTS, range(len(MUTANTS)))
        mutants = dict(zip(MUTANTS, built, strict=True))
    yield {"": link(objects.values(), folder / "kernel.so"), **mutants}


def compile_mutant(mutant: Mutant, folder: Path) -> Path:
    original = (CSRC / "cpu" / mutant.file).read_text()
    assert original.count(mutant.right) == 1, f"{mutant.file} has not exactly one {mutant.right!r}"
    folder.mkdir()
    changed = folder / mutant.file
    changed.write_text(original.replace(mutant.right, mutant.wrong))
    target = folder / f"{changed.stem}.o"
    compile_cpp("-c", changed, "-o", target)
    return target


def link(objects: Sequence[Path], library: Path) -> Path:
    compile_cpp("-shared", *objects, "-o", library)
    return library


def compile_cpp(*arguments: object) -> None:
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O0", "-w", "-fPIC", "-pthread"]
    subprocess.run([*command, *map(str, arguments), f"-I{CSRC}"], check=True)


@pytest.mark.parametrize("simd", ["auto", "portable"])
def test_the_kernel_has_no_faults(
    libraries: dict[str, Path], simd: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: the programs that show the mutants are right without them."""
    monkeypatch.setenv("LORA_REFIT_SIMD", simd)
    assert all_faults(libraries[""]) == []


@pytest.mark.parametrize("name", list(MUTANTS))
def test_mutants_are_found(
    libraries: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a wrong value, a wrong digest, wrong sums, or a byte that must not change."""
    monkeypatch.setenv("LORA_REFIT_SIMD", MUTANTS[name].simd)
    assert all_faults(libraries[name]) != []
