"""What a backend offers, and which one serves a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit.errors import LayoutMismatch, TransportUnavailable

Addresses = NDArray[np.uint64]


class CopyProgram(Protocol):
    """A checked and tiled block list; see csrc/plan/block_check.h for what is refused."""

    @property
    def bytes_written(self) -> int: ...

    def run(
        self, src_addresses: Addresses, dst_addresses: Addresses, digests: Addresses, stream: int
    ) -> None:
        """One launch on the stream; returns when it has finished and `digests` are filled in."""

    def launch(self, src_addresses: Addresses, dst_addresses: Addresses, stream: int) -> None:
        """`run` without waiting."""

    def collect(self, digests: Addresses) -> None:
        """Wait for the last launch and fill in its digests."""


class MergeProgram(Protocol):
    @property
    def bytes_written(self) -> int: ...

    def run(
        self,
        src_addresses: Addresses,
        dst_addresses: Addresses,
        digests: Addresses,
        sums: NDArray[np.void],
        stream: int,
    ) -> None:
        """One launch on the stream; returns when it has finished and both results are filled in."""


class Backend(Protocol):
    """Arguments are as in lora_refit._C. Raises ValueError for bad arguments and RuntimeError for
    what the machine or its environment lacks."""

    def copy_program(
        self,
        blocks: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
    ) -> CopyProgram: ...

    def merge_program(
        self,
        blocks: bytes,
        segments: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        modules: int,
    ) -> MergeProgram: ...

    def digest(
        self, addresses: Addresses, nbytes: NDArray[np.uint64], out: Addresses, stream: int
    ) -> None: ...


def backend_for(device: torch.device) -> Backend:
    """Raises TransportUnavailable, naming what is missing, if nothing serves the device."""
    if device.type == "cpu":
        from lora_refit.kernels import cpu

        return cpu.CpuBackend()
    if device.type == "cuda":
        from lora_refit.kernels import cuda

        return cuda.CudaBackend(device)
    raise TransportUnavailable(
        f"device {device}: lora_refit copies on cpu and cuda devices; move the adapter and the "
        "slots to one of them"
    )


@contextmanager
def typed_errors(what: str) -> Iterator[None]:
    """The extension raises ValueError for bad arguments, RuntimeError for what is missing."""
    try:
        yield
    except ValueError as error:
        raise LayoutMismatch(f"{what}: {error}") from error
    except RuntimeError as error:
        raise TransportUnavailable(str(error)) from error
