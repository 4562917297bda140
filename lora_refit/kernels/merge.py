"""The merge kernel: W' = round(W + scale * B @ A), gathered, merged and packed in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit.devices import CPU, stream_handle
from lora_refit.errors import LayoutMismatch
from lora_refit.kernels.arrays import BufferType, addresses
from lora_refit.kernels.backend import Addresses, backend_for, typed_errors
from lora_refit.kernels.copy import dtype_codes
from lora_refit.kernels.records import MERGE_BLOCK_DTYPE, MERGE_SEGMENT_DTYPE, MERGE_SUMS_DTYPE


@dataclass(frozen=True)
class Merged:
    """Result of one merge.

    digests: uint64 [destinations], of what was written.
    sums: `MERGE_SUMS_DTYPE` [modules]; how much of each module's update the rounding lost.
    """

    digests: Addresses
    sums: NDArray[np.void]


class MergeKernel:
    """A list of merge blocks, checked and tiled once, and launched any number of times.

    Args:
        blocks: `MERGE_BLOCK_DTYPE` [n]; rectangles of weights.
        segments: `MERGE_SEGMENT_DTYPE` [m]; where the blocks' B and A lie. All of one dtype.
        sources: weights, B's and A's, as `weight`, `b` and `a` index them.
        destinations: merged weights, as `dst` indexes them.
        modules: number of modules that `module` indexes.
        device: where the buffers live.

    Raises:
        LayoutMismatch: a block or segment reaches outside its buffers; the message gives its number.
        UnsupportedAdapter: a buffer's dtype is not float32, float16 or bfloat16.
        TransportUnavailable: this build or machine cannot merge on `device`.
    """

    def __init__(
        self,
        blocks: NDArray[np.void],
        segments: NDArray[np.void],
        sources: Sequence[BufferType],
        destinations: Sequence[BufferType],
        modules: int,
        device: torch.device = CPU,
    ) -> None:
        if blocks.dtype != MERGE_BLOCK_DTYPE or segments.dtype != MERGE_SEGMENT_DTYPE:
            raise LayoutMismatch(
                f"blocks and segments have dtypes {blocks.dtype} and {segments.dtype}, not "
                "kernels.MERGE_BLOCK_DTYPE and kernels.MERGE_SEGMENT_DTYPE"
            )
        src_codes = dtype_codes("source", sources)
        dst_codes = dtype_codes("destination", destinations)
        self.device = device
        with typed_errors("the merge plan does not fit its buffers"):
            self._program = backend_for(device).merge_program(
                blocks.tobytes(),
                segments.tobytes(),
                src_codes,
                [buffer.numel for buffer in sources],
                dst_codes,
                [buffer.numel for buffer in destinations],
                modules,
            )
        self.sources = tuple(sources)
        self.destinations = tuple(destinations)
        self._modules = modules
        self.launches = 0

    @property
    def bytes_written(self) -> int:
        """Bytes that one run writes."""
        return self._program.bytes_written

    def run(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        stream: object | None = None,
    ) -> Merged:
        """Merges everything once; arguments and errors as for CopyKernel.run."""
        digests = np.zeros(len(self.destinations), np.uint64)
        sums = np.zeros(self._modules, MERGE_SUMS_DTYPE)
        with typed_errors("the merge kernel cannot run"):
            self._program.run(
                src_addresses, dst_addresses, digests, sums, stream_handle(stream, self.device)
            )
        self.launches += 1
        return Merged(digests, sums)

    def merge(
        self,
        sources: Sequence[object],
        destinations: Sequence[object],
        stream: object | None = None,
    ) -> Merged:
        """`run` on arrays, as CopyKernel.copy."""
        return self.run(
            addresses("source", sources, self.sources, self.device),
            addresses("destination", destinations, self.destinations, self.device),
            stream,
        )
