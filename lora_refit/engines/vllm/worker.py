"""The engine worker's side of a refit: attach once, then stage and commit every version."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena_set import ArenaSet
from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.base_guard import require_same_base
from lora_refit.engines.vllm.ledger import ledger_of
from lora_refit.engines.vllm.loader import Loader
from lora_refit.engines.vllm.scatter import scatter_plan_of
from lora_refit.engines.vllm.slot_map import SlotMap, trace_engine
from lora_refit.engines.vllm.slots import Slots
from lora_refit.engines.vllm.state import WorkerState
from lora_refit.engines.vllm.weights import EngineWeights
from lora_refit.errors import CommitFailed, LayoutMismatch, NotCommitted, StaleArena
from lora_refit.kernels import CopyKernel, digest
from lora_refit.plan import Plan
from lora_refit.spec import Spec


class Committed(msgspec.Struct, frozen=True):
    """What was put into a slot: attest compares the slot with it."""

    version: int
    digests: bytes


class Attached:
    """One adapter's slots, plan and arenas on this worker."""

    def __init__(
        self,
        spec: Spec,
        lora_ids: tuple[int, ...],
        slot_map: SlotMap,
        plan: Plan,
        arenas: ArenaSet,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.lora_ids = list(lora_ids)
        self.slot_map = slot_map
        self.plan = plan
        self.arenas = arenas
        self.kernel: CopyKernel = plan.kernel(device)
        self.slots: list[int] = []
        self.committed: list[Committed | None] = [None] * len(lora_ids)
        self.damaged: set[int] = set()
        self.staged: rpc.StageRequest | None = None


class WorkerRefit(WorkerState):
    """The state machine of one adapter on one worker: attached, staged, committed."""

    def __init__(self, worker: Any) -> None:
        """worker: vLLM's, with LoRA."""
        super().__init__(
            {
                "facts": (rpc.Nothing, self.facts),
                "attach": (rpc.AttachRequest, self.attach),
                "adopt": (rpc.Nothing, self.adopt),
                "stage": (rpc.StageRequest, self.stage),
                "commit": (rpc.CommitRequest, self.commit),
                "abort": (rpc.Nothing, self.abort),
                "attest": (rpc.AttestRequest, self.attest),
                "detach": (rpc.Nothing, self.detach),
            }
        )
        self._worker = int(worker.rank)
        self._base = EngineWeights.of_worker(worker)
        self._ledger = ledger_of(worker)
        self._loader = Loader(worker.model_runner.lora_manager)
        self._slots = Slots(self._loader.manager)
        self._attached: Attached | None = None
        self._candidate: Attached | None = None
        self._allocations = 0

    @property
    def in_use(self) -> bool:
        return self._attached is not None or self._candidate is not None

    def facts(self, _: rpc.Nothing) -> rpc.EngineFacts:
        return rpc.EngineFacts(
            slots=self._slots.count,
            free_slots=self._slots.free,
            dtype=str(self._loader.dtype).removeprefix("torch."),
        )

    def attach(self, request: rpc.AttachRequest) -> rpc.AttachAnswer:
        """Trace the engine, compose the plan, map the arenas, take the slots: a candidate.

        What is attached stays so until `adopt`; its live slot is not touched.
        """
        self.abort(rpc.Nothing())
        started = time.perf_counter()
        spec = Spec.from_bytes(request.spec)
        self._check_dtype(spec)
        self._ledger.require_base()
        warnings = require_same_base(
            self._base.compare_bases(spec.layout.base), spec.layout.base_gaps
        )
        arenas = ArenaSet(spec, request.timeout_s, self._slots.device)
        try:
            slot_map = self._slot_map(spec, request)
            plan = scatter_plan_of(spec, slot_map, self._worker)
            attached = Attached(spec, request.lora_ids, slot_map, plan, arenas, self._slots.device)
            self._take_slots(attached, request.live)
        except BaseException:
            arenas.close()
            for lora_id in request.lora_ids:
                if lora_id != request.live:
                    self._slots.release(lora_id)
            raise
        self._candidate = attached
        return rpc.AttachAnswer(
            pieces=_pieces(slot_map),
            blocks=len(plan.blocks),
            plan_digest=plan.digest,
            transport=arenas.transport,
            trace_ms=(time.perf_counter() - started) * 1e3,
            warnings=warnings + self._warnings(),
        )

    def adopt(self, _: rpc.Nothing) -> rpc.Nothing:
        """Put the candidate in the place of what was attached."""
        if self._candidate is None:
            raise NotCommitted("no attach is under way")
        previous, self._attached = self._attached, self._candidate
        self._candidate = None
        if previous is not None:
            previous.arenas.close()
        return rpc.Nothing()

    def stage(self, request: rpc.StageRequest) -> rpc.StageAnswer:
        """Wait for the version on every trainer rank and verify every byte of it."""
        attached = self._require_attached()
        if request.publisher != attached.spec.publisher:
            raise StaleArena(
                "the ticket belongs to another publisher than the attached spec; attach that "
                "publisher's spec first"
            )
        attached.staged = None
        verified = attached.arenas.pin_and_verify(
            request.sequence, request.version, request.timeout_s
        )
        attached.staged = request
        return rpc.StageAnswer(verified.digest, verified.wait_ms, verified.verify_ms)

    def commit(self, request: rpc.CommitRequest) -> rpc.CommitAnswer:
        """One scatter launch into the staged slot, then let the trainers have their arenas back."""
        attached = self._require_attached()
        staged = attached.staged
        if staged is None or (staged.sequence, staged.version) != (
            request.sequence,
            request.version,
        ):
            raise CommitFailed(f"version {request.version} is not staged; stage it first")
        index = staged.slot
        # Not when staging: taking the only slot back zeroes it, and staging may fail afterwards.
        self._take_over(attached, index, request.lora_id)
        slot = attached.slots[index]
        started = time.perf_counter()
        launches = attached.kernel.launches
        if index in attached.damaged:
            # The plan writes no padding, so damage there would outlive the commit.
            self._slots.clear(slot)
            attached.damaged.discard(index)
        try:
            digests = attached.kernel.run(attached.arenas.addresses(), self._slots.addresses(slot))
            self._slots.enable(slot, attached.slot_map.enabled)
        finally:
            attached.staged = None
            attached.arenas.release()
        attached.committed[index] = Committed(request.version, digests.tobytes())
        allocations, self._allocations = self._allocations, 0
        return rpc.CommitAnswer(
            bytes_written=attached.kernel.bytes_written,
            launches=attached.kernel.launches - launches,
            allocations=allocations,
            scatter_ms=(time.perf_counter() - started) * 1e3,
        )

    def abort(self, _: rpc.Nothing) -> rpc.Nothing:
        """Forget what is staged and any candidate; the live slot stays as it is."""
        if self._attached is not None:
            self._attached.staged = None
            self._attached.arenas.release()
        if self._candidate is not None:
            candidate, self._candidate = self._candidate, None
            candidate.arenas.close()
            kept = self._attached.lora_ids if self._attached is not None else []
            for lora_id in candidate.lora_ids:
                if lora_id not in kept:
                    self._slots.release(lora_id)
        return rpc.Nothing()

    def attest(self, request: rpc.AttestRequest) -> rpc.AttestAnswer:
        """Recompute the digests of the whole slot, padding included, and compare."""
        attached = self._require_attached()
        slot = attached.slots[request.slot]
        committed = attached.committed[request.slot]
        problem = self._slots.problem(attached.lora_ids[request.slot], slot)
        if problem is not None:
            return rpc.AttestAnswer(problem)
        if committed is None or committed.version != request.version:
            raise NotCommitted(f"version {request.version} was not committed into slot {slot}")
        if self._slots.enabled(slot) != attached.slot_map.enabled:
            return rpc.AttestAnswer(f"slot {slot} is disabled in a fused MoE module")
        now = digest(self._slots.addresses(slot), self._slots.nbytes(), self._slots.device)
        then = np.frombuffer(committed.digests, np.uint64)
        problem = self._differences(now, then)
        if problem:
            attached.damaged.add(request.slot)
        return rpc.AttestAnswer(problem)

    def detach(self, _: rpc.Nothing) -> rpc.Nothing:
        """Unmap the arenas and give the slots back. Idempotent."""
        self.abort(rpc.Nothing())
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.arenas.close()
            for lora_id in attached.lora_ids:
                self._slots.release(lora_id)
        return rpc.Nothing()

    def _warnings(self) -> tuple[str, ...]:
        if self._loader.device.type != "cpu" or self._slots.free > 0:
            return ()
        return (
            "all LoRA slots are in use: vLLM's CPU kernels serve a base-model request that shares "
            "a batch with adapter requests from the last slot; raise max_loras by one if you mix "
            "them",
        )

    def _require_attached(self) -> Attached:
        if self._attached is None:
            raise NotCommitted("nothing is attached; call engine.attach(publisher.spec) first")
        return self._attached

    def _check_dtype(self, spec: Spec) -> None:
        dtype = str(self._loader.dtype).removeprefix("torch.")
        if spec.layout.dtype != dtype:
            raise LayoutMismatch(
                f"the publisher packs {spec.layout.dtype}, but this engine's LoRA slots are "
                f"{dtype}; build the Publisher with dtype=torch.{dtype}"
            )

    def _slot_map(self, spec: Spec, request: rpc.AttachRequest) -> SlotMap:
        """Trace under the ids that serve nothing; a known layout needs no second trace."""
        previous = self._attached
        if previous is not None:
            for lora_id in previous.lora_ids:
                if lora_id != request.live:
                    self._slots.release(lora_id)
        if previous is not None and previous.spec.layout_digest == spec.layout_digest:
            return previous.slot_map
        idle = tuple(id_ for id_ in request.lora_ids if id_ != request.live)
        if not idle:
            raise LayoutMismatch(
                "the only slot serves the live version, so another layout cannot be traced; call "
                "engine.close() first or start the engine with max_loras=2"
            )
        layout = spec.layout
        return trace_engine(
            self._loader, self._slots, layout.export_map.factors, layout.peft_config, idle
        )

    def _take_slots(self, attached: Attached, live: int) -> None:
        previous = self._attached
        rank = int(attached.spec.layout.peft_config["r"])
        for index, lora_id in enumerate(attached.lora_ids):
            if lora_id == live and previous is not None:
                old = previous.lora_ids.index(lora_id)
                attached.slots.append(previous.slots[old])
                attached.committed[index] = previous.committed[old]
                if old in previous.damaged:
                    attached.damaged.add(index)
            else:
                attached.slots.append(self._slots.reserve(lora_id, rank))

    def _take_over(self, attached: Attached, index: int, lora_id: int) -> None:
        """Put a slot under the id of the version to come, before anything of it is written.

        So no request of an earlier version can meet the new weights. A slot that vLLM gave away
        (a sleep, a base reload, an eviction) is taken back.
        """
        before = attached.lora_ids[index]
        attached.committed[index] = None
        if self._slots.problem(before, attached.slots[index]) is None:
            self._slots.rename(before, lora_id)
        else:
            self._slots.release(before)
            rank = int(attached.spec.layout.peft_config["r"])
            attached.slots[index] = self._slots.reserve(lora_id, rank)
            self._allocations += 1
        attached.lora_ids[index] = lora_id

    def _differences(self, now: npt.NDArray[np.uint64], then: npt.NDArray[np.uint64]) -> str:
        wrong = np.flatnonzero(now != then)
        if len(wrong) == 0:
            return ""
        names = [self._slots.buffers[int(index)].name for index in wrong]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        return f"differs from its commit in {', '.join(names[:4])}{more}"


def _pieces(slot_map: SlotMap) -> tuple[rpc.Piece, ...]:
    pieces = {}
    for tensor_map in slot_map.maps:
        for cell in tensor_map.cells:
            rows, cols = cell.along_rows.packed, cell.along_cols.packed
            if cell.transposed:
                rows, cols = cols, rows
            pieces[cell.tensor, rows, cols] = rpc.Piece(cell.tensor, rows, cols)
    return tuple(pieces.values())
