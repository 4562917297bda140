"""RefitEngine: the handle that a driver holds beside its vLLM engine."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

import msgspec
from vllm.lora.request import LoRARequest

from lora_refit.engines.vllm import bounded, rpc
from lora_refit.engines.vllm.protocol import Protocol
from lora_refit.errors import CommitFailed, RefitError
from lora_refit.report import AttachReport, Attestation, RefitReport
from lora_refit.spec import Spec, Ticket

T = TypeVar("T")

_RPC_MARGIN_S = 30.0
_call_ids = itertools.count(1)


class RefitEngine:
    """Refits one adapter of a vLLM engine.

    llm: a vllm.LLM started with enable_lora=True and
        worker_extension_cls="lora_refit.vllm.WorkerExtension". With max_loras=2 or more a refit
        writes the idle one of two slots and then flips to it, so a failed refit cannot harm the
        live version.
    adapter: a name; several adapters of different names can be refitted into one engine, each with
        slots of its own. A name belongs to one RefitEngine until that is closed.
    timeout_s: how long workers wait for a trainer rank to publish.

    Every method raises a RefitError that names worker, module or rank. Afterwards the version that
    was live before is still live, unless the error says otherwise.
    """

    def __init__(self, llm: Any, adapter: str = "policy", timeout_s: float = 60.0) -> None:
        self._llm = llm
        self._protocol = Protocol(adapter, timeout_s)
        self._owner = secrets.token_hex(8)

    def attach(self, spec: Spec) -> AttachReport:
        """Trace the engine, prove that the adapter reaches it whole, and take its slots.

        Once, or again after the trainer was restarted or its adapter changed: a version that is
        live stays live. Raises CoverageError for factors that the engine has no place for,
        LayoutMismatch, UnsupportedAdapter, NotMovement or TransportUnavailable, and CommitFailed
        while requests of a version before the live one are unfinished.
        """
        return self._run(self._protocol.attach(spec, self._running_ids()))

    def refit(self, ticket: Ticket) -> RefitReport:
        """Put a published version live on all workers, or on none.

        Raises WriterTimeout if a trainer rank has not published it, StaleArena if its bytes are
        not those published or the ticket is another publisher's, CommitFailed if a worker could
        not write them or unfinished requests use the slot to be written.
        """
        return self._run(self._protocol.refit(ticket, self._running_ids()))

    def lora_request(self) -> LoRARequest:
        """The request object of the live version, for `llm.generate(..., lora_request=...)`.

        Its name and path carry version and digest, so prefix-cache entries of other versions
        cannot match. Its id is this version's own: ask for the object anew after every refit. With
        two slots an object serves until the second refit after it; then vLLM does not know its id,
        looks for its path, finds no such adapter and fails. Raises NotCommitted while nothing is
        live.
        """
        name, lora_id, path = self._protocol.identity()
        return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=path)

    def attest(self) -> Attestation:
        """Recompute the digests of the live slots on every worker."""
        return self._run(self._protocol.attest())

    def close(self) -> None:
        """Give slots and arenas back. Idempotent."""
        self._run(self._protocol.close())

    def _running_ids(self) -> frozenset[int]:
        """LoRA ids of the engine's unfinished requests."""
        states = self._llm.llm_engine.output_processor.request_states.values()
        return frozenset(
            state.lora_request.lora_int_id for state in states if state.lora_request is not None
        )

    def _run(self, steps: Generator[rpc.Call, Sequence[rpc.Reply], T]) -> T:
        """Drive a protocol operation: send each call to all workers, hand it their replies."""
        try:
            call = next(steps)
            while True:
                try:
                    replies = self._all_workers(call)
                except RefitError as error:
                    call = steps.throw(error)
                else:
                    call = steps.send(replies)
        except StopIteration as done:
            result: T = done.value
            return result

    def _all_workers(self, call: rpc.Call) -> list[rpc.Reply]:
        timeout = self._protocol.timeout_s + _RPC_MARGIN_S
        call_id = next(_call_ids)
        envelope = msgspec.structs.replace(
            call, adapter=self._protocol.adapter, owner=self._owner, id=call_id
        )
        data = msgspec.msgpack.encode(envelope)
        try:
            answers = self._collective_rpc(data, timeout)
        except Exception as error:
            raise CommitFailed(
                f"the engine did not answer {call.method!r} on all workers: {error!r}; a worker "
                "may be gone, then restart the engine, or it was started without "
                'worker_extension_cls="lora_refit.vllm.WorkerExtension"'
            ) from error
        replies = [msgspec.msgpack.decode(answer, type=rpc.Reply) for answer in answers]
        if any(reply.call_id != call_id for reply in replies):
            raise CommitFailed(
                f"the engine answered {call.method!r} with replies to an earlier call; its RPC is "
                "out of step (a call timed out or raised before), so restart the engine"
            )
        return replies

    def _collective_rpc(self, data: bytes, timeout_s: float) -> Any:
        def rpc_call() -> Any:
            return self._llm.collective_rpc("lora_refit_call", timeout=timeout_s, args=(data,))

        core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        resources = getattr(core, "resources", None)
        if resources is None:  # the engine runs in this process
            return rpc_call()
        return bounded.call(rpc_call, lambda: bool(resources.engine_dead), timeout_s)
