"""A vLLM worker that tests can look into, damage, and make fail at a chosen point of a refit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import psutil
import torch

from lora_refit.engines.vllm.extension import WorkerExtension, merge_state_of, state_of
from lora_refit.engines.vllm.state import WorkerState
from lora_refit.engines.vllm.worker import WorkerRefit
from lora_refit.testing.collective_counter import CollectiveCounter

ALL_WORKERS = -1


class Inspection(msgspec.Struct, frozen=True):
    """worker: the rank that shall run it, or ALL_WORKERS."""

    worker: int
    name: str
    arguments: list[Any]


class Finding(msgspec.Struct, frozen=True):
    """error: repr of what the inspection raised, empty when it went well."""

    value: Any = None
    error: str = ""


class InspectionFailed(RuntimeError):
    """An inspection raised in a worker."""


class InspectableWorkerExtension(WorkerExtension):
    """Pass as `worker_extension_cls="lora_refit.testing.worker.InspectableWorkerExtension"`."""

    def lora_refit_inspect(self, data: bytes) -> bytes:
        """Run an encoded Inspection and return the encoded Finding. Never raises."""
        worker: Any = self
        try:
            call = msgspec.msgpack.decode(data, type=Inspection)
            if call.worker not in (ALL_WORKERS, worker.rank):
                return msgspec.msgpack.encode(Finding())
            value = self.lora_refit_inspections()[call.name](worker, *call.arguments)
            return msgspec.msgpack.encode(Finding(value))
        except Exception as error:
            return msgspec.msgpack.encode(Finding(error=repr(error)))

    def lora_refit_inspections(self) -> dict[str, Callable[..., Any]]:
        """The inspections by name; a subclass may add its own. Each is called with the worker."""
        return {
            "echo": echo,
            "slot_bytes": slot_bytes,
            "flip_bit": flip_bit,
            "fail": fail,
            "fail_update": fail_update,
            "resources": resources,
            "start_counting": start_counting,
            "stop_counting": stop_counting,
        }


class Inspector:
    """The driver's side: `Inspector(llm)("slot_bytes", lora_id)` asks every worker."""

    def __init__(self, llm: Any, timeout_s: float = 60.0) -> None:
        self._llm = llm
        self._timeout_s = timeout_s

    def __call__(self, name: str, *arguments: Any) -> list[Any]:
        """Every worker's value. Raises InspectionFailed with the first worker's error."""
        return self._run(Inspection(ALL_WORKERS, name, list(arguments)))

    def on(self, worker: int, name: str, *arguments: Any) -> Any:
        """The value of one worker; the others do nothing."""
        return self._run(Inspection(worker, name, list(arguments)))[worker]

    def _run(self, call: Inspection) -> list[Any]:
        replies = self._llm.collective_rpc(
            "lora_refit_inspect", timeout=self._timeout_s, args=(msgspec.msgpack.encode(call),)
        )
        findings = [msgspec.msgpack.decode(reply, type=Finding) for reply in replies]
        for worker, finding in enumerate(findings):
            if finding.error:
                raise InspectionFailed(f"engine worker {worker}, {call.name}: {finding.error}")
        return [finding.value for finding in findings]


def echo(worker: Any, token: int) -> tuple[int, int]:
    """(rank, token): shows that replies belong to their call and worker."""
    return int(worker.rank), token


def slot_bytes(worker: Any, lora_id: int) -> dict[str, bytes]:
    """Raw contents of the slot that holds an adapter id, padding included, by buffer name."""
    return {name: view.numpy().tobytes() for name, view in _slot(worker, lora_id).items()}


def flip_bit(worker: Any, lora_id: int, buffer: str, byte: int) -> str:
    """Flip the lowest bit of one byte of a slot (negative: from the end); `buffer` is a part of
    its name. Returns the whole name of the first buffer that matches."""
    name, view = next((n, v) for n, v in _slot(worker, lora_id).items() if buffer in n)
    view[byte] ^= 1
    return name


def fail(worker: Any, method: str, moment: str, action: str) -> None:
    """Make the next call of a refit method ("stage", "commit", ...) fail, once.

    moment: "before" or "after" the method has done its work.
    action: "raise" an error that nobody planned for, or "kill" the worker's process.
    """
    methods = _state(worker)._methods
    request_type, planned = methods[method]

    def sabotaged(request: Any) -> msgspec.Struct:
        methods[method] = (request_type, planned)
        if moment == "after":
            planned(request)
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"injected {moment} {method}")

    methods[method] = (request_type, sabotaged)


def fail_update(worker: Any, bucket: int, action: str) -> None:
    """Make the next refit of merged weights fail once, when this bucket is about to be loaded.

    action: "raise" an error that nobody planned for, or "kill" the worker's process.
    """
    engine = worker.weight_transfer_engine
    planned = engine.receive_weights

    def sabotaged(update: Any) -> None:
        if update.bucket != bucket:
            planned(update)
            return
        del engine.receive_weights
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"injected before bucket {bucket}")

    engine.receive_weights = sabotaged


def resources(worker: Any) -> dict[str, int]:
    """pid, resident bytes and open file descriptors of the worker's process."""
    process = psutil.Process()
    return {"pid": process.pid, "rss": process.memory_info().rss, "fds": process.num_fds()}


def start_counting(worker: Any) -> None:
    """Count this worker's collectives from now on."""
    worker._lora_refit_counter = CollectiveCounter()  # type: ignore[no-untyped-call]
    worker._lora_refit_counter.start()


def stop_counting(worker: Any) -> int:
    """Collectives since `start_counting`."""
    counter: CollectiveCounter = worker._lora_refit_counter
    return counter.stop()


def _refit(worker: Any) -> WorkerRefit:
    return state_of(worker)


def _state(worker: Any) -> WorkerState:
    """Of whichever mode the worker's engine was started for."""
    return state_of(worker) if worker.model_runner.lora_config else merge_state_of(worker)


def _slot(worker: Any, lora_id: int) -> dict[str, torch.Tensor]:
    """The slot's buffers as flat bytes that share its memory."""
    slots = _refit(worker)._slots
    views = slots.views(slots._slot_of(lora_id))
    return {
        buffer.name: view.view(-1).view(torch.uint8)
        for buffer, view in zip(slots.buffers, views, strict=True)
    }
