"""What the compiled kernels cost, written to docs/cuda-costs.md.

    python tests/gpu/cost_sheet.py

Registers and shared memory are read from the shipped machine code, instructions are counted while
the shipped PTX runs on the simulator. Times are the model at the end of the sheet, not measurements.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests/unit"))

import numpy as np  # noqa: E402
import shipped  # noqa: E402
import torch  # noqa: E402
from block_reference import Buffer, block, poisoned, random_values  # noqa: E402
from copy_cases import Case  # noqa: E402
from merge_cases import Matrix, Program  # noqa: E402
from merge_emulated import Launch  # noqa: E402
from merge_simulated import SHARED_BYTES, counted_run  # noqa: E402
from sass import disassemble  # noqa: E402
from simulated import run_copy  # noqa: E402

SHEET = ROOT / "docs/cuda-costs.md"
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Gpu:
    """An SM's limits, from the CUDA programming guide's table of compute capabilities."""

    shared_kib: int
    threads: int


GPUS = {
    80: Gpu(164, 2048),
    86: Gpu(100, 1536),
    89: Gpu(100, 1536),
    90: Gpu(228, 2048),
    100: Gpu(228, 2048),
    120: Gpu(100, 1536),
}
THREADS = 256
REGISTERS = 65536
SHARED_RESERVED = 1024  # per block, by CUDA; cuobjdump's static figure includes it
RANKS = (8, 16, 32, 64, 128, 256)

# The model: an H200 as one copy through PyTorch saw it, and assumed rates.
COPY_BYTES_PER_S = 4.3e12
L2_BYTES_PER_S = 5.5e12
MMA_FLOP_PER_S = {BF16: 600e12, F32: 300e12}
SMS, LANES, CLOCK_HZ = 132, 128, 1.755e9
LLAMA = {"8B": 6.979e9, "70B": 68.451e9}
"""Elements of the linear layers of Llama-3.1."""


def resources() -> Iterator[str]:
    yield "| kernel | sm | registers | shared memory, bytes | blocks of 256 threads per SM |"
    yield "|---|---|---|---|---|"
    for architecture, cubin in shipped.cubins().items():
        static = static_shared(cubin)
        for name, kernel in sorted(disassemble(cubin).items()):
            shared = static[name] + (SHARED_BYTES if "merge" in name else 0)
            gpu = GPUS[architecture]
            registers = -(-kernel.registers // 8) * 8
            blocks = min(
                REGISTERS // (registers * THREADS),
                gpu.threads // THREADS,
                gpu.shared_kib * 1024 // shared,
            )
            short = name.removeprefix("lora_refit_")
            yield f"| {short} | {architecture} | {kernel.registers} | {shared} | {blocks} |"


def static_shared(cubin: Path) -> dict[str, int]:
    command = [shipped.cuobjdump(), "-res-usage", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"Function (\w+):\s+REG:\d+ STACK:\d+ SHARED:(\d+)", text)
    return {name: int(shared) for name, shared in found}


def copies() -> Iterator[str]:
    yield "| copy | bytes per element | instructions per element and lane | issue slots at the floor |"
    yield "|---|---|---|---|"
    cases = {
        "bf16 to bf16": (BF16, BF16, 1.0, 8192),
        "bf16 to bf16, rows of 16": (BF16, BF16, 1.0, 16),
        "bf16 to bf16, scaled": (BF16, BF16, 1.7, 8192),
        "fp32 to bf16": (F32, BF16, 1.0, 8192),
        "fp32 to fp32": (F32, F32, 1.0, 4096),
    }
    for name, (src, dst, scale, cols) in cases.items():
        moved = src.itemsize + dst.itemsize
        instructions = copy_instructions(src, dst, scale, cols)
        busy = instructions / issue_capacity(moved)
        yield f"| {name} | {moved} | {instructions:.2f} | {busy:.0%} |"


def copy_instructions(src: torch.dtype, dst: torch.dtype, scale: float, cols: int) -> float:
    """Between 8 and 24 tiles, so that what a launch does once does not count."""
    few, many = (copy_counts(src, dst, scale, cols, tiles) for tiles in (8, 24))
    elements = 16 * 16384 // dst.itemsize
    return (many.total() - few.total()) / elements


def copy_counts(
    src: torch.dtype, dst: torch.dtype, scale: float, cols: int, tiles: int
) -> Counter[str]:
    numel = tiles * 16384 // dst.itemsize
    rows, pitch = numel // cols, cols if cols > 16 else 2 * cols
    blocks = block((1, rows, cols), (0, cols, 1), (0, pitch, 1), scale=scale)
    case = Case(
        blocks, [Buffer(random_values(src, numel, 0))], [Buffer(poisoned(dst, rows * pitch))]
    )
    kernel = shipped.kernel("lora_refit_copy", "copy.cu")
    return run_copy(kernel, case, case.fresh_destinations())[1]


def merges() -> Iterator[str]:
    yield (
        "| A, B | rank | instructions per element and lane | factors through L2, of W + W' "
        "| memory / issue / L2 / tensor cores, ms, 8B | 8B | 70B | over the floor |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for adapter in (BF16, F32):
        for rank in RANKS:
            yield merge_row(adapter, rank)


def merge_row(adapter: torch.dtype, rank: int) -> str:
    instructions = merge_instructions(adapter, rank)
    l2_bytes = factor_bytes(adapter, rank)
    per_element = {
        "memory": 4 / COPY_BYTES_PER_S,
        "issue": instructions / (SMS * LANES * CLOCK_HZ),
        "L2": (4 + l2_bytes) / L2_BYTES_PER_S,
        "mma": 2 * rank * (3 if adapter == F32 else 1) / MMA_FLOP_PER_S[adapter],
    }
    slowest = max(per_element.values())
    parts = " / ".join(f"{seconds * LLAMA['8B'] * 1e3:.1f}" for seconds in per_element.values())
    times = [f"{slowest * elements * 1e3:.1f} ms" for elements in LLAMA.values()]
    name = str(adapter).removeprefix("torch.")
    return (
        f"| {name} | {rank} | {instructions:.1f} | {l2_bytes / 4:.0%} | {parts} "
        f"| {times[0]} | {times[1]} | {slowest / per_element['memory']:.2f} |"
    )


def factor_bytes(adapter: torch.dtype, rank: int) -> float:
    """Bytes of A and B that an element of W costs between L2 and an SM: merge_shape.h's tiles."""
    resident = 256 // adapter.itemsize
    per_tile = 1 / 128 if rank <= resident else 1 / 64 + 1 / 128
    return adapter.itemsize * rank * per_tile


