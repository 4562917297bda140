"""Refitting vLLM engines: `from lora_refit.vllm import RefitEngine`."""

from lora_refit.engines.vllm import RefitEngine, WorkerExtension

__all__ = ["RefitEngine", "WorkerExtension"]
