"""A worker whose engine can be started with `quantization="test_int8"`.

Online quantisation with one scale a row, on vLLM's own base class: its fp8 needs a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from mutants import MutantWorkerExtension
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase
from vllm.model_executor.utils import replace_parameter


class Int8OnlineLinear(OnlineLinearBase):
    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        scale = layer.weight.abs().amax(dim=1, keepdim=True).float() / 127
        replace_parameter(layer, "weight", (layer.weight / scale).round().to(torch.int8))
        replace_parameter(layer, "weight_scale", scale)
        layer._already_called_process_weights_after_loading = True

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = (layer.weight * layer.weight_scale).to(x.dtype)
        return torch.nn.functional.linear(x, weight, bias)


@register_quantization_config("test_int8")
class Int8OnlineConfig(QuantizationConfig):
    def get_name(self) -> str:
        return "test_int8"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Int8OnlineConfig:
        return cls()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        return Int8OnlineLinear() if isinstance(layer, LinearBase) else None


class Int8WorkerExtension(MutantWorkerExtension):
    """Importing this module registers the method in a worker."""
