"""Buffers in GPU memory with poison around them, at any address that their dtype allows."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

POISON = 0x5A
GUARD_BYTES = 64
DEVICE = torch.device("cuda", 0)


class GpuBuffer:
    """The bytes of a CPU tensor in GPU memory, `misaligned` elements past an aligned address."""

    def __init__(self, tensor: torch.Tensor, misaligned: int = 0) -> None:
        self.dtype = tensor.dtype
        self._first = GUARD_BYTES + misaligned * tensor.dtype.itemsize
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._last = self._first + len(raw)
        self._storage = torch.full((self._last + GUARD_BYTES,), POISON, dtype=torch.uint8)
        self._storage[self._first : self._last] = raw
        self._storage = self._storage.to(DEVICE)

    @property
    def address(self) -> int:
        return self._storage.data_ptr() + self._first

    def read(self) -> torch.Tensor:
        """uint8, what lies there now."""
        return self._storage[self._first : self._last].cpu()

    def guards_are_intact(self) -> bool:
        before, after = self._storage[: self._first], self._storage[self._last :]
        return bool((before == POISON).all()) and bool((after == POISON).all())


def addresses(buffers: list[GpuBuffer]) -> NDArray[np.uint64]:
    return np.asarray([buffer.address for buffer in buffers], np.uint64)
