"""Reading a linear layer's weight through its own matrix product, where the tensor cannot be read."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


def is_packed(layer: Any) -> bool:
    """Whether vLLM's CPU backend may multiply with a packed copy of the weight. A linear layer then
    has no weight any more; an output layer keeps it beside the copy."""
    if getattr(layer, "cpu_linear", None) is None:
        return False
    return isinstance(layer, VocabParallelEmbedding) or layer.weight.numel() == 0


def input_size(layer: Any) -> int:
    """Columns of the weight on this worker."""
    if isinstance(layer, RowParallelLinear):
        return int(layer.input_size_per_partition)
    if isinstance(layer, VocabParallelEmbedding):
        return int(layer.embedding_dim)
    assert isinstance(layer, LinearBase)
    return int(layer.input_size)


def outputs(layer: Any, inputs: torch.Tensor) -> torch.Tensor:
    """inputs [n, in] times the weight, [n, out], without bias, adapters and communication."""
    device = next((tensor.device for tensor in layer.parameters()), inputs.device)
    result: torch.Tensor = layer.quant_method.apply(layer, inputs.to(device), None)
    return result


def columns(layer: Any, indices: npt.NDArray[np.int64], dtype: torch.dtype) -> torch.Tensor:
    """Columns of the weight, [out, n]: exact for floats unless a row holds an infinity or NaN."""
    inputs = torch.zeros(len(indices), input_size(layer), dtype=dtype)
    inputs[torch.arange(len(indices)), torch.from_numpy(indices)] = 1
    return outputs(layer, inputs).T
