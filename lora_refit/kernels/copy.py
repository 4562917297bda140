"""The copy kernel: executes a block list in one launch and digests what it wrote."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit.devices import CPU, stream_handle
from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels.arrays import BufferType, addresses
from lora_refit.kernels.backend import Addresses, backend_for, typed_errors
from lora_refit.kernels.records import BLOCK_DTYPE, DTYPE_CODES


class CopyKernel:
    """A block list, checked and tiled once, and launched any number of times.

    Args:
        blocks: `BLOCK_DTYPE[n]`; offsets, sizes and strides in elements.
        sources, destinations: the buffers that `src` and `dst` of a block index.
        device: where the buffers live. On a CUDA device sources may also be peers' memory, or
            pinned host memory, that the device can read.

    Raises:
        LayoutMismatch: a block reaches outside its buffers; the message gives its number.
        UnsupportedAdapter: a buffer's dtype is not float32, float16 or bfloat16.
        TransportUnavailable: this build or machine cannot use `device`; the message says what is
            missing. Or LORA_REFIT_SIMD or LORA_REFIT_THREADS has a bad value.
    """

    def __init__(
        self,
        blocks: NDArray[np.void],
        sources: Sequence[BufferType],
        destinations: Sequence[BufferType],
        device: torch.device = CPU,
    ) -> None:
        if blocks.dtype != BLOCK_DTYPE:
            raise LayoutMismatch(f"blocks have dtype {blocks.dtype}, not kernels.BLOCK_DTYPE")
        src_codes = dtype_codes("source", sources)
        dst_codes = dtype_codes("destination", destinations)
        self.sources = tuple(sources)
        self.destinations = tuple(destinations)
        self.device = device
        with typed_errors("the copy plan does not fit its buffers"):
            self._program = backend_for(device).copy_program(
                blocks.tobytes(),
                src_codes,
                [buffer.numel for buffer in sources],
                dst_codes,
                [buffer.numel for buffer in destinations],
            )
        self._digests = np.zeros(len(destinations), np.uint64)
        self.launches = 0
        self.submissions = 0
        """Launches that were tried, failed ones included."""

    @property
    def bytes_written(self) -> int:
        """Bytes that one run writes, zero fills included."""
        return self._program.bytes_written

    def run(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        stream: object | None = None,
    ) -> Addresses:
        """Moves everything once, after the work that was given to the stream before.

        Args:
            src_addresses, dst_addresses: one base address per buffer, in the constructor's order.
                On a CUDA device aligned to the buffer's dtype.
            stream: of a CUDA device: a torch or CuPy stream or a handle; None for torch's current.

        Returns:
            One digest per destination, of what this run wrote there. The run has finished then.
            The array belongs to the kernel and the next run overwrites it.

        Raises:
            LayoutMismatch: an address is missing.
            TransportUnavailable: the driver refused; the message names the call and the device.
        """
        self.submissions += 1
        with typed_errors("the copy kernel cannot run"):
            self._program.run(
                src_addresses, dst_addresses, self._digests, stream_handle(stream, self.device)
            )
        self.launches += 1
        return self._digests

    def launch(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        stream: object | None = None,
    ) -> None:
        """`run` without waiting: `collect` returns the digests. For overlap, and CUDA graphs.

        While the stream is being captured the addresses must be those of the run before. A replay
        uses the addresses of the last run: see CapturedCopy, which captures again when they move.
        """
        self.submissions += 1
        with typed_errors("the copy kernel cannot be launched"):
            self._program.launch(src_addresses, dst_addresses, stream_handle(stream, self.device))
        self.launches += 1

    def collect(self) -> Addresses:
        """Wait for the last launch and return its digests, as `run` does. A replay must have been
        waited for."""
        with typed_errors("the copy kernel has nothing to collect"):
            self._program.collect(self._digests)
        return self._digests

    def copy(
        self,
        sources: Sequence[object],
        destinations: Sequence[object],
        stream: object | None = None,
    ) -> Addresses:
        """`run` on arrays: torch tensors, CuPy arrays, or whatever else speaks DLPack or
        `__cuda_array_interface__`. Contiguous, of the constructor's dtypes and sizes.

        Raises, besides what `run` raises, LayoutMismatch naming the array that does not fit.
        """
        return self.run(
            addresses("source", sources, self.sources, self.device),
            addresses("destination", destinations, self.destinations, self.device),
            stream,
        )


def digest(
    starts: Addresses,
    nbytes: NDArray[np.uint64],
    device: torch.device = CPU,
    stream: object | None = None,
) -> Addresses:
    """Digests of contiguous buffers, equal to those of the copy kernel that filled them.

    Args:
        starts: address of each buffer.
        nbytes: size of each buffer in bytes, a multiple of 2.
        device, stream: as for CopyKernel.

    Raises:
        LayoutMismatch: a size is odd, or an address is missing.
        TransportUnavailable: as for CopyKernel.
    """
    digests = np.zeros(len(starts), np.uint64)
    with typed_errors("cannot digest"):
        backend_for(device).digest(starts, nbytes, digests, stream_handle(stream, device))
    return digests


def dtype_codes(side: str, buffers: Sequence[BufferType]) -> list[int]:
    """The extension's number of each buffer's dtype; `side` is for the message."""
    for index, buffer in enumerate(buffers):
        if buffer.dtype not in DTYPE_CODES:
            raise UnsupportedAdapter(
                f"{side} buffer {index} has dtype {buffer.dtype}; "
                "lora_refit moves float32, float16 and bfloat16"
            )
    return [DTYPE_CODES[buffer.dtype] for buffer in buffers]
