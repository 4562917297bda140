"""The benchmark's worker extension: lora_refit's, plus what a peer runs in the worker."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from safetensors.torch import load
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from lora_refit.vllm import WorkerExtension


class BenchWorkerExtension(WorkerExtension):
    """Adds the in-memory load that verl, SkyRL and others each carry."""

    def bench_load_bytes(self, lora_id: int, data: bytes, config: bytes) -> bool:
        """Load safetensors bytes with `from_lora_tensors` in the place of adapter `lora_id`."""
        worker: Any = self
        lora_manager = worker.model_runner.lora_manager
        manager = lora_manager._adapter_manager
        helper = PEFTHelper.from_dict(msgspec.json.decode(config))
        helper.validate_legal(manager.lora_config)
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        lora = LoRAModel.from_lora_tensors(
            lora_id,
            load(data),
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            model_vocab_size=lora_manager.vocab_size,
            weights_mapper=mapper.get_rename_mapper() if mapper is not None else None,
        )
        manager.remove_adapter(lora_id)
        manager.add_adapter(lora)
        return bool(manager.activate_adapter(lora_id))

    def bench_use_all_cores(self, threads: int) -> None:
        torch.set_num_threads(threads)
