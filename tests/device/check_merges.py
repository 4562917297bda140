"""Merges on a real GPU against fp64, by the reference that the simulators are held to."""

from __future__ import annotations

import pytest
import torch
from block_reference import Buffer
from gpu_buffers import DEVICE, GpuBuffer, addresses
from merge_cases import Program, layer, random_program
from merge_reference import Result, faults

from lora_refit.kernels import BufferType, MergeKernel

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def merge(program: Program) -> Result:
    """Runs the program on the GPU and brings its memory back."""

    def types(buffers: list[Buffer]) -> list[BufferType]:
        return [BufferType(item.tensor.dtype, item.tensor.numel()) for item in buffers]

    def upload(buffers: list[Buffer]) -> list[GpuBuffer]:
        return [GpuBuffer(b.tensor, b.misaligned // b.tensor.dtype.itemsize) for b in buffers]

    sources, targets = upload(program.sources), upload(program.destinations)
    kernel = MergeKernel(
        program.blocks,
        program.segments,
        types(program.sources),
        types(program.destinations),
        program.modules,
        DEVICE,
    )
    merged = kernel.run(addresses(sources), addresses(targets))
    results = program.fresh_destinations()
    for result, target in zip(results, targets, strict=True):
        assert target.guards_are_intact()
        result.memory[:] = target.read().numpy()
    return Result(results, merged.digests.tolist(), merged.sums)


@pytest.mark.parametrize("adapter", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(20))
def test_random_programs(adapter: torch.dtype, seed: int) -> None:
    program = random_program(adapter, modules=6, seed=seed, most_products=20_000_000)
    assert faults(program, merge(program)) == []


@pytest.mark.parametrize("adapter", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [1, 7, 16, 64, 128, 129, 256])
def test_ranks(adapter: torch.dtype, rank: int) -> None:
    program = layer(adapter, torch.bfloat16, torch.bfloat16, (512, 1024), rank, seed=rank)
    assert faults(program, merge(program)) == []


def test_integer_factors_are_exact() -> None:
    """Products and sums of small integers need no rounding, so fp32 W' must be exact."""
    program = layer(torch.bfloat16, torch.float32, torch.float32, (256, 512), 64, integers=True)
    assert faults(program, merge(program), exact_delta=True) == []
