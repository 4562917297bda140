"""Digests of what an engine's layers hold, also of weights that vLLM packed out of reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.devices import CPU, common_device
from lora_refit.engines.vllm.probe import input_size, is_packed, outputs
from lora_refit.kernels import digest

PROBE_ROWS = 256
"""Inputs of a probe. Layers with more inputs are probed with sums of several columns."""


def digest_layers(
    layers: Sequence[tuple[str, Any]], dtype: torch.dtype
) -> tuple[tuple[str, ...], npt.NDArray[np.uint64]]:
    """Names and digests of every parameter and buffer of named layers, as they are now.

    vLLM's CPU backend packs weights of linear layers into memory of its own and removes them. For
    those the digest is of the layer's outputs for fixed inputs. With up to PROBE_ROWS inputs these
    are the very weights. Beyond, an output is a weighted sum of a few of them, in which a change
    that is smaller than the sum's rounding can be lost.
    """
    names = []
    tensors = []
    for layer_name, layer in layers:
        for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.numel() > 0:
                names.append(f"{layer_name}.{name}")
                tensors.append(_flat_bytes(tensor))
        if is_packed(layer):
            names.append(f"{layer_name} (packed)")
            tensors.append(_flat_bytes(outputs(layer, _probe(input_size(layer), dtype))))
    device = common_device(list(zip(names, tensors, strict=True))) if tensors else CPU
    digests = digest(
        np.asarray([tensor.data_ptr() for tensor in tensors], np.uint64),
        np.asarray([tensor.nbytes for tensor in tensors], np.uint64),
        device,
    )
    return tuple(names), digests


def _probe(inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """[rows, inputs]: every input in one row, those of a row with different factors, so that no
    exchange of columns goes unnoticed."""
    rows = min(inputs, PROBE_ROWS)
    column = torch.arange(inputs)
    probe = torch.zeros(rows, inputs, dtype=dtype)
    probe[column % rows, column] = (1 + (column // rows) / 64).to(dtype)
    return probe


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The elements' bytes in the order in which they lie, an even number of them."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    data = tensor.detach().permute(order).contiguous().view(-1).view(torch.uint8)
    return data if len(data) % 2 == 0 else torch.cat([data, data.new_zeros(1)])
