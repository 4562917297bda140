"""Runs merge programs through the emulator: the kernel's own source, compiled by g++."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import emulated_build
import numpy as np
from merge_cases import Program
from merge_plan import strips
from merge_reference import Result

from lora_refit.kernels import DTYPE_CODES
from lora_refit.kernels.records import MERGE_SUMS_DTYPE

HERE = Path(__file__).parent
EXECUTABLE = emulated_build.Program(
    device=(emulated_build.CSRC / "cuda" / "merge.cu",),
    host=(HERE / "emulated" / "run_merge.cpp",),
)


@dataclass(frozen=True)
class Launch:
    """How a program is run.

    grid: thread blocks; fewer than the strips, so that each takes several.
    thread_blocks: how many the strips are cut for.
    seed: of a random order of threads and blocks; 0 runs them in order.
    """

    grid: int = 3
    thread_blocks: int = 5
    seed: int = 0


class EmulatorError(RuntimeError):
    """The emulator or a sanitizer reports the kernel; its text says what."""


def run(executable: Path, programs: Sequence[Program], launch: Launch) -> list[Result]:
    """Merges all programs, each in one launch, with a build of `EXECUTABLE`.

    Raises:
        EmulatorError: a launch failed, or a sanitizer objects.
    """
    with tempfile.TemporaryDirectory() as folder:
        inputs, outputs = Path(folder) / "programs", Path(folder) / "results"
        inputs.write_bytes(b"".join(_packed(program, launch) for program in programs))
        finished = emulated_build.run(executable, inputs, outputs)
        if finished.returncode != 0:
            raise EmulatorError(finished.stderr)
        arrays = _arrays(outputs.read_bytes())
        return [_result(program, arrays) for program in programs]


def _packed(program: Program, launch: Launch) -> bytes:
    adapter = program.sources[program.segments["b"][0]] if len(program.segments) else None
    code = DTYPE_CODES[adapter.tensor.dtype] if adapter else 0
    arrays = [
        np.array([code, launch.grid, launch.seed], np.int64),
        strips(program, launch.thread_blocks),
        program.blocks,
        program.segments,
    ]
    sides = (program.sources, program.destinations)
    for side in sides:
        arrays.append(np.array([DTYPE_CODES[buffer.tensor.dtype] for buffer in side], np.int32))
    arrays.append(np.zeros(program.modules, MERGE_SUMS_DTYPE))
    for side in sides:
        arrays.append(np.array([buffer.misaligned for buffer in side], np.int64))
        arrays += [buffer.memory for buffer in side]
    return b"".join(np.int64(array.nbytes).tobytes() + array.tobytes() for array in arrays)


def _arrays(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        size = int(np.frombuffer(data, np.int64, 1, at)[0])
        yield data[at + 8 : at + 8 + size]
        at += 8 + size


def _result(program: Program, arrays: Iterator[bytes]) -> Result:
    destinations = program.fresh_destinations()
    for buffer in destinations:
        buffer.memory[:] = np.frombuffer(next(arrays), np.uint8)
    digests = np.frombuffer(next(arrays), np.uint64).tolist()
    return Result(destinations, digests, np.frombuffer(next(arrays), MERGE_SUMS_DTYPE))
