"""The driver's side of attach, refit and attest, without input or output.

Each operation is a generator: it yields a Call for all workers and is sent their Replies. So the
same protocol drives a synchronous and an asynchronous engine.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Sequence

import msgspec

from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.steps import Steps, ask, attest, check_ticket, tell
from lora_refit.errors import (
    CommitFailed,
    CoverageError,
    LayoutMismatch,
    NotCommitted,
    RefitError,
)
from lora_refit.report import AttachReport, Attestation, RefitReport
from lora_refit.spec import Spec, Ticket
from lora_refit.trace.axis import AxisMap
from lora_refit.trace.coverage import uncovered_elements
from lora_refit.trace.tags import matrix_shape

MAX_SLOTS = 2
NO_LIVE = -1
_FIRST_ID = 1 << 20
_ID_CHOICES = 1 << 30
"""A handle counts its ids up from a random one: above those that people choose, within 31 bits.
Every version gets an id of its own, since an id is all by which vLLM finds the weights of a
request: one that outlived its version must fail, not meet those of another."""


class Live(msgspec.Struct, frozen=True):
    """What the engine serves. slot: which of the attached slots holds it."""

    version: int
    digest: str
    slot: int


class Protocol:
    """State of one adapter on one engine, as its driver knows it."""

    mode = "adapter"

    def __init__(self, adapter: str, timeout_s: float) -> None:
        check_name(adapter)
        self.adapter = adapter
        self.timeout_s = timeout_s
        self.lora_ids: tuple[int, ...] = ()
        self.live: Live | None = None
        self.poisoned: str | None = None
        self._spec: Spec | None = None
        self._last_id = _FIRST_ID + secrets.randbelow(_ID_CHOICES)

    def attach(self, spec: Spec, running: Collection[int] = ()) -> Steps[AttachReport]:
        """Attach every worker and check that the adapter reaches the engine whole.

        running: LoRA ids of unfinished requests. Every slot but the live one is overwritten.
        """
        facts = yield from ask("facts", rpc.Nothing(), rpc.EngineFacts)
        live = NO_LIVE
        if self.live is not None and self.poisoned is None:
            live = self.lora_ids[self.live.slot]
        self._require_idle([id_ for id_ in self.lora_ids if id_ != live], running)
        held = self.lora_ids or (NO_LIVE,) * _slots_to_take(facts)
        lora_ids = tuple(live if id_ == live != NO_LIVE else self._new_id() for id_ in held)
        request = rpc.AttachRequest(spec.to_bytes(), lora_ids, live, self.timeout_s)
        try:
            answers = yield from ask("attach", request, rpc.AttachAnswer)
            _check_coverage(spec, answers)
        except RefitError:
            yield from tell("abort", rpc.Nothing())
            raise
        # Kept before the answers: a worker that adopted holds these slots whatever the others do.
        self.lora_ids = lora_ids
        yield from ask("adopt", rpc.Nothing(), rpc.Nothing)
        self._spec = spec
        return AttachReport(
            workers=len(answers),
            trainer_ranks=len(spec.arenas),
            factors=len(spec.layout.export_map.factors),
            blocks=tuple(answer.blocks for answer in answers),
            slots=len(lora_ids),
            plan_digests=tuple(answer.plan_digest for answer in answers),
            transport=tuple(answer.transport for answer in answers),
            trace_ms=max(answer.trace_ms for answer in answers),
            warnings=tuple(dict.fromkeys(line for answer in answers for line in answer.warnings)),
        )

    def refit(self, ticket: Ticket, running: Collection[int] = ()) -> Steps[RefitReport]:
        """Stage on all workers, then commit on all. Any failure leaves the live version live,
        except one in the commit of an engine with a single slot, which poisons it.

        running: LoRA ids of unfinished requests; the slot to be written must not be among them.
        """
        check_ticket(self._spec, ticket)
        slot = self._idle_slot()
        self._require_idle([self.lora_ids[slot]], running)
        started = time.perf_counter()
        staged = yield from self._stage(ticket, slot)
        between = time.perf_counter()
        lora_id = self._new_id()
        committed = yield from self._commit(ticket, slot, lora_id)
        finished = time.perf_counter()
        self.lora_ids = (*self.lora_ids[:slot], lora_id, *self.lora_ids[slot + 1 :])
        self.live = Live(ticket.version, staged[0].digest, slot)
        self.poisoned = None
        return RefitReport(
            version=ticket.version,
            bytes=sum(answer.bytes_written for answer in committed),
            phases_ms={
                "pack": ticket.pack_ms,
                "stage": (between - started) * 1e3,
                "commit": (finished - between) * 1e3,
                "wait": max(answer.wait_ms for answer in staged),
                "verify": max(answer.verify_ms for answer in staged),
                "scatter": max(answer.scatter_ms for answer in committed),
            },
            digest=staged[0].digest,
            launches=max(answer.launches for answer in committed),
            collectives=0,
            allocations=sum(answer.allocations for answer in committed),
        )

    def attest(self) -> Steps[Attestation]:
        """Have every worker compare its live slot with what it committed."""
        live = self.require_live()
        request = rpc.AttestRequest(live.slot, live.version)
        return (yield from attest(live.version, request))

    def close(self) -> Steps[None]:
        """Give slots and arenas back. Afterwards nothing is live."""
        self.live = None
        self.poisoned = None
        self.lora_ids = ()
        self._spec = None
        yield from tell("detach", rpc.Nothing())

    def require_live(self) -> Live:
        """Raises NotCommitted before the first commit and after one that failed half-way."""
        if self.poisoned is not None:
            raise NotCommitted(f"the last commit failed half-way ({self.poisoned}); refit again")
        if self.live is None:
            raise NotCommitted(f"no version of adapter {self.adapter!r} is live; refit first")
        return self.live

    def identity(self) -> tuple[str, int, str]:
        """(name, id, path) of the live version; never the same for two versions."""
        live = self.require_live()
        tail = f"{self.adapter}@{live.version}/{live.digest}"
        return tail, self.lora_ids[live.slot], f"lora-refit://{tail}"

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _require_idle(self, lora_ids: Sequence[int], running: Collection[int]) -> None:
        """A request that is half-way would go on under its old name with other weights."""
        if set(lora_ids).isdisjoint(running):
            return
        if len(self.lora_ids) == 1:
            raise CommitFailed(
                "requests are running in the only slot; wait until they have finished or abort "
                f"them, or start the engine with max_loras={MAX_SLOTS}"
            )
        raise CommitFailed(
            "requests of an earlier version are still running in the slot to be written; wait "
            "until they have finished, or abort them"
        )

    def _idle_slot(self) -> int:
        if self.live is None:
            return 0
        return (self.live.slot + 1) % len(self.lora_ids)

    def _stage(self, ticket: Ticket, slot: int) -> Steps[list[rpc.StageAnswer]]:
        request = rpc.StageRequest(
            slot, ticket.sequence, ticket.version, ticket.publisher, self.timeout_s
        )
        try:
            staged = yield from ask("stage", request, rpc.StageAnswer)
            digests = {answer.digest for answer in staged}
            if len(digests) > 1:
                raise CommitFailed(f"workers staged different bytes: digests {sorted(digests)}")
        except RefitError:
            yield from tell("abort", rpc.Nothing())
            raise
        return staged

    def _commit(self, ticket: Ticket, slot: int, lora_id: int) -> Steps[list[rpc.CommitAnswer]]:
        overwrites_live = self.live is not None and slot == self.live.slot
        if overwrites_live:
            # Until all workers have answered, the only slot may hold a mixture.
            self.poisoned = f"version {ticket.version} was being written over the only slot"
        try:
            return (
                yield from ask(
                    "commit",
                    rpc.CommitRequest(ticket.sequence, ticket.version, lora_id),
                    rpc.CommitAnswer,
                )
            )
        except RefitError as error:
            yield from tell("abort", rpc.Nothing())
            if overwrites_live:
                self.poisoned = str(error)
                kept = "the engine has one slot, so nothing is live until a refit succeeds"
            elif self.live is None:
                kept = "nothing is live yet"
            else:
                kept = f"version {self.live.version} is still live"
            raise CommitFailed(f"version {ticket.version}: {error}; {kept}") from error


def check_name(adapter: str) -> None:
    """Raises LayoutMismatch for a name that would make identities ambiguous."""
    if not adapter or "/" in adapter or "@" in adapter:
        raise LayoutMismatch(f"adapter name {adapter!r}: give a non-empty name without / and @")


def _slots_to_take(facts: Sequence[rpc.EngineFacts]) -> int:
    free = min(item.free_slots for item in facts)
    if free == 0:
        raise LayoutMismatch(
            f"all {facts[0].slots} LoRA slots are taken by other adapters; remove one or start the "
            "engine with a higher max_loras"
        )
    return min(free, MAX_SLOTS)


def _check_coverage(spec: Spec, answers: Sequence[rpc.AttachAnswer]) -> None:
    """Every element of every factor must land in some slot of some worker."""
    pieces: dict[int, dict[tuple[bytes, bytes], None]] = {}
    for answer in answers:
        for piece in answer.pieces:
            pieces.setdefault(piece.factor, {})[piece.rows, piece.cols] = None
    lost = []
    for index, factor in enumerate(spec.layout.export_map.factors):
        selections = [
            (AxisMap(rows).coordinates(), AxisMap(cols).coordinates())
            for rows, cols in pieces.get(index, {})
        ]
        missing = uncovered_elements(matrix_shape(factor.shape), selections)
        if missing:
            lost.append(f"{factor.name} ({missing} elements)")
    if lost:
        more = f" and {len(lost) - 6} more factors" if len(lost) > 6 else ""
        raise CoverageError(
            f"the engine has no place for {', '.join(lost[:6])}{more}: it wraps no such module, "
            "or its name is misspelt; check target_modules on both sides"
        )
