"""Refitting vLLM engines: `from lora_refit.vllm import RefitEngine`."""

from lora_refit.engines.vllm.client import RefitEngine
from lora_refit.engines.vllm.worker import WorkerExtension

__all__ = ["RefitEngine", "WorkerExtension"]
