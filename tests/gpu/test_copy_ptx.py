"""The copy kernel's PTX, simulated, against the CPU kernel: every bit it writes and the digests."""

from __future__ import annotations

import re

import numpy as np
import ptxsim
import pytest
import shipped
import torch
from block_reference import Buffer, block, poisoned, program_of, random_values, run
from copy_cases import DTYPES, Case, random_plans
from ptxsim import PtxError
from simulated import run_copy

from lora_refit.kernels import SCALE_ONCE, ZERO_FILL

PAIRS = [(src, dst) for src in DTYPES for dst in DTYPES]
SCALINGS = [(1.0, 0), (0.7, 0), (0.7, SCALE_ONCE)]
"""One scale and flags for each Scaling of csrc/convert.h."""


def copy_kernel(architecture: int = shipped.PTX_ARCHITECTURE) -> ptxsim.Kernel:
    return shipped.kernel("lora_refit_copy", "copy.cu", architecture)


def assert_equals_cpu(kernel: ptxsim.Kernel, case: Case) -> dict[str, int]:
    """Bytes inside and around the destinations, and digests. Returns the executed opcodes."""
    on_cpu, simulated = case.fresh_destinations(), case.fresh_destinations()
    expected = run(program_of(case.blocks, case.sources, on_cpu), case.sources, on_cpu)
    digests, opcodes = run_copy(kernel, case, simulated)
    for index, (wanted, got) in enumerate(zip(on_cpu, simulated, strict=True)):
        assert np.array_equal(wanted.storage, got.storage), f"destination {index}"
    assert digests == expected
    return opcodes


def test_random_plans_equal_the_cpu_kernel() -> None:
    """320 plans in one launch: strides, empty blocks, zero fills, dtypes, bases, scales."""
    case = random_plans(320, seed=1)
    opcodes = assert_equals_cpu(copy_kernel(), case)
    print(f"{len(case.blocks)} blocks, {sum(opcodes.values())} thread instructions")


@pytest.mark.parametrize("architecture", [90, 120])
def test_random_plans_on_newer_architectures(architecture: int) -> None:
    """What nvcc makes for them, on 40 plans."""
    assert_equals_cpu(copy_kernel(architecture), random_plans(40, seed=architecture))


def every_pattern(dtype: torch.dtype) -> torch.Tensor:
    """All 16-bit patterns; as fp32 their upper halves with a random rest, and near midpoints."""
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    if dtype != torch.float32:
        return patterns.to(torch.int16).view(dtype)
    low = torch.randint(1 << 16, patterns.shape, generator=torch.Generator().manual_seed(5))
    special = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001])
    chosen = torch.where(patterns % 2 == 0, low, special[patterns // 2 % 8])
    return ((patterns << 16) + chosen.to(torch.int32)).view(torch.float32)


def all_variants(misaligned: int, step: int) -> Case:
    """Each dtype pair and scaling on every `step`-th pattern, and a zero fill of each size.

    All buffers begin `misaligned` elements after a multiple of 16 bytes.
    """
    case = Case()
    for src, dst in PAIRS:
        values = every_pattern(src)[::step].contiguous()
        count = values.numel()
        for scale, flags in SCALINGS:
            blocks = block((1, 1, count), (0, 0, 1), (0, 0, 1), scale=scale, flags=flags)
            source = Buffer(values, misaligned * src.itemsize)
            target = Buffer(poisoned(dst, count), misaligned * dst.itemsize)
            case.add(Case(blocks, [source], [target]))
    for dtype in DTYPES:
        blocks = block((1, 3, 401), (0, 0, 1), (0, 500, 1), src=ZERO_FILL)
        case.add(Case(blocks, [], [Buffer(poisoned(dtype, 1500), misaligned * dtype.itemsize)]))
    return case


def test_every_variant_on_every_pattern() -> None:
    """27 dtype pairs and scalings and both zero fills, NaN payloads included, 16 bytes at a time."""
    opcodes = assert_equals_cpu(copy_kernel(), all_variants(misaligned=0, step=1))
    stores = {op: n for op, n in opcodes.items() if op.startswith("st.global")}
    wide = sum(count for opcode, count in stores.items() if ".v4." in opcode)
    print(stores)
    assert wide > 0.99 * sum(stores.values())


@pytest.mark.parametrize("misaligned", [1, 2])
def test_every_variant_where_16_bytes_do_not_fit(misaligned: int) -> None:
    """Single elements, or pairs of 2-byte elements."""
    opcodes = assert_equals_cpu(copy_kernel(), all_variants(misaligned, step=31))
    assert not any(op.startswith("st.global") and ".v4." in op for op in opcodes)


def tall_plan(rows: int) -> Case:
    """lora_B of many modules into a padded slot: one block for each row, in no order."""
    rank, pitch = 8, 16
    source = random_values(torch.float32, rows * rank, seed=7)
    blocks = np.repeat(block((1, 1, rank), (0, 0, 1), (0, 0, 1), scale=0.5), rows)
    order = np.random.default_rng(8).permutation(rows)
    blocks["src_offset"] = order * rank
    blocks["dst_offset"] = order * pitch + rank // 2
    return Case(blocks, [Buffer(source)], [Buffer(poisoned(torch.bfloat16, rows * pitch))])


def test_a_plan_of_100_000_blocks() -> None:
    """Each warp takes hundreds of tiles."""
    assert_equals_cpu(copy_kernel(), tall_plan(100_000))


MUTANTS = {
    "no barrier after the word weights": (r"bar\.sync\s+0;", ""),
    "no barrier of the warp around its shared move": (r"bar\.warp\.sync[^;]*;", ""),
    "two words of a 16-byte load change places": (
        r"(ld\.global\.nc\.L1::no_allocate\.v4\.\w+)\s+\{([^,]+),([^,]+),",
        r"\1 {\3,\2,",
    ),
    "ties round up when a single fp32 becomes bf16": (r", 32767;", ", 32768;"),
    "two fp32 change places when they become bf16": (
        r"(cvt\.rn\.bf16x2\.f32\s+%\w+),\s*(%\w+),\s*(%\w+);",
        r"\1, \3, \2;",
    ),
    "digests are stored, not added": (
        r"(?:red|atom)[\w.]*\.global\.add\.u64\s+(?:%\w+, )?(\[[^]]*\], %\w+);",
        r"st.global.u64 \1;",
    ),
}


def several_tiles() -> Case:
    """Tiles of two dtype pairs, with ties to round, in wide units and in single elements."""
    case = Case()
    for src, misaligned in ((torch.bfloat16, 0), (torch.float32, 0), (torch.float32, 2)):
        values = every_pattern(src)[::5].contiguous()
        blocks = block((1, 3, 4096), (0, 4096, 1), (0, 4096, 1))
        target = Buffer(poisoned(torch.bfloat16, 3 * 4096), misaligned)
        case.add(Case(blocks, [Buffer(values)], [target]))
    return case


def test_the_kernel_passes_where_wrong_ones_fail() -> None:
    assert_equals_cpu(copy_kernel(), several_tiles())


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_caught(mutant: str) -> None:
    """Each edit of the PTX is either a PtxError or a difference."""
    edited, count = re.subn(*MUTANTS[mutant], shipped.ptx("copy.cu"))
    assert count > 0, "the edit applies nowhere"
    kernel = ptxsim.parse(edited)["lora_refit_copy"]
    with pytest.raises((PtxError, AssertionError)) as caught:
        assert_equals_cpu(kernel, several_tiles())
    print(f"{mutant}: {caught.value!r:.120}")
