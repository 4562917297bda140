"""Makes the real Megatron-Core and Megatron-Bridge import and run on a machine without CUDA.

Nothing of Megatron's arithmetic is replaced: every patch below removes one assumption that a CUDA
runtime, Triton or TransformerEngine is there. Written against megatron-core 0.19 and
megatron-bridge 0.6. `enable()` must run before anything from `megatron` is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import typing_extensions

_enabled = False


def enable() -> None:
    """Prepare this process for Megatron on CPU. Idempotent; does nothing where CUDA is available.

    Raises:
        RuntimeError: Megatron was imported before, so the import-time patches come too late.
    """
    global _enabled
    if _enabled or torch.cuda.is_available():
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "megatron was imported before lora_refit.testing.megatron_cpu.enable(); call it first"
        )
    _backport_typing_override()
    _replace_triton_only_module()
    _replace_cuda_runtime_calls()
    with _without_torch_compile(), _quietly():
        _define_transformer_engine_names()
        _import_bridge_without_transformer_engine()
        _map_separate_norms()
    _allow_torch_norm_under_sequence_parallel()
    _accept_tensor_split_sizes()
    _count_scheduled_tokens_on_cpu()
    _enabled = True


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Importing Megatron reports each missing optional package and takes over the root logger."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
            root.setLevel(level)
            root.handlers[:] = handlers


def _backport_typing_override() -> None:
    """Megatron-Bridge imports `typing.override`, which Python has from 3.12 on."""
    if not hasattr(typing, "override"):
        typing.override = typing_extensions.override  # type: ignore[attr-defined]


def _replace_triton_only_module() -> None:
    """`moe/ops/paged_stash.py` is the one module that imports Triton without a guard."""

    def unavailable(*_: Any, **__: Any) -> None:
        raise RuntimeError("Megatron's paged stash is a Triton kernel and has no CPU version")

    name = "megatron.core.transformer.moe.ops.paged_stash"
    stash = types.ModuleType(name)
    stash.GLOBAL_BLOCK_SIZE = 1024  # type: ignore[attr-defined]
    stash.paged_stash_copy_kernel = unavailable  # type: ignore[attr-defined]
    stash.paged_stash_pop_kernel = unavailable  # type: ignore[attr-defined]
    sys.modules[name] = stash


class _NoStream:
    """Stands for a CUDA stream or event: every method does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _NoStream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: _NoStream()


def _replace_cuda_runtime_calls() -> None:
    """Megatron asks for the current device, stream and memory without checking for CUDA first."""

    def returning(make: Callable[[], Any]) -> Callable[..., Any]:
        return lambda *_, **__: make()

    replacements: dict[str, Any] = {
        "current_device": returning(lambda: torch.device("cpu")),
        "current_stream": returning(_NoStream),
        "default_stream": returning(_NoStream),
        "stream": returning(contextlib.nullcontext),
        "synchronize": returning(lambda: None),
        "set_device": returning(lambda: None),
        "empty_cache": returning(lambda: None),
        "Stream": type("Stream", (_NoStream,), {}),
        "Event": type("Event", (_NoStream,), {}),
    }
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)


@contextlib.contextmanager
def _without_torch_compile() -> Iterator[None]:
    """Megatron decorates helpers with `torch.compile` at import; on CPU each would be built in C++."""

    def uncompiled(model: Any = None, **_: Any) -> Any:
        return model if model is not None else (lambda function: function)

    original = torch.compile
    torch.compile = uncompiled
    try:
        yield
    finally:
        torch.compile = original


def _define_transformer_engine_names() -> None:
    """Without TransformerEngine, Megatron-Core leaves mocks under these names.

    Megatron-Bridge passes them to `isinstance`, which needs classes.
    """
    extensions = importlib.import_module("megatron.core.extensions.transformer_engine")
    for name in (
        "TELinear",
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ):
        if not isinstance(getattr(extensions, name, None), type):
            setattr(extensions, name, type(name, (), {}))


