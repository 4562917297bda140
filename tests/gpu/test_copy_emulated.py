"""The source of the copy and digest kernels, run by the emulator under random schedules.

Random block lists and buffers equal the CPU's copy and digest, bit for bit; no access strays and
none races. Each planted fault is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import emulated_build
import pytest
from emulated_build import CSRC, Edit, Program

HERE = Path(__file__).parent
CPU = (*sorted((CSRC / "cpu").glob("*.cpp")), *sorted((CSRC / "plan").glob("*.cpp")))
PROGRAMS = {
    "copy": Program(
        device=(CSRC / "cuda" / "copy.cu",),
        host=(
            HERE / "emulated" / "fuzz_copy.cpp",
            HERE / "emulated" / "copy_cases.cpp",
            HERE / "tile_table.cpp",
            *CPU,
        ),
    ),
    "digest": Program(
        device=(CSRC / "cuda" / "digest.cu",),
        host=(HERE / "emulated" / "fuzz_digest.cpp", *CPU),
    ),
}
CASES = {"plain": 40, "address": 25, "thread": 4}
"""Random cases in each build; ThreadSanitizer takes a second for each."""


@dataclass(frozen=True)
class Fault:
    """An edit that breaks a kernel, and the build whose run must fail with `symptom`."""

    name: str
    kernel: str
    edit: Edit
    symptom: str
    sanitizer: str = "plain"


DIFFERS = "differ from the CPU's"
FAULTS = [
    Fault(
        "the plan is read before it is written",
        "copy",
        Edit("copy.cu", "  __syncwarp();\n  return units;", "  return units;"),
        "data race",
        "thread",
    ),
    Fault(
        "the plan is overwritten while it is read",
        "copy",
        Edit("copy.cu", "    __syncwarp();\n    col +=", "    col +="),
        "data race",
        "thread",
    ),
    Fault(
        "weights are used before all are there",
        "digest",
        Edit("digest_parts.cuh", "  __syncthreads();\n", ""),
        "data race",
        "thread",
    ),
    Fault(
        "loads go past the last unit",
        "copy",
        Edit("copy_move.cuh", "min(unit + i * kWarpThreads, count - 1)", "unit + i * kWarpThreads"),
        "heap-buffer-overflow",
        "address",
    ),
    Fault(
        "a vector is not aligned",
        "copy",
        Edit("copy.cu", "min(log2_elements + side.log2_bytes, 4)", "2"),
        "misaligned access",
    ),
    Fault(
        "a strided row is taken for a contiguous one",
        "copy",
        Edit("copy.cu", "side.stride[2] == 1 && ", ""),
        DIFFERS,
    ),
    Fault(
        "the last column is left out",
        "copy",
        Edit("copy.cu", "col < tile.box.size[2];", "col + 1 < tile.box.size[2];"),
        DIFFERS,
    ),
    Fault(
        "units in flight are stored twice",
        "copy",
        Edit("copy_move.cuh", "in[next - 1] = in[next]", "in[next] = in[next - 1]"),
        DIFFERS,
    ),
    Fault(
        "a row begins beyond the end of the one before",
        "copy",
        Edit("unit_walk.cuh", "side.stride[1] - unit * row_units", "side.stride[1]"),
        "heap-buffer-overflow",
        "address",
    ),
    Fault(
        "a division is off by one",
        "copy",
        Edit("unit_walk.cuh", "/ divisor + 1", "/ divisor"),
        DIFFERS,
    ),
    Fault(
        "the high half of a word counts as the low one",
        "copy",
        Edit("digest_parts.cuh", "w[0] << (byte % 4 * 8)", "w[0]"),
        DIFFERS,
    ),
    Fault(
        "a lane's sum is left out",
        "copy",
        Edit("digest_parts.cuh", "lane_bits > 0", "lane_bits > 1"),
        DIFFERS,
    ),
    Fault(
        "a chunk is read past its buffer",
        "digest",
        Edit("digest.cu", "left < kChunkBytes ? left : kChunkBytes", "kChunkBytes"),
        "heap-buffer-overflow",
        "address",
    ),
    Fault(
        "a turn ends with its first buffer",
        "digest",
        Edit("digest.cu", "chunk < end && chunk < buffer_end", "chunk < end"),
        DIFFERS,
    ),
    Fault(
        "a warp skips another's turn",
        "digest",
        Edit("digest.cu", "chunk += gridDim.x * kWarps * kTurnChunks", "chunk += 2 * gridDim.x * kWarps * kTurnChunks"),
        DIFFERS,
    ),
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compile_ahead() -> None:
    """The faulty kernels are compiled while others run."""
    for kernel, sanitizer in product(PROGRAMS.values(), CASES):
        emulated_build.start(kernel, sanitizer)
    for fault in FAULTS:
        emulated_build.start(PROGRAMS[fault.kernel], fault.sanitizer, fault.edit)


@pytest.mark.parametrize("sanitizer", CASES)
@pytest.mark.parametrize("kernel", PROGRAMS)
def test_random_cases_equal_the_cpu(kernel: str, sanitizer: str) -> None:
    """Under random schedules; with AddressSanitizer and UBSan; with ThreadSanitizer."""
    cases = CASES[sanitizer]
    result = emulated_build.run(emulated_build.build(PROGRAMS[kernel], sanitizer), 0, cases)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{cases} ")
    if kernel == "copy":
        assert "with 29 variants" in result.stdout  # all


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_faults_are_noticed(fault: Fault) -> None:
    """By the same cases that the kernels pass."""
    executable = emulated_build.build(PROGRAMS[fault.kernel], fault.sanitizer, fault.edit)
    result = emulated_build.run(executable, 0, CASES[fault.sanitizer])
    assert result.returncode != 0, result.stdout
    assert fault.symptom in result.stderr
