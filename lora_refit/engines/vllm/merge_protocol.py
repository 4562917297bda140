"""The driver's side of merged mode: stage all buckets, then load them through vLLM's own lifecycle."""

from __future__ import annotations

import logging
import math
import time

import numpy as np

from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.protocol import Live, check_name
from lora_refit.engines.vllm.steps import (
    Steps,
    ask,
    attest,
    check_ticket,
    reset_caches,
    tell,
)
from lora_refit.errors import CommitFailed, NotCommitted, RefitError, UnsupportedAdapter
from lora_refit.kernels import MERGE_SUMS_DTYPE
from lora_refit.merged.layout import MergedLayout
from lora_refit.merged.row_merger import PREPARE_COLLECTIVES
from lora_refit.report import AttachReport, Attestation, Fidelity, RefitReport
from lora_refit.spec import Spec, Ticket

_SLICE_S = 10.0
"""How long workers verify before they answer, so that every call ends in time."""

_log = logging.getLogger(__name__)


class MergeProtocol:
    """State of the policy that an engine holds in its own weights, as its driver knows it.

    fidelity_threshold: share of the update that rounding may lose before a refit warns.
    """

    mode = "merged"

    def __init__(self, name: str, timeout_s: float, fidelity_threshold: float) -> None:
        check_name(name)
        self.adapter = name
        self.timeout_s = timeout_s
        self.live: Live | None = None
        self.poisoned: str | None = None
        self._name = f"lora-refit://{name}"
        self._fidelity_threshold = fidelity_threshold
        self._spec: Spec | None = None
        self._workers: tuple[int, ...] = ()

    def attach(self, spec: Spec) -> Steps[AttachReport]:
        """Map the rings, find the layers, compare the bases; nothing is loaded."""
        request = rpc.MergeAttachRequest(spec.to_bytes(), self.timeout_s)
        try:
            answers = yield from ask("attach", request, rpc.MergeAttachAnswer)
        except RefitError:
            yield from tell("abort", rpc.Nothing())
            raise
        yield from ask("adopt", rpc.Nothing(), rpc.Nothing)
        self._spec = spec
        self._workers = tuple(range(len(answers)))
        return AttachReport(
            workers=len(answers),
            trainer_ranks=len(spec.arenas),
            factors=len(spec.layout.export_map.factors),
            blocks=tuple(answer.buckets for answer in answers),
            slots=0,
            plan_digests=(),
            transport=tuple(answer.transport for answer in answers),
            trace_ms=max(answer.trace_ms for answer in answers),
            warnings=tuple(dict.fromkeys(line for answer in answers for line in answer.warnings)),
            mode=self.mode,
        )

    def refit(self, ticket: Ticket, running: int = 0) -> Steps[RefitReport]:
        """Stage on all workers, then load on all. A failure before loading leaves the live version
        live, one while loading poisons the engine until a refit succeeds.

        running: number of unfinished requests, which would go on with other weights.
        """
        spec, layout = check_ticket(self._spec, ticket), self._layout
        if running:
            raise CommitFailed(
                f"{running} requests are running, and would go on with other weights; wait until "
                "they have finished, or abort them"
            )
        started = time.perf_counter()
        wait_ms = yield from self._stage(ticket)
        waited = time.perf_counter()
        staged = yield from self._verify(ticket.version)
        fidelity = self._fidelity(staged)
        between = time.perf_counter()
        loaded = yield from self._load(ticket)
        finished = time.perf_counter()
        self.live = Live(ticket.version, staged.digest, 0)
        self.poisoned = None
        yield rpc.DriverCall("set_weight_version", (self.identity(),))
        ring_bytes = sum(2 * layout.ring_bytes(rank) for rank in range(len(spec.rings)))
        return RefitReport(
            version=ticket.version,
            bytes=sum(answer.bytes_loaded for answer in loaded),
            phases_ms={
                "pack": ticket.pack_ms,
                "stage": (between - started) * 1e3,
                "commit": (finished - between) * 1e3,
                "wait": wait_ms,
                "verify": (between - waited) * 1e3,
            },
            digest=staged.digest,
            launches=max(answer.launches for answer in loaded),
            collectives=PREPARE_COLLECTIVES if spec.layout.peft_config.get("use_dora") else 0,
            allocations=0,
            fidelity=fidelity,
            buckets=len(layout.buckets),
            peak_extra_bytes=ring_bytes + max(answer.peak_bytes for answer in loaded),
            warnings=self._warnings(fidelity),
        )

    def attest(self) -> Steps[Attestation]:
        """Have every worker compare the weights it holds with those it committed."""
        live = self.require_live()
        return (yield from attest(live.version, rpc.MergeAttestRequest(live.version)))

    def close(self) -> Steps[None]:
        """Unmap the rings. The engine keeps the weights that it has, but they have no name."""
        self.live = None
        self.poisoned = None
        self._spec = None
        yield from tell("detach", rpc.Nothing())

    def require_live(self) -> Live:
        """Raises NotCommitted before the first commit and after one that failed half-way."""
        if self.poisoned is not None:
            raise NotCommitted(
                f"the engine's weights are a mixture of versions ({self.poisoned}); refit again"
            )
        if self.live is None:
            raise NotCommitted(f"no version of {self.adapter!r} is live; refit first")
        return self.live

    def identity(self) -> str:
        """Names the live version; never the same for two versions."""
        live = self.require_live()
        return f"{self._name}@{live.version}/{live.digest}"

    @property
    def _layout(self) -> MergedLayout:
        """Of what is attached."""
        assert self._spec is not None and self._spec.layout.merged is not None
        return self._spec.layout.merged

    def _stage(self, ticket: Ticket) -> Steps[float]:
        """Returns the slowest worker's wait for the trainer ranks, in ms."""
        request = rpc.MergeStageRequest(
            ticket.sequence, ticket.version, ticket.publisher, self.timeout_s
        )
        try:
            answers = yield from ask("stage", request, rpc.MergeStageAnswer)
        except RefitError:
            yield from tell("abort", rpc.Nothing())
            raise
        return max(answer.wait_ms for answer in answers)

    def _verify(self, version: int) -> Steps[rpc.MergeVerifyAnswer]:
        """Until all workers have verified all buckets, and to the same bytes."""
        request = rpc.MergeVerifyRequest(_SLICE_S)
        try:
            while True:
                answers = yield from ask("verify", request, rpc.MergeVerifyAnswer)
                if all(answer.digest for answer in answers):
                    break
            digests = {answer.digest for answer in answers}
            if len(digests) > 1:
                raise CommitFailed(f"workers staged different bytes: digests {sorted(digests)}")
            self._require_finite(answers[0], version)
        except RefitError:
            yield from tell("abort", rpc.Nothing())
            raise
        return answers[0]

    def _require_finite(self, staged: rpc.MergeVerifyAnswer, version: int) -> None:
        broken = [w for w in self._fidelity(staged).weights if not math.isfinite(w.lost)]
        if broken:
            raise UnsupportedAdapter(
                f"version {version}: {broken[0].name} and {len(broken) - 1} more merged weights are "
                "not finite numbers; the adapter has diverged, or the merged dtype is too narrow"
            )

    def _load(self, ticket: Ticket) -> Steps[list[rpc.MergeCommitAnswer]]:
        """Until all workers have committed, the engine may hold a mixture."""
        self.poisoned = f"version {ticket.version} was being loaded"
        try:
            yield rpc.DriverCall("set_weight_version", (f"{self._name}@mixture",))
            yield rpc.EngineCall("start_weight_update")
            for bucket in range(len(self._layout.buckets)):
                payloads = [
                    {
                        "worker": worker,
                        "version": ticket.version,
                        "sequence": ticket.sequence,
                        "bucket": bucket,
                    }
                    for worker in self._workers
                ]
                yield rpc.EngineCall("update_weights", {"update_info": payloads})
            yield rpc.EngineCall("finish_weight_update")
            request = rpc.MergeCommitRequest(ticket.sequence, ticket.version)
            loaded = yield from ask("commit", request, rpc.MergeCommitAnswer)
            yield from reset_caches()
        except RefitError as error:
            self.poisoned = str(error)
            yield from tell("abort", rpc.Nothing())
            raise CommitFailed(
                f"version {ticket.version}: {error}; the engine's weights are a mixture, so nothing "
                "is live until a refit succeeds"
            ) from error
        return loaded

    def _fidelity(self, staged: rpc.MergeVerifyAnswer) -> Fidelity:
        names = [weight.name for weight in self._layout.weights]
        return Fidelity.of_sums(names, np.frombuffer(staged.sums, MERGE_SUMS_DTYPE))

    def _warnings(self, fidelity: Fidelity) -> tuple[str, ...]:
        worst = ", ".join(f"{item.name} {item.lost:.0%}" for item in fidelity.worst())
        _log.info(
            "merged weights: rounding loses %.1f %% of the update (%s), %.1f %% of the elements "
            "change",
            100 * fidelity.lost,
            worst,
            100 * fidelity.changed,
        )
        if fidelity.lost <= self._fidelity_threshold:
            return ()
        warning = (
            f"rounding to {self._layout.dtype} loses {fidelity.lost:.0%} of the update "
            f"(most in {worst}); serve the policy in adapter mode, which loses nothing"
        )
        _log.warning("%s", warning)
        return (warning,)
