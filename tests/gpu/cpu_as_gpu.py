"""Lets CPU tensors pass for GPU tensors: to the stand-in driver all host memory is device memory.

Only the questions of where a tensor lies, and where to allocate one, are answered differently; the
arena, the publisher and the worker run as they do on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import stand_in
import torch

GPU = torch.device("cuda", 0)


@contextlib.contextmanager
def pretend() -> Iterator[stand_in.StandIn]:
    """While it lasts, every tensor of this process lies on GPU 0."""
    driver = stand_in.load()
    with contextlib.ExitStack() as patches:
        for module in ("devices", "publisher", "kernels.arrays", "merged.bases"):
            target = f"lora_refit.{module}.device_of"
            patches.enter_context(mock.patch(target, lambda tensor: GPU))
        allocate = lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8)  # noqa: E731
        patches.enter_context(mock.patch("lora_refit.packed.zeroed_bytes", allocate))
        for module in ("collector", "row_merger"):
            patches.enter_context(
                mock.patch(f"lora_refit.merged.{module}.new_tensor", _on_the_host)
            )
        yield driver


def _on_the_host(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)
