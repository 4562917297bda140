"""A few launches of every kernel, for compute-sanitizer: small, so that it ends within a minute."""

from __future__ import annotations

import numpy as np
import torch
from check_kernels import run_on_cpu, types
from gpu_buffers import DEVICE, GpuBuffer, addresses
from gpu_merges import check_merges_on_gpu

from lora_refit.kernels import BLOCK_DTYPE, CopyKernel, digest

SHAPES = [(3, 17, 40), (2, 9, 8), (1, 1, 4099), (4, 5, 3)]


def strided_blocks(shape: tuple[int, int, int], transposed: bool) -> np.ndarray:
    _, rows, cols = shape
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = shape, 1.5
    blocks["dst_stride"] = (rows * cols, cols, 1)
    blocks["src_stride"] = (rows * cols, 1, rows) if transposed else (rows * cols, cols, 1)
    return blocks


def check_copies() -> None:
    for shape in SHAPES:
        for transposed in (False, True):
            for dtype in (torch.float32, torch.bfloat16):
                source = torch.randn(int(np.prod(shape)))
                target = torch.zeros(source.numel(), dtype=dtype)
                blocks = strided_blocks(shape, transposed)
                (expected,), digests = run_on_cpu(blocks, [source], [target])
                kernel = CopyKernel(blocks, types([source]), types([target]), DEVICE)
                moved = GpuBuffer(target)
                found = kernel.run(addresses([GpuBuffer(source)]), addresses([moved]))
                assert found.tolist() == digests
                assert torch.equal(moved.read(), expected.view(torch.uint8))
                again = digest(addresses([moved]), np.asarray([target.nbytes], np.uint64), DEVICE)
                assert again.tolist() == digests


if __name__ == "__main__":
    check_copies()
    check_merges_on_gpu()
    print("copies, digests and merges equal their references")
