"""Builds a real Megatron LoRA policy from a Hugging Face checkpoint, on CPU or GPU ranks."""

from __future__ import annotations

import contextlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_refit.testing import megatron_cpu

_SPLIT_TARGETS = {
    "linear_q",
    "linear_k",
    "linear_v",
    "linear_fc1_gate",
    "linear_fc1_up",
}
_MAGNITUDE = ".weight_magnitude"
_GATE_AND_UP = ("linear_fc1.adapter.linear_out.weight", f"linear_fc1.adapter{_MAGNITUDE}")


@dataclass(frozen=True)
class PolicyConfig:
    """What to build. `model` is a Hugging Face checkpoint or, without weights, a config folder.

    `targets` are Megatron module names; names of the split projections (`linear_q`,
    `linear_fc1_gate`, ...) select Bridge's CanonicalLoRA. At tensor parallel size N, `lora_rank`
    must divide by N: Megatron shards the rank dimension of column-parallel adapters. `dora` selects
    Bridge's DoRA, which has no split projections.
    """

    model: str | Path
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False
    dtype: str = "float32"
    lora_rank: int = 8
    lora_alpha: int = 16
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    load_weights: bool = True
    dora: bool = False


@dataclass(frozen=True)
class Policy:
    """This rank's share of the policy: `chunks` are its model chunks, `peft` their LoRA recipe."""

    bridge: Any
    chunks: list[Any]
    peft: Any


def build_policy(config: PolicyConfig) -> Policy:
    """Build the policy with its adapter attached; only adapter parameters are trainable. Collective.

    `torch.distributed` must be initialised with as many ranks as the parallel sizes ask for. A
    policy built earlier in this process must no longer be used: the parallel state is replaced.
    """
    megatron_cpu.enable()
    from megatron.bridge import AutoBridge

    _initialize_parallel_state(config)
    dtype = getattr(torch, config.dtype)
    bridge_chatter = io.StringIO()
    with contextlib.redirect_stdout(bridge_chatter):
        if config.load_weights:
            bridge = AutoBridge.from_hf_pretrained(config.model, dtype=dtype)
        else:
            bridge = AutoBridge.from_hf_config(_read_hf_config(config.model))
        provider = _configure_provider(bridge, config, dtype)
        chunks = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available()
        )
        peft = _lora_recipe(config)
        chunks = peft(chunks, training=True)
        peft.set_params_to_save(chunks)
    return Policy(bridge=bridge, chunks=chunks, peft=peft)


def adapter_parameters(chunks: Sequence[Any]) -> list[tuple[str, torch.nn.Parameter]]:
    """This rank's adapter parameters in model order, named `<chunk index>.<parameter name>`."""
    return [
        (f"{index}.{name}", parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
        if parameter.requires_grad
    ]


@torch.no_grad()
def randomize_adapters(chunks: Sequence[Any], seed: int, std: float = 0.05) -> None:
    """Fill every adapter parameter with normal values of standard deviation `std`, around 0, and
    DoRA's magnitudes around 1.

    The values belong to the logical adapter: the same seed gives the same policy at every tensor,
    pipeline and expert parallel size (but not for another split of the projections).
    """
    for chunk in chunks:
        layers = _global_layer_names(chunk)
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                logical = _logical_name(name, layers)
                generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {logical}".encode()))
                dim = _partition_dim(name, parameter, chunk)
                value = _random_shard(logical, parameter, dim, generator) * std
                parameter.copy_(1 + value if name.endswith(_MAGNITUDE) else value)


def _initialize_parallel_state(config: PolicyConfig) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_parallel,
        pipeline_model_parallel_size=config.pipeline_parallel,
        expert_model_parallel_size=config.expert_parallel,
    )
    model_parallel_cuda_manual_seed(1234, inference_rng_tracker=not torch.cuda.is_available())


def _read_hf_config(path: str | Path) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(path)


def _configure_provider(bridge: Any, config: PolicyConfig, dtype: torch.dtype) -> Any:
    """Megatron's own layers without fused kernels, so that CPU and GPU run the same modules."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    provider = bridge.to_megatron_provider(load_weights=config.load_weights)
    settings: dict[str, Any] = {
        "transformer_layer_spec": local_layer_spec,
        "perform_initialization": config.load_weights,
        "use_cpu_initialization": not torch.cuda.is_available(),
        "tensor_model_parallel_size": config.tensor_parallel,
        "pipeline_model_parallel_size": config.pipeline_parallel,
        "expert_model_parallel_size": config.expert_parallel,
        "sequence_parallel": config.sequence_parallel,
        "variable_seq_lengths": config.pipeline_parallel > 1,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "autocast_dtype": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "persist_layer_norm": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "cross_entropy_loss_fusion": False,
        "moe_permute_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
    }
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    return provider


def _lora_recipe(config: PolicyConfig) -> Any:
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    recipe = CanonicalLoRA if _SPLIT_TARGETS.intersection(config.targets) else LoRA
    recipe = DoRA if config.dora else recipe
    return recipe(
        target_modules=list(config.targets),
        dim=config.lora_rank,
        alpha=config.lora_alpha,
    )


def _global_layer_names(chunk: Any) -> dict[str, str]:
    """Module name of each transformer layer -> the name it has without pipeline parallelism."""
    return {
        name: f"{name.rsplit('.', 1)[0]}.{module.layer_number - 1}"
        for name, module in chunk.named_modules()
        if hasattr(module, "layer_number") and name.rsplit(".", 1)[-1].isdigit()
    }


def _logical_name(name: str, layers: dict[str, str]) -> str:
    """The parameter's name in a model without pipeline or expert parallelism."""
    from megatron.core import parallel_state

    for local, logical in layers.items():
        if name.startswith(f"{local}."):
            name = logical + name[len(local) :]
            break
    head, marker, tail = name.partition(".local_experts.")
    if not marker:
        return name
    expert, _, rest = tail.partition(".")
    return f"{head}{marker}{parallel_state.get_expert_model_parallel_rank()}:{expert}.{rest}"


def _random_shard(
    logical: str, parameter: torch.nn.Parameter, dim: int | None, generator: torch.Generator
) -> torch.Tensor:
    """This rank's shard along `dim` of a standard normal tensor that all tensor-parallel ranks agree
    on; all of it if `dim` is None."""
    from megatron.core import parallel_state

    if ".experts." in logical:
        ranks = parallel_state.get_expert_tensor_parallel_world_size()
        rank = parallel_state.get_expert_tensor_parallel_rank()
    else:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
    if dim is None:
        return torch.randn(parameter.shape, generator=generator)
    shape = list(parameter.shape)
    shape[dim] *= ranks
    full = torch.randn(shape, generator=generator)
    parts = 2 if logical.endswith(_GATE_AND_UP) else 1
    shards = [part.chunk(ranks, dim)[rank] for part in full.chunk(parts, dim)]
    return torch.cat(shards, dim)


def _partition_dim(name: str, parameter: torch.nn.Parameter, chunk: Any) -> int | None:
    """The tensor-parallel dimension. Bridge does not mark that of DoRA's magnitudes, which have
    the rows of their weight."""
    if name.endswith(_MAGNITUDE):
        adapter = chunk.get_submodule(name.removesuffix(_MAGNITUDE))
        return None if adapter.input_is_parallel else 0
    dim: int | None = getattr(parameter, "partition_dim", None)
    return dim if getattr(parameter, "tensor_model_parallel", False) else None
