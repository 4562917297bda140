"""The CUDA backend: libcuda is looked for at the first use, never at import."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import numpy as np
import torch
from numpy.typing import NDArray

from lora_refit import _C
from lora_refit.devices import current_cuda_device
from lora_refit.errors import TransportUnavailable
from lora_refit.kernels.backend import Addresses

IMAGE = "kernels.fatbin"
"""Package data: the compiled kernels of csrc/cuda for all supported GPUs."""


class CudaBackend:
    """One GPU of this process.

    Raises TransportUnavailable if the build has no kernels, or the machine no driver or no such
    device.
    """

    def __init__(self, device: torch.device) -> None:
        reason = missing()
        if reason:
            raise TransportUnavailable(f"device {device}: {reason}")
        self._device = ordinal(device)

    def copy_program(
        self,
        blocks: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
    ) -> _C.cuda.CopyProgram:
        return _C.cuda.CopyProgram(
            self._device, blocks, src_dtypes, src_sizes, dst_dtypes, dst_sizes
        )

    def merge_program(
        self,
        blocks: bytes,
        segments: bytes,
        src_dtypes: Sequence[int],
        src_sizes: Sequence[int],
        dst_dtypes: Sequence[int],
        dst_sizes: Sequence[int],
        modules: int,
    ) -> _C.cuda.MergeProgram:
        return _C.cuda.MergeProgram(
            self._device, blocks, segments, src_dtypes, src_sizes, dst_dtypes, dst_sizes, modules
        )

    def digest(
        self, addresses: Addresses, nbytes: NDArray[np.uint64], out: Addresses, stream: int
    ) -> None:
        _C.cuda.digest(self._device, addresses, nbytes, out, stream)


def ordinal(device: torch.device) -> int:
    """The driver's number of a torch device: both number the visible GPUs alike."""
    return device.index if device.index is not None else current_cuda_device()


def synchronize(stream: int, device: torch.device) -> None:
    """Wait for all work of a stream. Raises TransportUnavailable if the driver refuses."""
    try:
        _C.cuda.synchronize(ordinal(device), stream)
    except _C.cuda.CudaError as error:
        raise TransportUnavailable(str(error)) from error


def reach(other: torch.device, device: torch.device) -> None:
    """Let kernels on `device` read memory of a peer. Raises TransportUnavailable if they cannot."""
    if other.index is None or other.index == ordinal(device):
        return
    try:
        _C.cuda.enable_peer_access(ordinal(device), other.index)
    except _C.cuda.CudaError as error:
        raise TransportUnavailable(str(error)) from error


@lru_cache(maxsize=1)
def missing() -> str:
    """What this build or machine lacks to use CUDA; empty once the kernels were handed over."""
    image = resources.files("lora_refit").joinpath(IMAGE)
    if not image.is_file():
        return (
            "lora_refit was built without CUDA kernels; build it again with LORA_REFIT_CUDA=1 "
            "where nvcc 13 is found (CUDA_HOME, or the nvidia-cuda-nvcc wheel)"
        )
    reason = _C.cuda.status()
    if not reason:
        try:
            _C.cuda.set_image(image.read_bytes())
        except ValueError as error:
            return f"{IMAGE}: {error}"
    return reason
