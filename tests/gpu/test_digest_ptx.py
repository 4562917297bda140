"""The digest kernel's PTX, simulated, against the CPU's digests."""

from __future__ import annotations

import re

import numpy as np
import ptxsim
import pytest
import shipped
import torch
from block_reference import Buffer, digest_of_memory
from ptxsim import PtxError
from simulated import run_digest

SIZES = [0, 1, 2, 3, 7, 8, 9, 31, 2047, 2048, 2049, 4096, 4097, 10_000, 70_001]
"""In 2-byte elements; a chunk has 2048."""


def digest_kernel(architecture: int = shipped.PTX_ARCHITECTURE) -> ptxsim.Kernel:
    return shipped.kernel("lora_refit_digest", "digest.cu", architecture)


def random_buffers(seed: int, count: int) -> list[Buffer]:
    """Random bits at any 2-byte alignment; some buffers are empty."""
    rng = np.random.default_rng(seed)
    sizes = [*SIZES, *rng.integers(0, 9000, count).tolist()]
    rng.shuffle(sizes)
    return [Buffer(random_bits(size, seed + size), 2 * int(rng.integers(0, 9))) for size in sizes]


def random_bits(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 15), 1 << 15, (size,), dtype=torch.int16, generator=generator)


@pytest.mark.parametrize("architecture", [80, 90, 120])
def test_random_buffers_equal_the_cpu_digest(architecture: int) -> None:
    """100 buffers in one launch: empty, odd counts of 2-byte elements, any alignment."""
    buffers = random_buffers(architecture, 85)
    assert run_digest(digest_kernel(architecture), buffers) == digest_of_memory(buffers)


def test_one_and_no_buffer() -> None:
    for buffers in (random_buffers(1, 0)[:1], [Buffer(torch.zeros(0, dtype=torch.int16))]):
        assert run_digest(digest_kernel(), buffers) == digest_of_memory(buffers)


def test_more_chunks_than_warps() -> None:
    """Each warp of the grid takes several turns."""
    buffers = [Buffer(random_bits(size, size)) for size in (5_000_000, 300_000)]
    assert run_digest(digest_kernel(), buffers) == digest_of_memory(buffers)


MUTANTS = {
    "no barrier after the word weights": (r"bar\.sync\s+0;", ""),
    "the warp sum leaves lanes out": (r"(mov\.(?:u32|b32)\s+%r\d+, )16;", r"\g<1>8;"),
    "16-byte loads read words in another order": (
        r"(ld\.global\.nc\.L1::no_allocate\.v4\.\w+)\s+\{([^,]+),([^,]+),",
        r"\1 {\3,\2,",
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_kernel_is_caught(mutant: str) -> None:
    buffers = random_buffers(5, 10)
    edited, count = re.subn(*MUTANTS[mutant], shipped.ptx("digest.cu"))
    assert count > 0, "the edit applies nowhere"
    kernel = ptxsim.parse(edited)["lora_refit_digest"]
    with pytest.raises((PtxError, AssertionError)):
        assert run_digest(kernel, buffers) == digest_of_memory(buffers)
