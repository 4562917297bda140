"""vLLM as the engine of a refit. Imports vLLM; re-exported as lora_refit.vllm."""

from lora_refit.engines.vllm.client import RefitEngine
from lora_refit.engines.vllm.worker import WorkerExtension

__all__ = ["RefitEngine", "WorkerExtension"]
