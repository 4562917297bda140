"""Makes the weight transfer engine known to vLLM: the entry point of `vllm.general_plugins`."""

from __future__ import annotations

import contextlib

BACKEND = "lora_refit"
"""For `LLM(weight_transfer_config={"backend": "lora_refit"})`."""


def register() -> None:
    """Register `RefitTransferEngine`, which is imported when an engine asks for it. Idempotent."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # it is registered already
        WeightTransferEngineFactory.register_engine(
            BACKEND, "lora_refit.engines.vllm.transfer", "RefitTransferEngine"
        )
