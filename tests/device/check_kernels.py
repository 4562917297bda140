"""Copy and digest on a real GPU have the bits of the CPU's kernels."""

from __future__ import annotations

import helpers
import numpy as np
import pytest
import torch
from gpu_buffers import DEVICE, GpuBuffer, addresses
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_copy_kernel import block_lists

from lora_refit.kernels import BLOCK_DTYPE, DTYPE_CODES, BufferType, CopyKernel, digest

DTYPES = st.lists(st.sampled_from(list(DTYPE_CODES)), min_size=1, max_size=3)


def types(tensors: list[torch.Tensor]) -> list[BufferType]:
    return [BufferType(tensor.dtype, tensor.numel()) for tensor in tensors]


def run_on_cpu(
    blocks: np.ndarray, sources: list[torch.Tensor], destinations: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[int]]:
    results = [tensor.clone() for tensor in destinations]
    kernel = CopyKernel(blocks, types(sources), types(results))
    return results, kernel.run(helpers.addresses(sources), helpers.addresses(results)).tolist()


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), src_dtypes=DTYPES, dst_dtypes=DTYPES, misaligned=st.integers(0, 8))
def test_random_plans(
    data: st.DataObject,
    src_dtypes: list[torch.dtype],
    dst_dtypes: list[torch.dtype],
    misaligned: int,
) -> None:
    blocks, sources, destinations = data.draw(block_lists(src_dtypes, dst_dtypes))
    expected, digests = run_on_cpu(blocks, sources, destinations)
    kernel = CopyKernel(blocks, types(sources), types(destinations), DEVICE)
    on_gpu = [GpuBuffer(tensor, misaligned) for tensor in sources]
    results = [GpuBuffer(tensor, misaligned) for tensor in destinations]
    for _ in range(2):  # the second run finds the digests of the first
        assert kernel.run(addresses(on_gpu), addresses(results)).tolist() == digests
    for result, tensor in zip(results, expected, strict=True):
        assert torch.equal(result.read(), tensor.view(torch.uint8))
        assert result.guards_are_intact()


def test_a_hundred_thousand_blocks() -> None:
    count = 100_000
    blocks = np.zeros(count, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, 8), 0.5
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    blocks["dst_offset"] = np.arange(count) * 8
    blocks["src_offset"] = np.random.default_rng(0).permutation(count) * 8
    source, target = torch.randn(count * 8), torch.zeros(count * 8, dtype=torch.bfloat16)
    (expected,), digests = run_on_cpu(blocks, [source], [target])
    kernel = CopyKernel(blocks, types([source]), types([target]), DEVICE)
    moved = target.to(DEVICE)
    assert kernel.copy([source.to(DEVICE)], [moved]).tolist() == digests
    assert torch.equal(moved.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("sizes", [[0, 2, 4094, 4096, 4098, 0], [1 << 22, 6], [2] * 3000])
def test_digests(sizes: list[int]) -> None:
    tensors = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    nbytes = np.asarray(sizes, np.uint64)
    expected = digest(np.asarray([tensor.data_ptr() for tensor in tensors], np.uint64), nbytes)
    buffers = [GpuBuffer(tensor.view(torch.float16)) for tensor in tensors]
    assert digest(addresses(buffers), nbytes, DEVICE).tolist() == expected.tolist()


def test_a_run_follows_the_work_of_its_stream() -> None:
    """The source is written by a slow queue on a side stream right before the pack."""
    numel = 1 << 24
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, numel), 1.0
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    kernel = CopyKernel(
        blocks, [BufferType(torch.float32, numel)], [BufferType(torch.float32, numel)], DEVICE
    )
    stream = torch.cuda.Stream(DEVICE)
    source, target = torch.zeros(numel, device=DEVICE), torch.zeros(numel, device=DEVICE)
    torch.cuda.synchronize()
    for version in range(1, 21):
        with torch.cuda.stream(stream):
            for _ in range(50):
                source.add_(version / 50)
            source.fill_(version)
        kernel.copy([source], [target], stream)
        assert bool((target == version).all())


def test_a_captured_launch_replays() -> None:
    numel = 5000
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, numel), 1.0
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    kernel = CopyKernel(
        blocks, [BufferType(torch.float32, numel)], [BufferType(torch.bfloat16, numel)], DEVICE
    )
    source = torch.randn(numel, device=DEVICE)
    target = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    places = [np.asarray([tensor.data_ptr()], np.uint64) for tensor in (source, target)]
    graph = torch.cuda.CUDAGraph()
    kernel.run(*places)
    with torch.cuda.graph(graph):
        kernel.launch(*places)
    for seed in range(3):
        source.normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
        graph.replay()
        assert torch.equal(target, source.to(torch.bfloat16))
