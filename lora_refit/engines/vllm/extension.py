"""Where the driver's calls enter a vLLM worker."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.base_load import WorkerBase
from lora_refit.engines.vllm.merge_worker import WorkerMerge
from lora_refit.engines.vllm.state import WorkerState
from lora_refit.engines.vllm.worker import WorkerRefit
from lora_refit.errors import LayoutMismatch, RefitError


class WorkerExtension:
    """Mixed into vLLM's worker by `worker_extension_cls="lora_refit.vllm.WorkerExtension"`."""

    def lora_refit_call(self, data: bytes) -> bytes:
        """Run one encoded rpc.Call and return the encoded rpc.Reply. Never raises."""
        worker: Any = self
        index = int(getattr(worker, "rank", 0))
        call_id = 0
        try:
            call = msgspec.msgpack.decode(data, type=rpc.Call)
            call_id = call.id
            answer = _state_for(worker, call).handle(call)
            reply = rpc.Reply(index, "", "", answer, call_id)
        except RefitError as error:
            reply = rpc.Reply(index, type(error).__name__, str(error), b"", call_id)
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])
            reply = rpc.Reply(index, "RefitError", f"unexpected {error!r}\n{where}", b"", call_id)
        return msgspec.msgpack.encode(reply)


def _state_for(worker: Any, call: rpc.Call) -> WorkerState:
    """Raises LayoutMismatch for what the worker's other states exclude."""
    if call.mode == "base" or call.method == "attach":
        _require_free_of_other_modes(worker, call)
    match call.mode:
        case "merged":
            return merge_state_of(worker)
        case "base":
            return WorkerBase(worker)
    return state_of(worker, call.adapter)


def _require_free_of_other_modes(worker: Any, call: rpc.Call) -> None:
    """Merged weights are loaded into the base that adapters are served on, and drop them."""
    adapters: dict[str, WorkerRefit] = getattr(worker, "_lora_refit_states", {})
    attached = [f"adapter {name!r}" for name, state in adapters.items() if state.in_use]
    merging: WorkerMerge | None = getattr(worker, "_lora_refit_merge", None)
    if merging is not None and merging.in_use:
        attached.append("a publisher in merged mode")
    if call.mode == "adapter":
        attached = [item for item in attached if not item.startswith("adapter")]
    if call.mode == "merged":
        attached = [item for item in attached if item.startswith("adapter")]
    if attached:
        raise LayoutMismatch(
            f"this engine is attached to {', '.join(attached)}; close that RefitEngine first"
        )


def state_of(worker: Any, adapter: str = "policy") -> WorkerRefit:
    """The worker's state of one adapter, made when it is first asked for."""
    if not hasattr(worker, "_lora_refit_states"):
        worker._lora_refit_states = {}
    states: dict[str, WorkerRefit] = worker._lora_refit_states
    if adapter not in states:
        if getattr(worker.model_runner, "lora_manager", None) is None:
            raise LayoutMismatch(
                "the engine was started without LoRA; pass enable_lora=True, or build the "
                'Publisher with mode="merged"'
            )
        states[adapter] = WorkerRefit(worker)
    return states[adapter]


def merge_state_of(worker: Any) -> WorkerMerge:
    """The worker's state of merged mode; there is one policy in an engine's own weights."""
    if not hasattr(worker, "_lora_refit_merge"):
        worker._lora_refit_merge = WorkerMerge(worker)
    state: WorkerMerge = worker._lora_refit_merge
    return state
