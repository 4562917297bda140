"""A plain torch execution of block lists, and buffers to compare it with the copy kernel on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit import _C, kernels
from lora_refit.kernels import BLOCK_DTYPE, DTYPE_CODES, SCALE_ONCE, ZERO_FILL

Blocks = NDArray[np.void]

BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
POISON = 0x5A
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-40, -1e-45, 6e-8, 65519.0, 3e38]


@dataclass
class Buffer:
    """A tensor, and the same bytes at an address of any alignment for the kernel to use."""

    tensor: torch.Tensor
    misaligned: int = 0

    def __post_init__(self) -> None:
        raw = self.tensor.contiguous().view(torch.uint8).numpy()
        self.storage = np.full(len(raw) + self.misaligned + 8, POISON, np.uint8)
        self.memory = self.storage[self.misaligned : self.misaligned + len(raw)]
        self.memory[:] = raw

    @property
    def address(self) -> int:
        return self.storage.ctypes.data + self.misaligned

    def read(self) -> torch.Tensor:
        """What the kernel's memory holds now."""
        return torch.from_numpy(self.memory.copy()).view(self.tensor.dtype)

    def outside_is_untouched(self) -> bool:
        outside = self.storage.copy()
        outside[self.misaligned : self.misaligned + len(self.memory)] = POISON
        return bool((outside == POISON).all())


def block(
    size: tuple[int, int, int],
    src_stride: tuple[int, int, int],
    dst_stride: tuple[int, int, int],
    *,
    src: int = 0,
    dst: int = 0,
    src_offset: int = 0,
    dst_offset: int = 0,
    scale: float = 1.0,
    flags: int = 0,
) -> Blocks:
    row = (src, dst, src_offset, dst_offset, size, src_stride, dst_stride, scale, flags)
    return np.array([row], BLOCK_DTYPE)


def random_values(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(
        -6, 6, (count,), generator=generator
    )
    chosen = torch.rand(count, generator=generator) < 0.1
    specials = torch.tensor(SPECIAL)
    picks = torch.randint(len(SPECIAL), (count,), generator=generator)
    return torch.where(chosen, specials[picks], values).to(dtype)


def poisoned(dtype: torch.dtype, count: int) -> torch.Tensor:
    return torch.full((count * dtype.itemsize,), POISON, dtype=torch.uint8).view(dtype)


def element_indices(
    offset: int, size: NDArray[np.int64], stride: NDArray[np.int64]
) -> torch.Tensor:
    axes = [np.arange(n) * step for n, step in zip(size.tolist(), stride.tolist(), strict=True)]
    grid = axes[0][:, None, None] + axes[1][None, :, None] + axes[2][None, None, :]
    return torch.from_numpy(offset + grid)


def execute(
    blocks: Blocks, sources: list[torch.Tensor], destinations: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The reference: one block at a time, in torch's own casts and multiplications."""
    results = [destination.clone() for destination in destinations]
    for b in blocks:
        result = results[b["dst"]]
        to = element_indices(int(b["dst_offset"]), b["size"], b["dst_stride"])
        if b["src"] == ZERO_FILL:
            result[to] = 0
            continue
        source = sources[b["src"]]
        values = source[element_indices(int(b["src_offset"]), b["size"], b["src_stride"])]
        scale = float(b["scale"])
        if scale == 1.0:
            values = values.to(result.dtype)
        elif b["flags"] & SCALE_ONCE:
            values = (values.float() * scale).to(result.dtype)
        else:
            values = values.to(result.dtype) * scale
        result[to] = values
    return results


def same_bits(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, except that any NaN equals any NaN (the torch paths differ among themselves)."""
    bits = BITS[got.dtype]
    both_nan = got.isnan() & expected.isnan()
    return bool(((got.view(bits) == expected.view(bits)) | both_nan).all())


def program_of(
    blocks: Blocks, sources: list[Buffer], destinations: list[Buffer], tile_bytes: int = 1 << 17
) -> _C.CopyProgram:
    return _C.CopyProgram(
        blocks.tobytes(),
        [DTYPE_CODES[source.tensor.dtype] for source in sources],
        [source.tensor.numel() for source in sources],
        [DTYPE_CODES[destination.tensor.dtype] for destination in destinations],
        [destination.tensor.numel() for destination in destinations],
        tile_bytes=tile_bytes,
    )


def addresses_of(buffers: list[Buffer]) -> NDArray[np.uint64]:
    return np.array([buffer.address for buffer in buffers], np.uint64)


def run(
    program: _C.CopyProgram, sources: list[Buffer], destinations: list[Buffer], threads: int = 1
) -> list[int]:
    digests = np.full(len(destinations), 99, np.uint64)
    program.run(addresses_of(sources), addresses_of(destinations), digests, threads)
    return [int(value) for value in digests]


def digest_of_memory(buffers: list[Buffer]) -> list[int]:
    sizes = np.array([len(buffer.memory) for buffer in buffers], np.uint64)
    return [int(value) for value in kernels.digest(addresses_of(buffers), sizes)]
