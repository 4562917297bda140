"""Real vLLM on CPU for tests: small, quick to start, and really gone after shutdown."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from lora_refit.testing import engine_processes

if TYPE_CHECKING:
    from vllm import LLM

EXIT_TIMEOUT_S = 10.0
"""How long engine processes may take to end by themselves before they are killed."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Tiny models gain nothing from threads, and a forked worker deadlocks in the thread pool
    # that its parent has used.
    "OMP_NUM_THREADS": "1",
    # Dynamo would compile for minutes what runs once.
    "TORCHDYNAMO_DISABLE": "1",
    # "auto" wants a NUMA node a rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


def cpu_engine_environment(*, in_process: bool) -> None:
    """Set what vLLM reads from the environment; call before vLLM is imported.

    Variables that are already set are kept, except the one that says where the engine runs.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"


def start_engine_server() -> None:
    cpu_engine_environment(in_process=False)
    engine_processes.start_server()


def cpu_llm(
    model: str | Path,
    *,
    tensor_parallel: int = 1,
    dtype: str = "float32",
    max_lora_rank: int = 16,
    max_loras: int = 2,
    in_process: bool = False,
    load_format: str = "auto",
    worker_extension_cls: str = "lora_refit.vllm.WorkerExtension",
    **kwargs: Any,
) -> LLM:
    cpu_engine_environment(in_process=in_process)
    if not in_process:
        start_engine_server()
    from vllm import LLM
    from vllm.v1.engine import utils as engine_utils

    engine_utils.get_mp_context = lambda: engine_processes.EngineContext()
    settings: dict[str, Any] = {
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
    }
    return LLM(
        model=str(model),
        dtype=dtype,
        tensor_parallel_size=tensor_parallel,
        enable_lora=True,
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        load_format=load_format,
        worker_extension_cls=worker_extension_cls,
        **(settings | kwargs),
    )


def shutdown(llm: LLM) -> None:
    core = llm.llm_engine.engine_core
    core.shutdown()
