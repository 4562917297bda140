"""What the benchmark's trainer ranks run, by command of the benchmark process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save

from lora_refit.publisher import Publisher
from lora_refit.sources.base import PEFT_PREFIX
from lora_refit.sources.megatron import MegatronSource
from lora_refit.testing.megatron import PolicyConfig, adapter_parameters, build_policy

State = dict[str, Any]


def build(state: State, config: PolicyConfig) -> int:
    """Build the policy and fill its adapter; return the adapter's bytes on this rank."""
    policy = state["policy"] = build_policy(config)
    parameters = [parameter for _, parameter in adapter_parameters(policy.chunks)]
    for parameter in parameters:
        parameter.data.normal_(0.0, 0.05)
    return sum(parameter.nbytes for parameter in parameters)


def open_publisher(state: State, dtype: torch.dtype) -> bytes:
    policy = state["policy"]
    publisher = Publisher(MegatronSource(policy.chunks, bridge=policy.bridge), dtype=dtype)
    state["publisher"] = publisher
    return publisher.spec.to_bytes()


def publish(state: State, version: int) -> bytes:
    publisher: Publisher = state["publisher"]
    return publisher.publish(version).to_bytes()


def save_peft_directory(state: State, path: Path) -> None:
    """The peer's way to disk: Megatron-Bridge's own `save_hf_adapter`."""
    policy = state["policy"]
    policy.bridge.save_hf_adapter(
        policy.chunks, path, policy.peft, base_model_name_or_path="base", show_progress=False
    )


def export_bytes(state: State) -> bytes:
    """The peer's way to the wire: Megatron-Bridge's export, serialised on rank 0."""
    policy = state["policy"]
    exported = policy.bridge.export_adapter_weights(policy.chunks, cpu=True, show_progress=False)
    # Exports may alias live parameters and each other; safetensors wants tensors of their own.
    tensors = {PEFT_PREFIX + name: tensor.detach().clone() for name, tensor in exported}
    return save(tensors) if dist.get_rank() == 0 else b""
