"""AdamW on adapter shards, with float32 master values and one gradient norm over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist


class AdapterOptimizer:
    """Each rank steps its own shards: every Megatron adapter parameter is sharded, none replicated.

    The values that are optimised are float32 copies, so that a bfloat16 policy does not lose small
    updates; after each step they are rounded into the parameters in place. The copies are taken at
    the first step: set or load the adapter before it.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        learning_rate: float,
        max_grad_norm: float,
        model_parallel_group: Any,
    ) -> None:
        self._parameters = list(parameters)
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._group = model_parallel_group

    @cached_property
    def _adamw(self) -> torch.optim.AdamW:
        masters = [parameter.detach().float().clone() for parameter in self._parameters]
        return torch.optim.AdamW(masters, lr=self._learning_rate, weight_decay=0.0)

    @torch.no_grad()
    def step(self) -> float:
        """Apply and clear the gradients. Collective. Returns their norm before clipping."""
        gradients = [_take_gradient(parameter) for parameter in self._parameters]
        squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
        dist.all_reduce(squares, group=self._group)
        norm = squares.sqrt()
        shrink = (self._max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        masters: list[torch.Tensor] = self._adamw.param_groups[0]["params"]
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient * shrink
        self._adamw.step()
        self._adamw.zero_grad()
        for parameter, master in zip(self._parameters, masters, strict=True):
            parameter.copy_(master)
        return float(norm)


def _take_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    parameter.grad = None
    return torch.zeros_like(parameter).float() if gradient is None else gradient.float()
