"""Imported once by the fork server of `engine_processes`: all that an engine process needs."""

from __future__ import annotations

import vllm.entrypoints.llm
import vllm.lora.worker_manager
import vllm.v1.engine.core
import vllm.v1.worker.cpu_worker
from vllm.v1.executor import multiproc_executor

from lora_refit.testing.engine_processes import worker_context

multiproc_executor.get_mp_context = worker_context