def _import_bridge_without_transformer_engine() -> None:
    """Import `megatron.bridge` although its LoRA layers import TransformerEngine without a guard.

    The LoRA layers use it for type annotations and for classes that this process never makes, so
    they are imported first, beside a placeholder that is removed again: all guarded imports
    elsewhere then see that TransformerEngine is missing. `megatron.bridge` itself cannot be imported
    first (it imports the LoRA layers), hence the bare package that only lends its path.
    """
    import megatron

    folder = next(p for p in megatron.__path__ if importlib.util.find_spec("megatron.bridge"))
    bare_bridge = types.ModuleType("megatron.bridge")
    bare_bridge.__path__ = [f"{folder}/bridge"]
    engine_torch = types.ModuleType("transformer_engine.pytorch")
    engine_torch.ops = types.SimpleNamespace(Sequential=object)  # type: ignore[attr-defined]
    engine_torch.Linear = type("Linear", (), {})  # type: ignore[attr-defined]
    engine_torch.LayerNormLinear = type("LayerNormLinear", (), {})  # type: ignore[attr-defined]
    engine = types.ModuleType("transformer_engine")
    engine.__path__ = []
    engine.pytorch = engine_torch  # type: ignore[attr-defined]

    placeholders = {
        "megatron.bridge": bare_bridge,
        "transformer_engine": engine,
        "transformer_engine.pytorch": engine_torch,
    }
    sys.modules.update(placeholders)
    try:
        importlib.import_module("megatron.bridge.peft.lora_layers")
    finally:
        for name in placeholders:
            del sys.modules[name]
    bridge = importlib.import_module("megatron.bridge")
    bridge.peft = sys.modules["megatron.bridge.peft"]  # type: ignore[attr-defined]


def _map_separate_norms() -> None:
    """Teach Bridge the names of norms that are modules of their own.

    Bridge's weight mappings know the norms by the names they have when TransformerEngine fuses them
    into the next linear layer; Megatron's local layer spec keeps them separate.
    """
    from megatron.bridge.models.conversion.mapping_registry import (
        MegatronMappingRegistry,
    )
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    separate_norms = {
        "decoder.layers.*.input_layernorm.weight": "model.layers.*.input_layernorm.weight",
        "decoder.layers.*.pre_mlp_layernorm.weight": (
            "model.layers.*.post_attention_layernorm.weight"
        ),
    }
    original = MegatronMappingRegistry.__init__

    def with_separate_norms(self: Any, *mappings: Any) -> None:
        known = {mapping.megatron_param for mapping in mappings}
        missing = (
            AutoMapping(megatron_param=ours, hf_param=theirs)
            for ours, theirs in separate_norms.items()
            if ours not in known
        )
        original(self, *mappings, *missing)

    MegatronMappingRegistry.__init__ = with_separate_norms


def _allow_torch_norm_under_sequence_parallel() -> None:
    """Build torch norms although sequence parallelism is on, and mark their weights.

    Megatron refuses because nothing would sum the gradients of such a norm over the ranks; with
    frozen norms there are none, and the mark is what its own gradient sum looks for.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def build(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        sequence_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = build


def _accept_tensor_split_sizes() -> None:
    """Megatron's MoE dispatcher leaves split sizes as tensors on CPU; gloo wants lists of ints."""
    original = torch.distributed.all_to_all_single

    def as_list(sizes: Any) -> Any:
        return sizes.tolist() if hasattr(sizes, "tolist") else sizes

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        return original(
            output,
            input,
            as_list(output_split_sizes),
            as_list(input_split_sizes),
            *args,
            **kwargs,
        )

    torch.distributed.all_to_all_single = all_to_all_single


def _count_scheduled_tokens_on_cpu() -> None:
    """Megatron's pipeline schedules make one token counter with `torch.zeros(device="cuda")`."""
    from megatron.core.pipeline_parallel import schedules

    class TorchOnCpu(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        @staticmethod
        def zeros(*size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
            return torch.zeros(*size, **kwargs)

    schedules.torch = TorchOnCpu("torch")
