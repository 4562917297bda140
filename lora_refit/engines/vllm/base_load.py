"""A whole checkpoint into a running engine, for one that was started with dummy weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.ledger import ledger_of
from lora_refit.engines.vllm.state import WorkerState
from lora_refit.errors import CommitFailed, LayoutMismatch


class WorkerBase(WorkerState):
    """Loads a worker's base; nothing is attached for that."""

    in_use = False

    def __init__(self, worker: Any) -> None:
        super().__init__({"load": (rpc.LoadBaseRequest, self.load)})
        self._worker = worker

    def load(self, request: rpc.LoadBaseRequest) -> rpc.Nothing:
        """Load all weights of a checkpoint folder through vLLM's own loader and post-processing.

        Raises LayoutMismatch if there is no such folder, CommitFailed naming parameters that it
        does not fill; the engine's weights are a mixture then.
        """
        if not (Path(request.path) / "config.json").is_file():
            raise LayoutMismatch(f"{request.path}: no checkpoint folder, it has no config.json")
        ledger = ledger_of(self._worker)
        ledger.begin_loading(request.path)
        try:
            with set_current_vllm_config(self._worker.vllm_config), torch.no_grad():
                missing = self._reload(request.path)
        except Exception as error:
            raise CommitFailed(
                f"{request.path}: vLLM cannot load it: {error!r}; load another before anything is "
                "served"
            ) from error
        self._worker.model_runner.reset_lora_state()
        if missing:
            raise CommitFailed(
                f"{request.path}: has no weights for {', '.join(missing[:4])}"
                f"{f' and {len(missing) - 4} more' if len(missing) > 4 else ''}; load a complete "
                "checkpoint"
            )
        ledger.finish_loading()
        return rpc.Nothing()

    def _reload(self, path: str) -> list[str]:
        """Returns the parameters that the checkpoint does not fill."""
        model = self._worker.model_runner.get_model()
        config = self._worker.model_config
        wanted = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        # An engine that was started with dummy weights has a loader that reads none.
        self._worker.update_config({"load_config": {"load_format": "auto"}})
        config.model, config.model_weights, config.revision = path, "", None
        loader = get_model_loader(self._worker.load_config)
        initialize_layerwise_reload(model)
        try:
            loaded = model.load_weights(loader.get_all_weights(config, model))
        finally:
            finalize_layerwise_reload(model, config)
        return sorted(wanted - (loaded or set())) if config.quantization is None else []
