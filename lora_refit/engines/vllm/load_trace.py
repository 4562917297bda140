"""Which elements of a layer vLLM's own loader fills from which checkpoint weight.

The model's `load_weights` runs on tensors without memory, and every copy that it makes is recorded.
What differs between vLLM releases is kept here and in `layer_reload`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO, _get_original_loader
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from lora_refit.errors import CoverageError, UnsupportedAdapter

Shape = tuple[int, ...]
IntArray = npt.NDArray[np.int64]

_COPY = torch.ops.aten.copy_.default
_FILLS = (
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.fill_.Tensor,
    torch.ops.aten.zero_.default,
)


@dataclass(frozen=True, eq=False)
class Parameter:
    """A parameter or buffer in the form in which checkpoints are loaded into it.

    layer_name: of its module in the engine's model. name: within that module.
    """

    layer: torch.nn.Module
    layer_name: str
    name: str
    shape: Shape
    dtype: torch.dtype


@dataclass(frozen=True)
class _View:
    """Elements of a contiguous tensor: strides and offset in elements."""

    strides: Shape
    offset: int


@dataclass(frozen=True)
class Write:
    """One copy into a parameter, or a fill.

    weight: the checkpoint weight that it comes from. source: where it lies in the weight; None for
    a fill, and for values that the loader computed.
    """

    parameter: Parameter
    weight: str
    shape: Shape
    source: _View | None
    target: _View
    is_fill: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def places(self, elements: IntArray) -> IntArray:
        """Flat positions in the parameter of flat positions in the weight; -1 for those that this
        copy does not take."""
        if self.source is None:
            return np.full(len(elements), -1, np.int64)
        rest = elements - self.source.offset
        places = np.full(len(elements), self.target.offset, np.int64)
        inside = rest >= 0
        axes = zip(self.source.strides, self.shape, self.target.strides, strict=True)
        for stride, size, target_stride in sorted(axes, reverse=True):
            if size == 1:
                continue
            index, rest = np.divmod(rest, max(stride, 1))
            inside &= index < size
            places += index * target_stride
        return np.where(inside & (rest == 0), places, -1)


@dataclass(frozen=True)
class LoadTrace:
    """What loading some weights writes. parameters: of the whole model, loaded or not."""

    writes: tuple[Write, ...]
    parameters: tuple[Parameter, ...]


def trace_loading(
    model: torch.nn.Module, shapes: Mapping[str, Shape], dtype: torch.dtype
) -> LoadTrace:
    """Record what the model's `load_weights` does with weights of these names and shapes.

    The model's live tensors are neither read nor written, and are in their places afterwards.
    Raises CoverageError naming the weight that the loader refuses, UnsupportedAdapter for models
    that cannot be loaded layer by layer.
    """
    if getattr(model, "_do_torchao_reload", False):
        raise UnsupportedAdapter(
            "the engine quantises with torchao, which reloads the whole model at a time; serve the "
            "policy in adapter mode"
        )
    sources = {
        name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()
    }
    current = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in sources.items():
            current = recorder.current = name
            yield name, tensor

    with _in_loading_form(model) as parameters, torch.no_grad():
        recorder = _Recorder(parameters, {_storage(t): name for name, t in sources.items()})
        try:
            with recorder:
                model.load_weights(weights())  # type: ignore[operator]
        except Exception as error:
            raise CoverageError(
                f"{current} {list(shapes.get(current, ()))}: vLLM's loader of "
                f"{type(model).__name__} does not take it: {_gist(error)}"
            ) from error
        return LoadTrace(tuple(recorder.writes), tuple(parameters.values()))


class _Recorder(TorchDispatchMode):
    """Records writes into tensors of known storages.

    current: the weight that was handed to the loader last; values that it computes are taken to be
    that one's.
    """

    def __init__(self, parameters: Mapping[int, Parameter], weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._parameters = parameters
        self._weights = weights
        self.current = ""
        self.writes: list[Write] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _COPY or func in _FILLS:
            parameter = self._parameters.get(_storage(args[0]))
            if parameter is not None:
                self._record(parameter, args[0], args[1] if func is _COPY else None)
        return func(*args, **(kwargs or {}))

    def _record(
        self, parameter: Parameter, target: torch.Tensor, source: torch.Tensor | None
    ) -> None:
        weight = None if source is None else self._weights.get(_storage(source))
        view = None
        if source is not None and weight is not None:
            view = _view(source.expand(target.shape))
            if any(s == 0 and size > 1 for s, size in zip(view.strides, target.shape, strict=True)):
                view = None
        self.writes.append(
            Write(
                parameter,
                weight or self.current,
                tuple(target.shape),
                view,
                _view(target),
                is_fill=source is None,
            )
        )


@contextmanager
def _in_loading_form(model: torch.nn.Module) -> Iterator[dict[int, Parameter]]:
    """Give every module meta tensors of the form that checkpoints are loaded into, as vLLM recorded
    it before it repacked, quantised or removed them. Yields their parameters by storage."""
    saved: list[tuple[dict[str, Any], dict[str, Any]]] = []
    parameters: dict[int, Parameter] = {}
    shared: dict[int, torch.Tensor] = {}
    try:
        for layer_name, layer in model.named_modules():
            forms = _loading_forms(layer)
            for live, form in zip((layer._parameters, layer._buffers), forms, strict=True):
                saved.append((live, dict(live)))
                for name, tensor in form.items():
                    if live.get(name) is not None:
                        # A tied weight is one tensor in two modules, and must stay one.
                        form[name] = tensor = shared.setdefault(id(live[name]), tensor)
                    parameters.setdefault(
                        _storage(tensor),
                        Parameter(layer, layer_name, name, tuple(tensor.shape), tensor.dtype),
                    )
                live.clear()
                live.update(form)
        yield parameters
    finally:
        for live, tensors in saved:
            live.clear()
            live.update(tensors)


def _loading_forms(layer: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Meta tensors of a layer's parameters and buffers, with loaders that load at once."""
    info = LAYERWISE_INFO.get(layer)
    parameters, buffers = info.restore_metadata if info is not None else ({}, {})
    is_recorded = bool(parameters or buffers)

    def forms(live: dict[str, Any], recorded: dict[str, Any]) -> dict[str, Any]:
        stays = {
            name: tensor
            for name, tensor in live.items()
            if tensor is not None and (name in SKIP_TENSORS or not is_recorded)
        }
        return {name: _meta(tensor, layer) for name, tensor in (recorded | stays).items()}

    return forms(layer._parameters, parameters), forms(layer._buffers, buffers)


def _meta(tensor: torch.Tensor, layer: torch.nn.Module) -> Any:
    meta: Any = restore_layer_refs(to_meta_tensor(tensor), layer)
    meta.weight_loader = _get_original_loader(meta)
    return meta


def _gist(error: Exception) -> str:
    """Without the list of all the parameters that a model has."""
    return str(error).partition(" The available parameters")[0] or repr(error)


def _view(tensor: torch.Tensor) -> _View:
    return _View(tuple(tensor.stride()), int(tensor.storage_offset()))


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the memory that a tensor and all its views share; meta tensors have it too."""
    return int(tensor.untyped_storage()._cdata)