def merge_instructions(adapter: torch.dtype, rank: int) -> float:
    """Between strips of 2 and 4 tiles of columns, so that a strip's beginning does not count."""
    kernel = shipped.kernel(f"lora_refit_merge_{short_name(adapter)}", "merge.cu")
    launch = Launch(grid=2, thread_blocks=1)  # two strips
    counts = [
        counted_run(kernel, aligned_layer(adapter, cols, rank), launch)[1].total()
        for cols in (512, 1024)
    ]
    return (counts[1] - counts[0]) / (128 * 512)


def aligned_layer(adapter: torch.dtype, cols: int, rank: int) -> Program:
    """128 rows of W in bf16, and whole factors."""
    program = Program(modules=1)
    w, b, a = (
        Matrix(program.add_source(random_values(dtype, rows * row, 0)), 0, row, 1)
        for dtype, rows, row in ((BF16, 128, cols), (adapter, 128, rank), (adapter, rank, cols))
    )
    out = Matrix(program.add_destination(poisoned(BF16, 128 * cols)), 0, cols, 1)
    program.add_block(w, out, (128, cols), program.add_segments([(b, a, rank)]), 0, 0.5)
    return program


def short_name(dtype: torch.dtype) -> str:
    return {BF16: "bf16", F32: "f32"}[dtype]


def issue_capacity(bytes_per_element: float) -> float:
    """Instructions per element and lane that the SMs can issue while memory moves the element."""
    return SMS * LANES * CLOCK_HZ * bytes_per_element / COPY_BYTES_PER_S


def sheet() -> str:
    lines = [
        "# What the CUDA kernels cost",
        "",
        "Written by `python tests/gpu/cost_sheet.py`: registers and shared memory are those of the",
        "machine code in the shipped fatbin (no kernel spills or uses local memory), instructions",
        "are counted while its PTX runs on the simulator. **Times are predictions. Nothing here was",
        "measured on a GPU**; `tests/device/run.sh` measures.",
        "",
        "## Resources",
        "",
        *resources(),
        "",
        "## Copy",
        "",
        "Each tile of 16 KB costs 112 bytes of table and one 8-byte atomic add besides its elements.",
        "A lane has 64 bytes of loads in flight before its first store: 64 KB on an SM of sm_90, at",
        "4 blocks. Predicted at the floor, because issue slots are far from full:",
        "",
        *copies(),
        "",
        "Strided or transposed sources go element by element and are far slower.",
        "",
        "## Merge",
        "",
        "W and W' in bf16, aligned rows. A block keeps B of a strip of 128 rows in shared memory and",
        "stages A once for its two tiles of 64 rows, up to rank 128 (64 for fp32 factors); above",
        "that, both are staged again for every tile.",
        "",
        *merges(),
        "",
        "Unaligned or odd-width weights go element by element.",
        "",
        "## The model",
        "",
        "The slowest of four, as if they overlapped perfectly:",
        "",
        f"* memory: bytes of W and W' at {COPY_BYTES_PER_S / 1e12} TB/s, one copy through PyTorch on "
        "an H200;",
        f"* issue: instructions at one per lane and clock, {SMS} SMs of {LANES} lanes at "
        f"{CLOCK_HZ / 1e9} GHz;",
        f"* L2: W, W' and the factors' re-reads at {L2_BYTES_PER_S / 1e12} TB/s, assumed;",
        f"* tensor cores: {MMA_FLOP_PER_S[BF16] / 1e12:.0f} TFLOP/s in bf16 and "
        f"{MMA_FLOP_PER_S[F32] / 1e12:.0f} in tf32, of which fp32 factors take three products, "
        "assumed.",
        "",
        "PTX instructions stand for machine instructions. Llama-3.1's linear layers: 6.979e9 and "
        "68.451e9 elements; 70B is the sum over its GPUs.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    np.seterr(all="ignore")
    SHEET.write_text(sheet())
    print(SHEET)
