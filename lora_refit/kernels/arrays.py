"""Arrays of other libraries as buffers: torch, CuPy, DLPack, `__cuda_array_interface__`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lora_refit.devices import device_of
from lora_refit.errors import LayoutMismatch
from lora_refit.kernels.backend import Addresses
from lora_refit.kernels.cuda import ordinal, reach, synchronize

_TYPESTRS = {"f4": torch.float32, "f2": torch.float16, "V2": torch.bfloat16}
"""Of `__cuda_array_interface__`, which has no name for bfloat16: libraries send opaque 2 bytes."""


@dataclass(frozen=True)
class BufferType:
    """What a source or destination buffer holds. Its address may change from run to run."""

    dtype: torch.dtype
    numel: int


@dataclass(frozen=True)
class Array:
    """A contiguous array as the kernels see it."""

    address: int
    type: BufferType
    device: torch.device
    stream: int | None = None
    """The one that still fills the array, where its library says so."""


def addresses(
    side: str, arrays: Sequence[object], types: Sequence[BufferType], device: torch.device
) -> Addresses:
    """Base address of each array, uint64 [arrays].

    Raises LayoutMismatch, naming side and index, if one is not what `types` and `device` say.
    """
    if len(arrays) != len(types):
        raise LayoutMismatch(f"{len(arrays)} {side} arrays for {len(types)} {side} buffers")
    found = np.zeros(len(arrays), np.uint64)
    for index, (array, wanted) in enumerate(zip(arrays, types, strict=True)):
        what = f"{side} array {index}"
        described = describe(array, what)
        if described.type != wanted:
            raise LayoutMismatch(
                f"{what} holds {described.type.numel} x {described.type.dtype}, the plan says "
                f"{wanted.numel} x {wanted.dtype}"
            )
        if not _usable(described.device, device, side):
            raise LayoutMismatch(f"{what} lies on {described.device}, the kernel runs on {device}")
        if described.device.type == "cuda":
            reach(described.device, device)
        if described.stream is not None:
            synchronize(described.stream, device)
        found[index] = described.address
    return found


def _usable(array: torch.device, kernel: torch.device, side: str) -> bool:
    """Only sources may lie on a peer of the kernel's GPU. Some libraries do not say on which GPU."""
    if array.type != kernel.type:
        return False
    if side == "source" or array.index is None:
        return True
    return array.type == "cpu" or array.index == ordinal(kernel)


def describe(array: object, what: str) -> Array:
    """Raises LayoutMismatch if the array is of no known kind, or not contiguous."""
    if isinstance(array, torch.Tensor):
        return _describe_tensor(array, what)
    if hasattr(array, "__cuda_array_interface__"):
        return _describe_interface(array.__cuda_array_interface__, what)
    if hasattr(array, "__dlpack__"):
        return _describe_tensor(torch.utils.dlpack.from_dlpack(array), what)
    raise LayoutMismatch(
        f"{what} is a {type(array).__name__}; pass a torch tensor, a CuPy array, or anything with "
        "__dlpack__ or __cuda_array_interface__"
    )


def _describe_tensor(tensor: torch.Tensor, what: str) -> Array:
    if not tensor.is_contiguous():
        raise LayoutMismatch(f"{what} has strides {tensor.stride()}; pass a contiguous array")
    kind = BufferType(tensor.dtype, tensor.numel())
    return Array(tensor.data_ptr(), kind, device_of(tensor))


def _describe_interface(interface: dict[str, Any], what: str) -> Array:
    typestr, shape, strides = interface["typestr"], interface["shape"], interface.get("strides")
    dtype = _TYPESTRS.get(typestr[1:])
    if dtype is None or typestr[0] == ">":
        raise LayoutMismatch(
            f"{what} has type {typestr!r}; lora_refit moves float32, float16 and bfloat16 (V2)"
        )
    if strides is not None and tuple(strides) != _contiguous_strides(shape, dtype.itemsize):
        raise LayoutMismatch(f"{what} has strides {tuple(strides)}; pass a contiguous array")
    if interface.get("mask") is not None:
        raise LayoutMismatch(f"{what} is masked; pass a plain array")
    address, read_only = interface["data"]
    if read_only and what.startswith("destination"):
        raise LayoutMismatch(f"{what} is read-only; pass a writable array")
    kind = BufferType(dtype, math.prod(shape))
    return Array(int(address or 0), kind, torch.device("cuda"), interface.get("stream"))


def _contiguous_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))
