"""The whole model of a Megatron trainer as Megatron-Bridge exports it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch


class FullModel(Protocol):
    """A trainer's model with its adapter beside it, not merged."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors on the CPU, perhaps views of live ones. Collective.

        An adapted weight is named `<module>.base_layer.weight`, all others as in a checkpoint.
        """

    def names(self) -> Collection[str] | None:
        """Every name that the checkpoint of the base has; None where there is no such checkpoint."""

    def write_config(self, folder: Path) -> None:
        """Write everything that belongs to a checkpoint but the weights. Local."""


class BridgeModel:
    """bridge: the Megatron-Bridge AutoBridge of the model; model_chunks: as for MegatronSource."""

    def __init__(self, bridge: Any, model_chunks: Sequence[torch.nn.Module]) -> None:
        self._bridge = bridge
        self._chunks = list(model_chunks)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._bridge.export_hf_weights(
            self._chunks, cpu=True, show_progress=False, merge_adapter_weights=False
        )

    def names(self) -> Collection[str] | None:
        source = getattr(getattr(self._bridge.hf_pretrained, "state", None), "source", None)
        return None if source is None else set(source.get_all_keys())

    def write_config(self, folder: Path) -> None:
        """config.json; from a checkpoint also its generation config, tokenizer and custom code."""
        pretrained = self._bridge.hf_pretrained
        if not hasattr(pretrained, "save_artifacts"):
            pretrained.save_pretrained(folder)
            return
        # The bridge's own wrapper gives the model's dtype to the tokenizer, which then cannot be
        # stored, and storing changes the wrapper's config. So a wrapper of the same checkpoint.
        settings = {
            key: value for key, value in pretrained.init_kwargs.items() if "dtype" not in key
        }
        fresh = type(pretrained).from_pretrained(
            pretrained.model_name_or_path,
            trust_remote_code=pretrained.trust_remote_code,
            **settings,
        )
        patterns = getattr(self._bridge._model_bridge, "ADDITIONAL_FILE_PATTERNS", None)
        fresh.save_artifacts(folder, additional_files=patterns or None)
