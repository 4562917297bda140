"""Refitting vLLM engines: `from lora_refit.vllm import RefitEngine`."""

from lora_refit.engines.vllm.client import RefitEngine
from lora_refit.engines.vllm.extension import WorkerExtension

__all__ = ["RefitEngine", "WorkerExtension"]
