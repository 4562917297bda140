"""From offset lists to strided copy blocks: finding the arithmetic progressions they follow."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np

from lora_refit.trace.axis import IntArray


@dataclass(frozen=True)
class Run:
    """`count` copies whose destination and source offsets both advance by a constant step."""

    dst: int
    src: int
    dst_step: int
    src_step: int
    count: int


@dataclass(frozen=True)
class Block:
    """A strided copy of `size` = (batch, rows, cols) elements; offsets and strides in elements."""

    src: int
    dst: int
    src_offset: int
    dst_offset: int
    size: tuple[int, int, int]
    src_stride: tuple[int, int, int]
    dst_stride: tuple[int, int, int]
    scale: float
    flags: int = 0


def joint_runs(dst: IntArray, src: IntArray) -> list[Run]:
    """The fewest runs found for pairs of offsets, in destination order or in source order."""
    by_dst = np.argsort(dst, kind="stable")
    runs = _ordered_runs(dst[by_dst], src[by_dst])
    if len(runs) > 1:
        by_src = np.lexsort((dst, src))
        other = _ordered_runs(dst[by_src], src[by_src])
        if len(other) < len(runs):
            return other
    return runs


def _ordered_runs(dst: IntArray, src: IntArray) -> list[Run]:
    dst_steps, src_steps = np.diff(dst), np.diff(src)
    changed = (dst_steps[1:] != dst_steps[:-1]) | (src_steps[1:] != src_steps[:-1])
    runs: list[Run] = []
    start = 0
    for stop in [*(np.flatnonzero(changed) + 1).tolist(), len(dst_steps)]:
        # The step into a run's first element belongs to no run, so a change right there ends
        # nothing.
        if stop <= start:
            continue
        runs.append(
            Run(
                dst=int(dst[start]),
                src=int(src[start]),
                dst_step=int(dst_steps[start]),
                src_step=int(src_steps[start]),
                count=stop - start + 1,
            )
        )
        start = stop + 1
    if start == len(dst) - 1:
        runs.append(Run(int(dst[start]), int(src[start]), 0, 0, 1))
    return runs


def batch(blocks: list[Block]) -> list[Block]:
    """Join blocks that differ only in their offsets, where the offsets advance by constant steps.

    Takes blocks with batch size 1; keeps the destination order of their first elements.
    """
    alike: dict[Block, list[Block]] = defaultdict(list)
    for block in blocks:
        alike[replace(block, src_offset=0, dst_offset=0)].append(block)
    joined = []
    for group in alike.values():
        first = group[0]
        dst = np.asarray([block.dst_offset for block in group], np.int64)
        src = np.asarray([block.src_offset for block in group], np.int64)
        for run in joint_runs(dst, src):
            joined.append(
                replace(
                    first,
                    src_offset=run.src,
                    dst_offset=run.dst,
                    size=(run.count, *first.size[1:]),
                    src_stride=(run.src_step, *first.src_stride[1:]),
                    dst_stride=(run.dst_step, *first.dst_stride[1:]),
                )
            )
    return sorted(joined, key=lambda block: (block.dst, block.dst_offset))
