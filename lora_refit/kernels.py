"""The copy kernel: executes a block list in one launch and digests what it wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit import _C
from lora_refit.errors import LayoutMismatch, TransportUnavailable, UnsupportedAdapter

BLOCK_DTYPE = np.dtype(
    [
        ("src", "<i4"),
        ("dst", "<i4"),
        ("src_offset", "<i8"),
        ("dst_offset", "<i8"),
        ("size", "<i8", (3,)),
        ("src_stride", "<i8", (3,)),
        ("dst_stride", "<i8", (3,)),
        ("scale", "<f4"),
        ("flags", "<u4"),
    ]
)
"""numpy twin of `CopyBlock` in csrc/block.h, where the fields are explained."""

ZERO_FILL = -1
"""`src` of a block that fills its destination with zeros."""

SCALE_ONCE = 1
"""Flag: scale in fp32 and round once, instead of cast, then scale in the destination's dtype."""

DTYPE_CODES: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class BufferType:
    """What a source or destination buffer holds. Its address may change from run to run."""

    dtype: torch.dtype
    numel: int


class CopyKernel:
    """A block list, checked and tiled once, and launched any number of times.

    Args:
        blocks: `BLOCK_DTYPE[n]`; offsets, sizes and strides in elements.
        sources, destinations: the buffers that `src` and `dst` of a block index.
        device: where the buffers live.

    Raises:
        LayoutMismatch: a block reaches outside its buffers; the message gives its number.
        UnsupportedAdapter: a buffer's dtype is not float32, float16 or bfloat16.
        TransportUnavailable: this build has no backend for `device`, or LORA_REFIT_SIMD or
            LORA_REFIT_THREADS in the environment has a bad value.
    """

    def __init__(
        self,
        blocks: NDArray[np.void],
        sources: Sequence[BufferType],
        destinations: Sequence[BufferType],
        device: torch.device = _CPU,
    ) -> None:
        if device.type != "cpu":
            raise TransportUnavailable(
                f"cannot copy on device {device}: lora_refit was built without CUDA; "
                "keep the adapter and the slots on the CPU"
            )
        if blocks.dtype != BLOCK_DTYPE:
            raise LayoutMismatch(f"blocks have dtype {blocks.dtype}, not kernels.BLOCK_DTYPE")
        src_codes = [_dtype_code("source", i, buffer) for i, buffer in enumerate(sources)]
        dst_codes = [_dtype_code("destination", i, buffer) for i, buffer in enumerate(destinations)]
        with _typed_errors("the copy plan does not fit its buffers"):
            self._program = _C.CopyProgram(
                blocks.tobytes(),
                src_codes,
                [buffer.numel for buffer in sources],
                dst_codes,
                [buffer.numel for buffer in destinations],
            )
        self._digests = np.zeros(len(destinations), np.uint64)
        self.launches = 0

    @property
    def bytes_written(self) -> int:
        """Bytes that one run writes, zero fills included."""
        return self._program.bytes_written

    def run(
        self, src_addresses: NDArray[np.uint64], dst_addresses: NDArray[np.uint64]
    ) -> NDArray[np.uint64]:
        """Moves everything once.

        Args:
            src_addresses, dst_addresses: one base address per buffer, in the constructor's order.

        Returns:
            One digest per destination, of what this run wrote there. The array belongs to the
            kernel and the next run overwrites it.

        Raises:
            LayoutMismatch: an address is missing.
        """
        with _typed_errors("the copy kernel cannot run"):
            self._program.run(src_addresses, dst_addresses, self._digests, _threads())
        self.launches += 1
        return self._digests


def digest(addresses: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Digests of contiguous buffers, equal to those of the copy kernel that filled them.

    Args:
        addresses: base address of each buffer.
        nbytes: size of each buffer in bytes, a multiple of 2.

    Raises:
        LayoutMismatch: a size is odd, or an address is missing.
    """
    digests = np.zeros(len(addresses), np.uint64)
    with _typed_errors("cannot digest"):
        _C.digest(addresses, nbytes, digests, _threads())
    return digests


def _threads() -> int:
    """1 where torch was told to use one thread, as in trainer ranks that share a machine; 0 for
    the extension's own choice, which LORA_REFIT_THREADS overrides."""
    told = torch.get_num_threads() == 1 and "LORA_REFIT_THREADS" not in os.environ
    return 1 if told else 0


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """The extension raises ValueError for bad arguments, RuntimeError for a bad environment."""
    try:
        yield
    except ValueError as error:
        raise LayoutMismatch(f"{what}: {error}") from error
    except RuntimeError as error:
        raise TransportUnavailable(str(error)) from error


def _dtype_code(side: str, index: int, buffer: BufferType) -> int:
    code = DTYPE_CODES.get(buffer.dtype)
    if code is None:
        raise UnsupportedAdapter(
            f"{side} buffer {index} has dtype {buffer.dtype}; "
            "lora_refit moves float32, float16 and bfloat16"
        )
    return code
