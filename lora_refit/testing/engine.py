"""Real vLLM on CPU for tests: small, quick to start, and gone after `shutdown`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from vllm import LLM

EXIT_TIMEOUT_S = 15.0
"""How long engine processes may take to end by themselves before `shutdown` kills them."""

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # vLLM's workers leave shared memory to Python's resource tracker, which removes it aloud.
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",
    # Dynamo would spend minutes on compiling what a test runs once.
    "TORCHDYNAMO_DISABLE": "1",
    # Thread affinity: "auto" demands a NUMA node per rank, a list a core per rank.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

_SMALL_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
    "use_tqdm_on_load": False,
}


def cpu_engine_environment(*, in_process: bool = False, threads: int = 1) -> None:
    """Set the environment variables of a CPU engine. Call it before vLLM is imported.

    Args:
        in_process: whether the next engine runs inside this process.
        threads: OpenMP threads of each worker.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if in_process else "1"


def start_engine_server() -> None:
    """Begin to import vLLM in the server that engines are forked from, without waiting for it.

    `cpu_llm` does this too; called early, the import overlaps with other work.
    """
    from lora_refit.testing import engine_processes

    cpu_engine_environment()
    engine_processes.start_server()


def cpu_llm(
    model: str | Path,
    *,
    tensor_parallel: int = 1,
    dtype: str = "float32",
    enable_lora: bool = True,
    max_lora_rank: int = 16,
    max_loras: int = 2,
    in_process: bool = False,
    threads: int = 1,
    load_format: str = "auto",
    worker_extension_cls: str = "lora_refit.vllm.WorkerExtension",
    **settings: Any,
) -> LLM:
    """Start vLLM on CPU and return its `LLM`; end it with `shutdown`.

    The engine runs in processes of its own, at tensor parallel 1 too, so it shares no process group
    or patched torch function with the caller. Scripts need the `__main__` guard of
    `multiprocessing`.

    Args:
        model: a local checkpoint directory.
        tensor_parallel: number of worker processes; may exceed the number of cores.
        dtype: "float32" for exact checks; "bfloat16" is several times slower on most CPUs.
        enable_lora: False for an engine whose own weights are refitted; the LoRA sizes then do not
            count, and merged weights are accepted (weight_transfer_config).
        in_process: run tensor parallel 1 inside the caller, to debug worker code.
        threads: OpenMP threads of each worker.
        load_format: "auto", or "dummy" for random weights of a directory without any.
        settings: any other argument of `LLM`; replaces the small defaults chosen here.

    Raises:
        ValueError: tensor parallel workers cannot run in process.
    """
    if in_process and tensor_parallel > 1:
        raise ValueError(f"tensor_parallel={tensor_parallel} needs in_process=False")
    cpu_engine_environment(in_process=in_process, threads=threads)
    if not in_process:
        _fork_from_server()

    from vllm import LLM

    from lora_refit.engines.vllm import plugin

    plugin.register()  # as vLLM does by the entry point, where the package is installed
    _inspect_here(Path(model))
    mode: dict[str, Any] = {"weight_transfer_config": {"backend": plugin.BACKEND}}
    if enable_lora:
        mode = {"enable_lora": True, "max_lora_rank": max_lora_rank, "max_loras": max_loras}
    return LLM(
        model=str(model),
        dtype=dtype,
        tensor_parallel_size=tensor_parallel,
        load_format=load_format,
        worker_extension_cls=worker_extension_cls,
        **(_SMALL_ENGINE | mode | settings),
    )


def shutdown(llm: LLM) -> None:
    """End the engine and wait until its processes are gone; kills those that stay."""
    core = llm.llm_engine.engine_core
    processes = _engine_processes(core)
    core.shutdown()
    _, remaining = psutil.wait_procs(processes, timeout=EXIT_TIMEOUT_S)
    for process in remaining:
        process.kill()
    psutil.wait_procs(remaining, timeout=EXIT_TIMEOUT_S)


def _fork_from_server() -> None:
    from lora_refit.testing import engine_processes

    engine_processes.start_server()
    from vllm.v1.engine import utils

    utils.get_mp_context = engine_processes.EngineCoreContext


def _inspect_here(model: Path) -> None:
    """Register the model's class itself, or vLLM imports it in a process of its own to ask for its
    features: ten seconds for each architecture that is not in the user's cache."""
    from vllm import ModelRegistry

    for architecture in json.loads((model / "config.json").read_text())["architectures"]:
        known = ModelRegistry.models.get(architecture)
        if known is not None and hasattr(known, "load_model_cls"):
            ModelRegistry.register_model(architecture, known.load_model_cls())


def _engine_processes(core: Any) -> list[psutil.Process]:
    resources = getattr(core, "resources", None)
    if resources is None:  # in process
        return []
    found: list[psutil.Process] = []
    for handle in resources.engine_manager.processes:
        if handle.is_alive():
            process = psutil.Process(handle.pid)
            found += [process, *process.children(recursive=True)]
    return found
