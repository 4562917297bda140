"""Where tensors live and which stream orders the work on them: what is asked of torch, in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lora_refit.errors import LayoutMismatch, UnsupportedAdapter

CPU = torch.device("cpu")


def device_of(tensor: torch.Tensor) -> torch.device:
    """The tensor's device; a CUDA device has its index."""
    return tensor.device


def common_device(parameters: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of all tensors, the CPU if there are none.

    Raises UnsupportedAdapter, naming two of them, if they lie on different devices.
    """
    first: dict[torch.device, str] = {}
    for name, tensor in parameters:
        first.setdefault(device_of(tensor), name)
    if len(first) > 1:
        (device, name), (other, another) = list(first.items())[:2]
        raise UnsupportedAdapter(
            f"{name} lies on {device} but {another} on {other}; one launch packs one device: keep "
            "the adapter of a trainer rank on one"
        )
    return next(iter(first), CPU)


def stream_handle(stream: object | None, device: torch.device) -> int:
    """The CUstream behind a stream, 0 on a CPU.

    stream: a handle, a torch stream (`cuda_stream`), a CuPy stream (`ptr`), anything with
        `__cuda_stream__`, or None for the stream that torch is using on `device`.

    Raises LayoutMismatch for anything else.
    """
    if stream is None:
        return _current_stream(device)
    if isinstance(stream, int) and not isinstance(stream, bool) and 0 <= stream < 2**64:
        return stream
    for attribute in ("cuda_stream", "ptr"):
        handle = getattr(stream, attribute, None)
        if isinstance(handle, int):
            return handle
    if hasattr(stream, "__cuda_stream__"):
        _, handle = stream.__cuda_stream__()
        return int(handle)
    raise LayoutMismatch(
        f"{stream!r} is no CUDA stream; pass a torch or CuPy stream, or its handle"
    )


def _current_stream(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.current_stream(device).cuda_stream)


def finish_current_work(device: torch.device) -> None:
    """Wait for what torch's current stream of a GPU was given; on a CPU nothing is pending."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def current_cuda_device() -> int:
    """Number of the GPU that torch means by "cuda"."""
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised memory on the device."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def zeroed_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the device."""
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)
