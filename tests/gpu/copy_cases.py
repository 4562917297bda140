"""Random block lists for the copy kernel, many in one launch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from block_reference import Blocks, Buffer, poisoned, random_values

from lora_refit.kernels import BLOCK_DTYPE, DTYPE_CODES, SCALE_ONCE, ZERO_FILL

DTYPES = list(DTYPE_CODES)
SCALES = [1.0, 1.0, 2.0, -0.3, 1.7e-3, 0.0, -256.0]
SHORT = [0, 1, 1, 2, 3, 4, 7, 8, 15, 16, 17, 33, 64]


@dataclass
class Case:
    """Plans that are one launch: their blocks and the buffers that these index."""

    blocks: Blocks = field(default_factory=lambda: np.zeros(0, BLOCK_DTYPE))
    sources: list[Buffer] = field(default_factory=list)
    destinations: list[Buffer] = field(default_factory=list)

    def add(self, other: Case) -> None:
        """Appends a plan; its buffers become further ones."""
        blocks = other.blocks.copy()
        blocks["src"][blocks["src"] != ZERO_FILL] += len(self.sources)
        blocks["dst"] += len(self.destinations)
        self.blocks = np.concatenate([self.blocks, blocks])
        self.sources += other.sources
        self.destinations += other.destinations

    def fresh_destinations(self) -> list[Buffer]:
        return [Buffer(buffer.tensor, buffer.misaligned) for buffer in self.destinations]


def random_plans(count: int, seed: int) -> Case:
    rng = np.random.default_rng(seed)
    case = Case()
    for _ in range(count):
        case.add(random_plan(rng))
    return case


def random_plan(rng: np.random.Generator) -> Case:
    """1 to 6 blocks between two sources and two destinations of any dtypes and dtype-aligned bases.

    Destinations of blocks do not overlap; with a gap of 0 they touch. Any strides, any loop order.
    """
    src_dtypes, dst_dtypes = ([DTYPES[i] for i in rng.integers(0, 3, 2)] for _ in range(2))
    rows, src_needed, dst_needed = [], [1, 1], [1, 1]
    for _ in range(rng.integers(1, 7)):
        src, dst = int(rng.integers(ZERO_FILL, 2)), int(rng.integers(0, 2))
        size = _random_size(rng)
        order = rng.permutation(3)
        dst_stride, dst_first, extent = _destination_strides(rng, size, order)
        dst_offset = dst_needed[dst] + _gap(rng) + dst_first
        dst_needed[dst] = dst_offset - dst_first + extent
        src_stride = _source_strides(rng, size, order)
        lowest, highest = _reach(size, src_stride)
        src_offset = _gap(rng) - lowest
        if src != ZERO_FILL:
            src_needed[src] = max(src_needed[src], src_offset + highest + 1)
        scale, flags = float(rng.choice(SCALES)), int(rng.choice([0, SCALE_ONCE]))
        rows.append((src, dst, src_offset, dst_offset, size, src_stride, dst_stride, scale, flags))
    return Case(
        np.array(rows, BLOCK_DTYPE),
        [
            _buffer(rng, random_values(d, n, int(rng.integers(1 << 31))))
            for d, n in zip(src_dtypes, src_needed, strict=True)
        ],
        [_buffer(rng, poisoned(d, n)) for d, n in zip(dst_dtypes, dst_needed, strict=True)],
    )


def _buffer(rng: np.random.Generator, tensor: torch.Tensor) -> Buffer:
    """At a base that is aligned to 16 bytes as often as only to the dtype."""
    return Buffer(tensor, int(rng.choice([0, 0, 0, 1, 2, 3, 7])) * tensor.dtype.itemsize)


def _gap(rng: np.random.Generator) -> int:
    return int(rng.choice([0, 0, 0, 8, 1, 3]))


def _random_size(rng: np.random.Generator) -> tuple[int, int, int]:
    """Mostly below a thousand elements, so that a warp's loops stay short; some rows are long."""
    size = [int(rng.choice([0, 1, 1, 1, 2, 3])), int(rng.choice(SHORT)), int(rng.choice(SHORT))]
    while np.prod(size) > 700:
        size[rng.integers(3)] //= 2
    if rng.random() < 0.15:
        size = [1, int(rng.integers(1, 4)), int(rng.choice([512, 768, rng.integers(500, 1100)]))]
    if rng.random() < 0.3:
        rng.shuffle(size)
    return size[0], size[1], size[2]


def _nested_strides(size: tuple[int, ...], order: np.ndarray, gap: int) -> tuple[list[int], int]:
    """Strides of a box laid out with `order[-1]` innermost, and the elements it spans."""
    strides, step = [0, 0, 0], 1
    for axis in order[::-1]:
        strides[axis] = step
        step = step * max(1, size[axis]) + gap
    return strides, step


def _destination_strides(
    rng: np.random.Generator, size: tuple[int, ...], order: np.ndarray
) -> tuple[list[int], int, int]:
    """Strides, the place of the first element, and the extent; rows may count downwards."""
    strides, extent = _nested_strides(size, order, int(rng.choice([0, 0, 8, 1, 5])))
    if size[1] == 0 or rng.random() < 0.7:
        return strides, 0, extent
    return [strides[0], -strides[1], strides[2]], (size[1] - 1) * strides[1], extent


def _source_strides(
    rng: np.random.Generator, size: tuple[int, ...], order: np.ndarray
) -> list[int]:
    if rng.random() < 0.3:
        return [int(stride) for stride in rng.choice([-9, -1, 0, 1, 1, 2, 17], 3)]
    return _nested_strides(size, order, int(rng.choice([0, 0, 8, 2])))[0]


def _reach(size: tuple[int, ...], strides: list[int]) -> tuple[int, int]:
    """The lowest and the highest element, from the first."""
    steps = [(n - 1) * stride for n, stride in zip(size, strides, strict=True) if n]
    return sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
