"""vLLM's own adapter loader, called in memory: the oracle that the slot map is traced from.

What differs between vLLM releases is kept here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.utils import parse_fine_tuned_lora_name

from lora_refit.errors import CoverageError, UnsupportedAdapter


class Loader:
    """Loads PEFT tensors into a slot the way vLLM does for an adapter directory."""

    def __init__(self, lora_manager: Any) -> None:
        self.manager = lora_manager._adapter_manager
        self._vocab_size = lora_manager.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the slots."""
        dtype = self.manager.lora_config.lora_dtype
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.manager.device)

    def load(
        self, lora_id: int, tensors: dict[str, torch.Tensor], config: dict[str, Any]
    ) -> tuple[int, dict[str, float]]:
        """Load an adapter and activate it.

        tensors: PEFT name -> factor; vLLM may scale them in place, so pass tensors to spare.
        Returns the slot and the scale that vLLM folds into each module's lora_B, by PEFT name.
        Raises UnsupportedAdapter if vLLM refuses the config, CoverageError for names it cannot
        parse.
        """
        manager = self.manager
        helper = self._peft_helper(config)
        mapper = self._name_mapper()
        modules = {name: _module_of(name, mapper) for name in tensors}
        try:
            lora = LoRAModel.from_lora_tensors(
                lora_id,
                tensors,
                helper,
                device="cpu",
                dtype=self.dtype,
                model_vocab_size=self._vocab_size,
                weights_mapper=mapper,
                skip_prefixes=getattr(manager.model, "lora_skip_prefixes", None),
            )
        except (ValueError, RuntimeError) as error:
            raise UnsupportedAdapter(f"vLLM's loader refuses the adapter: {error}") from error
        scales = {
            name: float(lora.loras[module].scaling)
            for name, module in modules.items()
            if module in lora.loras and ".lora_B." in name
        }
        if hasattr(manager, "_validate_moe_lora_format"):
            manager._validate_moe_lora_format(lora)
        manager.remove_adapter(lora_id)
        manager.add_adapter(lora)
        manager.activate_adapter(lora_id)
        return int(manager.lora_index_to_id.index(lora_id)), scales

    def _peft_helper(self, config: dict[str, Any]) -> PEFTHelper:
        try:
            helper = PEFTHelper.from_dict(dict(config))
            helper.validate_legal(self.manager.lora_config)
        except ValueError as error:
            raise UnsupportedAdapter(f"vLLM refuses the adapter's config: {error}") from error
        return helper

    def _name_mapper(self) -> Any:
        mapper = getattr(self.manager.model, "hf_to_vllm_mapper", None)
        if mapper is not None and hasattr(mapper, "get_rename_mapper"):
            return mapper.get_rename_mapper()
        return mapper


def _module_of(name: str, mapper: Any) -> str:
    try:
        return str(parse_fine_tuned_lora_name(name, mapper)[0])
    except ValueError as error:
        raise CoverageError(f"{name}: vLLM cannot read this factor name: {error}") from error
