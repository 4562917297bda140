"""The layers of a vLLM model that merged weights fill, each of them as a whole."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from lora_refit.engines.vllm.load_trace import LoadTrace, Parameter, Write, trace_loading
from lora_refit.errors import CoverageError, LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import DTYPE_CODES


class NamedShape(Protocol):
    """A checkpoint weight [out, in], such as a MergedWeight."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...


@dataclass(frozen=True, eq=False)
class TargetLayer:
    """A module that the weights fill.

    name: in the engine's model. weights: checkpoint names. copied: elements that vLLM's loader
    copies into it on this worker.
    """

    name: str
    module: torch.nn.Module
    weights: tuple[str, ...]
    copied: int


def find_targets(
    model: torch.nn.Module, weights: Sequence[NamedShape], dtype: torch.dtype
) -> tuple[TargetLayer, ...]:
    """The layers that weights of this dtype fill on this worker, in the order of loading.

    Raises CoverageError naming a weight that the model does not load, LayoutMismatch one that is
    listed twice, UnsupportedAdapter a layer that would be filled in part, takes quantised weights
    only, or shares its weight with another.
    """
    shapes = {weight.name: tuple(weight.shape) for weight in weights}
    if len(shapes) < len(weights):
        repeated = Counter(weight.name for weight in weights).most_common(1)[0][0]
        raise LayoutMismatch(f"{repeated} is listed twice among the merged weights")
    tied = _tied_parameters(model)
    for name in shapes:
        if name in tied:
            raise _tied_error(name, tied[name])
    trace = trace_loading(model, shapes, dtype)
    written = {write.weight for write in trace.writes if not write.is_fill}
    for name in shapes:
        if name not in written:
            raise CoverageError(
                f"{name}: vLLM's {type(model).__name__} drops it on this worker; a merged adapter "
                "needs an engine without pipeline or expert parallelism that loads each weight"
            )
    by_layer: dict[str, list[Write]] = defaultdict(list)
    for write in trace.writes:
        by_layer[write.parameter.layer_name].append(write)
    for name, writes in by_layer.items():
        qualified = f"{name}.{writes[0].parameter.name}"
        if qualified in tied:
            raise _tied_error(qualified, tied[qualified])
        _require_floats(writes)
        _require_repacking(name, writes[0].parameter.layer)
        _require_whole(model, name, writes, trace)
    return tuple(
        TargetLayer(
            name=name,
            module=writes[0].parameter.layer,
            weights=tuple(dict.fromkeys(write.weight for write in writes)),
            copied=sum(write.numel for write in writes if not write.is_fill),
        )
        for name, writes in by_layer.items()
    )


def _tied_parameters(model: torch.nn.Module) -> dict[str, str]:
    """Name of every parameter that another module has too -> the other's name."""
    names: dict[int, list[str]] = defaultdict(list)
    for layer_name, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            names[id(parameter)].append(f"{layer_name}.{name}")
    groups = [group for group in names.values() if len(group) > 1]
    return {name: group[name == group[0]] for group in groups for name in group}


def _tied_error(name: str, other: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{name}: the engine ties it to {other}, so merging an adapter of one would change the "
        "other; leave embeddings and output layer out of the adapter, or untie them"
    )


def _require_floats(writes: Sequence[Write]) -> None:
    """What is loaded as floats is quantised by the engine's own post-processing, if at all."""
    for write in writes:
        parameter = write.parameter
        if parameter.dtype not in DTYPE_CODES:
            raise UnsupportedAdapter(
                f"{parameter.layer_name}.{parameter.name}: its checkpoint is quantised "
                f"({parameter.dtype}), and the engine cannot quantise {write.weight} itself; serve "
                "an unquantised checkpoint, with online quantisation if wanted, or use adapter mode"
            )


def _require_repacking(layer_name: str, layer: Any) -> None:
    """vLLM's CPU backend packs experts when they are first loaded, and not when they are reloaded:
    it would multiply with unpacked weights as if they were packed."""
    method = getattr(layer, "quant_method", None)
    if (
        isinstance(method, UnquantizedFusedMoEMethod)
        and method.unquantized_backend is UnquantizedMoeBackend.CPU
    ):
        raise UnsupportedAdapter(
            f"{layer_name}: on a CPU, vLLM does not pack experts again when they are reloaded; leave "
            "the experts out of the adapter, or use adapter mode"
        )


def _require_whole(
    model: torch.nn.Module, layer_name: str, writes: Sequence[Write], trace: LoadTrace
) -> None:
    """vLLM reloads a layer as a whole: what is not sent would be uninitialised memory. A bias is
    the exception, it stays in place."""
    filled: Counter[str] = Counter()
    for write in writes:
        filled[write.parameter.name] += write.numel
    for parameter in trace.parameters:
        if parameter.layer_name != layer_name or parameter.name in SKIP_TENSORS:
            continue
        size = math.prod(parameter.shape)
        if filled[parameter.name] < size:
            sent = tuple(dict.fromkeys(write.weight for write in writes))
            raise UnsupportedAdapter(
                f"{layer_name}: vLLM reloads it as a whole, and the adapter has "
                f"{', '.join(sent)} without {_missing(model, parameter, sent)} "
                f"({filled[parameter.name]} of {size} elements of {parameter.name}); target all of "
                "a fused layer's modules, or use adapter mode"
            )


def _missing(model: torch.nn.Module, parameter: Parameter, sent: Sequence[str]) -> str:
    """The other parts of a fused layer, by the model's own table of them."""
    leaf = parameter.layer_name.removesuffix(".base_layer").rpartition(".")[2]
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    others: Any = [
        part for part in fused.get(leaf, ()) if not any(f".{part}." in name for name in sent)
    ]
    return ", ".join(others) or "its other weights"
