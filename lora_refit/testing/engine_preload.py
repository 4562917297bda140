"""Imported once by the fork server of `engine_processes`: all that an engine process needs."""

from __future__ import annotations

import importlib
import logging
import warnings

from lora_refit.engines.vllm import plugin
from lora_refit.testing.engine_processes import WorkerContext

_MODULES = (
    "vllm.entrypoints.llm",
    "vllm.lora.worker_manager",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "lora_refit.vllm",
    "lora_refit.engines.vllm.transfer",
)

warnings.filterwarnings("ignore", category=FutureWarning, module="(torch|vllm)")
logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
for _module in _MODULES:
    importlib.import_module(_module)
plugin.register()

_executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
_executor.get_mp_context = WorkerContext  # type: ignore[attr-defined]
