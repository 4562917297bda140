"""vLLM's layerwise reload, for some of a model's layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS
from vllm.model_executor.model_loader.reload.utils import (
    get_layer_tensors,
    get_tensor_load_numel,
)

from lora_refit.engines.vllm.target_layers import TargetLayer
from lora_refit.errors import CommitFailed


class LayerReload:
    """One reload of some layers, from its start until `finish` or `abort`.

    vLLM's lifecycle runs on a stand-in for the model that has these layers only. Reloading the
    whole model would unregister and re-register every other layer's tensors and warn for each of
    them that its weights failed to load; so no other layer is touched at all. Attention layers are
    among them because they derive tensors from the linear layers (MLA), once all are loaded.
    """

    def __init__(
        self, model: torch.nn.Module, model_config: Any, targets: Sequence[TargetLayer]
    ) -> None:
        self._model = model
        self._model_config = model_config
        self._targets = tuple(targets)
        self._loaded: set[str] = set()
        self._already_there: dict[str, int] = {}
        layers = {target.name: target.module for target in targets}
        attention = [m for m in model.modules() if is_deferred_attention_layer(m)]
        self._layers = _SomeLayers([*layers.values(), *attention])
        try:
            initialize_layerwise_reload(self._layers)
        except BaseException:
            self.abort()
            raise
        for target in targets:
            self._already_there[target.name] = _count_what_stays(target.module)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hand whole weights [out, in] to the model's own loader."""
        self._model.load_weights(self._noting(weights))  # type: ignore[operator]

    def finish(self) -> None:
        """Post-process what is left. Raises CommitFailed naming the layers that were not loaded
        completely; those have their old weights again."""
        incomplete = [target for target in self._targets if not self._is_complete(target)]
        for target in incomplete:
            _put_back(target.module)
        try:
            finalize_layerwise_reload(self._layers, self._model_config)
        except BaseException:
            self.abort()
            raise
        if incomplete:
            lacking = [n for t in incomplete for n in t.weights if n not in self._loaded]
            raise CommitFailed(
                f"{len(incomplete)} layers were not loaded completely: "
                f"{', '.join(target.name for target in incomplete[:4])}; "
                f"lacking {', '.join(lacking[:4]) or 'elements of their weights'}"
            )

    def abort(self) -> None:
        """Give layers that are not complete their old tensors back, so that the model can run."""
        for target in self._targets:
            _put_back(target.module)
        finalize_layerwise_reload(self._layers, self._model_config)

    def _noting(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        expected = {name for target in self._targets for name in target.weights}
        for name, tensor in weights:
            if name not in expected:
                raise CommitFailed(f"{name} is not among the weights that were traced")
            yield name, tensor
            self._loaded.add(name)

    def _is_complete(self, target: TargetLayer) -> bool:
        """Whether vLLM has processed the layer, or holds all that its loader copies into it."""
        info = get_layerwise_info(target.module)
        is_processed = not info.can_load()
        copied = info.load_numel - self._already_there[target.name]
        return self._loaded.issuperset(target.weights) and (is_processed or copied >= target.copied)


class _SomeLayers:
    """Stands for a model in vLLM's lifecycle, which asks it for its modules."""

    def __init__(self, layers: Sequence[torch.nn.Module]) -> None:
        self._layers = tuple(layers)

    def modules(self) -> Iterator[torch.nn.Module]:
        return iter(self._layers)


def _count_what_stays(layer: torch.nn.Module) -> int:
    """Count a layer's bias as loaded, and return its size.

    vLLM leaves a bias where it is during a reload, yet waits for it; without it, all layers that
    have one would be held in memory, unprocessed, until the end of the reload.
    """
    info = get_layerwise_info(layer)
    info.load_numel = sum(
        get_tensor_load_numel(tensor)
        for name, tensor in get_layer_tensors(layer).items()
        if name not in SKIP_LOAD_TENSORS and not tensor.is_meta
    )
    return int(info.load_numel)


def _put_back(layer: torch.nn.Module) -> None:
    """Undo the start of a layer's reload, unless it is processed already."""
    info = get_layerwise_info(layer)
    if not info.can_load():
        return
    _place_kernel_tensors(layer, info)
    for tensor in get_layer_tensors(layer).values():
        tensor.weight_loader = _get_original_loader(tensor)
    info.reset()
