"""RefitEngine: the handle that a driver holds beside its vLLM engine."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from vllm.lora.request import LoRARequest

from lora_refit.engines.vllm import bounded, rpc
from lora_refit.engines.vllm.merge_protocol import MergeProtocol
from lora_refit.engines.vllm.protocol import Protocol
from lora_refit.engines.vllm.steps import Step, Steps, reset_caches
from lora_refit.errors import CommitFailed, LayoutMismatch, RefitError
from lora_refit.report import AttachReport, Attestation, RefitReport
from lora_refit.spec import Spec, Ticket

T = TypeVar("T")

_RPC_MARGIN_S = 30.0
_call_ids = itertools.count(1)


class RefitEngine:
    """Refits one policy of a vLLM engine.

    llm: a vllm.LLM started with worker_extension_cls="lora_refit.vllm.WorkerExtension". For adapter
        mode with enable_lora=True; with max_loras=2 or more a refit writes the idle one of two slots
        and then flips to it, so a failed refit cannot harm the live version. For merged mode with
        weight_transfer_config={"backend": "lora_refit"}, and without LoRA.
    adapter: a name; several adapters of different names can be refitted into one engine, each with
        slots of its own. A name belongs to one RefitEngine until that is closed.
    timeout_s: how long workers wait for a trainer rank to publish.
    fidelity_threshold: merged mode: share of the update that rounding may lose before a refit warns.

    Every method raises a RefitError that names worker, module or rank. Afterwards the version that
    was live before is still live, unless the error says otherwise.
    """

    def __init__(
        self,
        llm: Any,
        adapter: str = "policy",
        timeout_s: float = 60.0,
        *,
        fidelity_threshold: float = 0.25,
    ) -> None:
        self._llm = llm
        self._adapting = Protocol(adapter, timeout_s)
        self._merging = MergeProtocol(adapter, timeout_s, fidelity_threshold)
        self._protocol: Protocol | MergeProtocol = self._adapting
        self._attached = False
        self._owner = secrets.token_hex(8)

    def attach(self, spec: Spec) -> AttachReport:
        """Trace the engine, prove that the adapter reaches it whole, and take its slots; in merged
        mode find the layers that the merged weights fill. Compares the engine's base weights with
        the trainer's.

        Once, or again after the trainer was restarted or its adapter changed: a version that is
        live stays live. Raises CoverageError for factors that the engine has no place for,
        LayoutMismatch, UnsupportedAdapter, NotMovement or TransportUnavailable, and CommitFailed
        while requests of a version before the live one are unfinished.
        """
        if self._attached and spec.layout.mode != self._protocol.mode:
            raise LayoutMismatch(
                f"this RefitEngine is attached in {self._protocol.mode} mode and the spec is of "
                f"{spec.layout.mode} mode; close it first"
            )
        before = self._protocol
        self._protocol = self._merging if spec.layout.mode == "merged" else self._adapting
        try:
            if isinstance(self._protocol, MergeProtocol):
                report = self._run(self._protocol.attach(spec))
            else:
                report = self._run(self._protocol.attach(spec, self._running_ids()))
        except BaseException:
            self._protocol = before
            raise
        self._attached = True
        return report

    def refit(self, ticket: Ticket) -> RefitReport:
        """Put a published version live on all workers, or on none.

        Raises WriterTimeout if a trainer rank has not published it, StaleArena if its bytes are
        not those published or the ticket is another publisher's, CommitFailed if a worker could
        not write them or unfinished requests use what is to be written. In merged mode an error
        after loading has begun leaves a mixture: then nothing is live until a refit succeeds.
        """
        if isinstance(self._protocol, MergeProtocol):
            running = self._llm.llm_engine.get_num_unfinished_requests()
            return self._run(self._protocol.refit(ticket, running))
        return self._run(self._protocol.refit(ticket, self._running_ids()))

    def load_base(self, path: str | Path) -> None:
        """Load a checkpoint folder into the running engine: the initial sync of one that was started
        with dummy weights. `publisher.base_state(path)` writes it.

        Before `attach`, and while no request runs. Every worker must be able to read the folder.
        Raises LayoutMismatch for no checkpoint, CommitFailed for one that is incomplete or could not
        be loaded; then load another before anything is served.
        """
        if self._attached:
            raise LayoutMismatch("close this RefitEngine before another base is loaded")
        self._run(_load_base(str(path), self._llm.llm_engine.get_num_unfinished_requests()))

    def lora_request(self) -> LoRARequest | None:
        """The request object of the live version, for `llm.generate(..., lora_request=...)`.

        In merged mode it is None, which serves the engine's own weights. Ask for it all the same:
        it raises NotCommitted while those are no committed version.

        Its name and path carry version and digest, so prefix-cache entries of other versions
        cannot match. Its id is this version's own: ask for the object anew after every refit. With
        two slots an object serves until the second refit after it; then vLLM does not know its id,
        looks for its path, finds no such adapter and fails. Raises NotCommitted while nothing is
        live.
        """
        if isinstance(self._protocol, MergeProtocol):
            self._protocol.require_live()
            return None
        name, lora_id, path = self._protocol.identity()
        return LoRARequest(lora_name=name, lora_int_id=lora_id, lora_path=path)

    def attest(self) -> Attestation:
        """Recompute on every worker the digests of the live slots, or of the merged layers."""
        return self._run(self._protocol.attest())

    def close(self) -> None:
        """Give slots and arenas back. Idempotent."""
        self._run(self._protocol.close())
        self._attached = False

    def _running_ids(self) -> frozenset[int]:
        """LoRA ids of the engine's unfinished requests."""
        states = self._llm.llm_engine.output_processor.request_states.values()
        return frozenset(
            state.lora_request.lora_int_id for state in states if state.lora_request is not None
        )

    def _run(self, steps: Steps[T]) -> T:
        """Drive a protocol operation: take each step, hand it the replies."""
        try:
            step = next(steps)
            while True:
                try:
                    replies = self._take(step)
                except RefitError as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(replies)
        except StopIteration as done:
            result: T = done.value
            return result

    def _take(self, step: Step) -> Sequence[Any]:
        if isinstance(step, rpc.Call):
            return self._all_workers(step)
        try:
            if isinstance(step, rpc.DriverCall):
                return [getattr(self._llm.llm_engine, step.method)(*step.args)]
            self._collective_rpc(step.method, kwargs=step.kwargs)
        except Exception as error:
            raise CommitFailed(f"vLLM's {step.method} failed: {error!r}") from error
        return []

    def _all_workers(self, call: rpc.Call) -> list[rpc.Reply]:
        call_id = next(_call_ids)
        envelope = msgspec.structs.replace(
            call,
            adapter=self._protocol.adapter,
            owner=self._owner,
            id=call_id,
            mode=call.mode or self._protocol.mode,
        )
        data = msgspec.msgpack.encode(envelope)
        try:
            answers = self._collective_rpc("lora_refit_call", args=(data,))
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

    def _collective_rpc(
        self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        timeout_s = self._protocol.timeout_s + _RPC_MARGIN_S

        def rpc_call() -> Any:
            return self._llm.collective_rpc(method, timeout=timeout_s, args=args, kwargs=kwargs)

        core = getattr(getattr(self._llm, "llm_engine", None), "engine_core", None)
        resources = getattr(core, "resources", None)
        if resources is None:  # the engine runs in this process
            return rpc_call()
        return bounded.call(rpc_call, lambda: bool(resources.engine_dead), timeout_s)


def _load_base(path: str, running: int) -> Steps[None]:
    if running:
        raise CommitFailed(
            f"{running} requests are running, and would go on with other weights; wait until they "
            "have finished, or abort them"
        )
    request = msgspec.msgpack.encode(rpc.LoadBaseRequest(path))
    replies = yield rpc.Call("load", request, mode="base")
    for reply in replies:
        if reply.error:
            raise reply.exception()
    yield from reset_caches()
    yield rpc.DriverCall("set_weight_version", (f"lora-refit://base/{path}",))
