"""Lets CPU tensors pass for GPU tensors: to the stand-in driver all host memory is device memory.

Only the questions of where a tensor lies, and where to allocate one, are answered differently; the
arena, the publisher and the worker run as they do on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import stand_in
import torch

GPU = torch.device("cuda", 0)


@contextlib.contextmanager
def pretend() -> Iterator[stand_in.StandIn]:
    """While it lasts, every tensor of this process lies on GPU 0."""
    driver = stand_in.load()
    with contextlib.ExitStack() as patches:
        for module in ("devices", "publisher", "kernels.arrays"):
            target = f"lora_refit.{module}.device_of"
            patches.enter_context(mock.patch(target, lambda tensor: GPU))
        allocate = lambda nbytes, device: torch.zeros(nbytes, dtype=torch.uint8)  # noqa: E731
        patches.enter_context(mock.patch("lora_refit.packed.zeroed_bytes", allocate))
        yield driver
