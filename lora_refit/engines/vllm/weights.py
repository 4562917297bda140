"""The weights of one vLLM worker's model: found, reloaded, read back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import set_current_vllm_config

from lora_refit.base_samples import BaseSample
from lora_refit.engines.vllm.base_guard import BaseComparison, compare_bases
from lora_refit.engines.vllm.layer_digest import digest_layers
from lora_refit.engines.vllm.layer_reload import LayerReload
from lora_refit.engines.vllm.target_layers import NamedShape, TargetLayer, find_targets
from lora_refit.errors import CommitFailed, LayoutMismatch, NotCommitted


class EngineWeights:
    """What merged mode needs from one worker's model, however the weights get there.

    model: the engine's model, loaded. vllm_config: of that engine.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._model_config = vllm_config.model_config
        self._targets: tuple[TargetLayer, ...] = ()
        self._reload: LayerReload | None = None

    @classmethod
    def of_worker(cls, worker: Any) -> EngineWeights:
        """Of a vLLM worker, such as a worker extension's `self`."""
        return cls(worker.model_runner.get_model(), worker.vllm_config)

    @property
    def dtype(self) -> torch.dtype:
        """Of the engine's unquantised weights."""
        dtype: torch.dtype = self._model_config.dtype
        return dtype

    def require_dtype(self, dtype: str) -> None:
        """Raises LayoutMismatch unless the engine's own dtype holds weights of this one exactly."""
        own = str(self.dtype).removeprefix("torch.")
        if own not in (dtype, "float32"):
            raise LayoutMismatch(
                f"the publisher merges to {dtype}, but this engine's weights are {own}; build the "
                f"Publisher with dtype=torch.{own}"
            )

    def targets(self, weights: Sequence[NamedShape]) -> tuple[TargetLayer, ...]:
        """The layers that these checkpoint weights [out, in] fill on this worker. Changes nothing.

        Raises CoverageError naming a weight that the model does not load, UnsupportedAdapter a
        layer that would be filled in part (with the siblings that are missing), whose checkpoint
        is quantised, or whose weight is tied, LayoutMismatch a weight that is listed twice.
        """
        with self._config():
            return find_targets(self._model, weights, self.dtype)

    def adopt(self, targets: Sequence[TargetLayer]) -> None:
        """Let `start` and `digests` be about these layers. Raises NotCommitted while reloading."""
        if self._reload is not None:
            raise NotCommitted("a reload is under way; finish or abort it first")
        self._targets = tuple(targets)

    def start(self) -> None:
        """Take the adopted layers back to the form that checkpoints are loaded into.

        Until `finish` or `abort` the model cannot run. A reload that was left open is aborted.
        """
        self.abort()
        with self._config():
            self._reload = LayerReload(self._model, self._model_config, self._targets)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load whole weights [out, in] by their checkpoint names, any number at a time.

        vLLM keeps every tensor until its layer is complete, and reads it only then: the tensors
        must own their memory, and nobody may write to them again. A layer is processed and its
        tensors are dropped with the last of its weights; so weights of a layer should follow each
        other. Layers whose parameters are padded (vocabularies) are processed by `finish`.

        Raises CommitFailed for a weight that does not belong to the adopted layers, and whatever
        vLLM raises; then call `finish` or `abort`.
        """
        if self._reload is None:
            raise CommitFailed("no reload is under way; start one first")
        with self._config(), torch.no_grad():
            self._reload.load(weights)

    def finish(self) -> None:
        """End the reload. Raises CommitFailed naming the layers that were not loaded completely:
        they have their old weights, the others their new ones, and the model can run."""
        if self._reload is None:
            raise CommitFailed("no reload is under way; start one first")
        reload, self._reload = self._reload, None
        with self._config(), torch.no_grad():
            reload.finish()

    def abort(self) -> None:
        """End a reload after a failure; layers that are not complete get their old weights back, so
        that the model can run, with a mixture. Does nothing if none is under way."""
        if self._reload is None:
            return
        reload, self._reload = self._reload, None
        with self._config(), torch.no_grad():
            reload.abort()

    def digests(
        self, targets: Sequence[TargetLayer] | None = None
    ) -> tuple[tuple[str, ...], npt.NDArray[np.uint64]]:
        """Names and digests of all that layers hold now, by default the adopted ones; see
        `digest_layers`."""
        chosen = self._targets if targets is None else targets
        with self._config(), torch.no_grad():
            return digest_layers([(t.name, t.module) for t in chosen], self.dtype)

    def compare_bases(self, samples: Sequence[BaseSample]) -> BaseComparison:
        """Compare sampled elements of the trainer's base with the engine's. Changes nothing."""
        with self._config(), torch.no_grad():
            return compare_bases(self._model, samples, self.dtype)

    def _config(self) -> Any:
        return set_current_vllm_config(self._vllm_config)
