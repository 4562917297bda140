"""The contenders of `bench merge`, on shared weights."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence

import torch

from lora_refit.bench import layer
from lora_refit.kernels import BufferType, CopyKernel, MergeKernel

ALPHA_OVER_RANK = 2
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


class Weights:
    """Base weights as ranks hold them and as checkpoints do, and merged tensors to write."""

    def __init__(self, layers: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.layers = layers
        self.shards = [w for _ in range(layers) for w in layer.random_weights(generator)]
        self.base = self._checkpoint_tensors()
        self.merged = self._checkpoint_tensors()
        self._generator = generator
        self._copy = CopyKernel(layer.copy_blocks(layers), _types(self.shards), _types(self.base))
        self._copy.copy(self.shards, self.base)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def copy(self) -> None:
        self._copy.copy(self.shards, self.merged)

    def torch_copy(self) -> None:
        for merged, base in zip(self.merged, self.base, strict=True):
            merged.copy_(base)

    def merger(self, lora_rank: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """What lora_refit and Megatron-Bridge each do at this rank."""
        factors = layer.random_factors(lora_rank, self._generator)
        blocks, segments = layer.merge_program(self.layers, lora_rank, float(ALPHA_OVER_RANK))
        sources = [*self.shards, *factors]
        kernel = MergeKernel(
            blocks, segments, _types(sources), _types(self.merged), len(layer.MODULES) * self.layers
        )
        gathered = [*layer.gathered_factors(factors, lora_rank).values()] * self.layers

        def ours() -> None:
            kernel.merge(sources, self.merged)

        def bridge() -> None:
            for base, (a, b) in zip(self.base, gathered, strict=True):
                _bridge_merge(base, lora_rank, a, b)

        self._check(ours, gathered, lora_rank)
        return ours, bridge

    def _check(
        self,
        ours: Callable[[], None],
        gathered: Sequence[tuple[torch.Tensor, torch.Tensor]],
        lora_rank: int,
    ) -> None:
        """Both merge to the same weights, but for sums that round at another tie."""
        ours()
        for name in ("k_proj", "o_proj"):
            number = layer.TENSORS.index(name)
            expected = _bridge_merge(self.base[number], lora_rank, *gathered[number])
            torch.testing.assert_close(self.merged[number], expected, rtol=2**-7, atol=1e-6)

    def _checkpoint_tensors(self) -> list[torch.Tensor]:
        shapes = [*layer.CHECKPOINT_SHAPES.values()] * self.layers
        return [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]


def keep_freed_memory() -> None:
    """Let glibc reuse large freed blocks, instead of asking the system for fresh pages each time."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _bridge_merge(
    base: torch.Tensor, lora_rank: int, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    from megatron.bridge.models.conversion.peft_bridge import MegatronPeftBridge

    merged: torch.Tensor = MegatronPeftBridge()._merge_single_adapter_weight(
        base, ALPHA_OVER_RANK * lora_rank, lora_rank, a, b
    )
    return merged


def _types(tensors: Sequence[torch.Tensor]) -> list[BufferType]:
    return [BufferType(tensor.dtype, tensor.numel()) for tensor in tensors]
