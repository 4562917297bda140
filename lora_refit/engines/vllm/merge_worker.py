"""The engine worker's side of merged mode: stage all buckets, let vLLM load them, then commit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lora_refit.engines.vllm import rpc
from lora_refit.engines.vllm.base_guard import require_same_base
from lora_refit.engines.vllm.ledger import ledger_of
from lora_refit.engines.vllm.plugin import BACKEND
from lora_refit.engines.vllm.state import WorkerState
from lora_refit.engines.vllm.target_layers import TargetLayer
from lora_refit.engines.vllm.transfer import RefitTransferEngine
from lora_refit.engines.vllm.weights import EngineWeights
from lora_refit.errors import CommitFailed, LayoutMismatch, NotCommitted, StaleArena
from lora_refit.merged.collector import BucketCollector
from lora_refit.merged.layout import MergedLayout
from lora_refit.spec import Layout, Spec


class _Attached:
    """A publisher's rings on this worker, the layers that they fill, and what is staged."""

    def __init__(
        self,
        spec: Spec,
        layout: MergedLayout,
        collector: BucketCollector,
        layers: Sequence[TargetLayer],
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.collector = collector
        self.layers = layers
        self.staged: rpc.MergeStageRequest | None = None


class _Committed:
    """What the layers held when a version was committed: attest compares them with it."""

    def __init__(self, version: int, layers: Sequence[TargetLayer], weights: EngineWeights) -> None:
        self.version = version
        self.layers = layers
        self.names, self.digests = weights.digests(layers)


class WorkerMerge(WorkerState):
    """The state machine of one worker's own weights: attached, staged, loaded, committed."""

    def __init__(self, worker: Any) -> None:
        super().__init__(
            {
                "attach": (rpc.MergeAttachRequest, self.attach),
                "adopt": (rpc.Nothing, self.adopt),
                "stage": (rpc.MergeStageRequest, self.stage),
                "verify": (rpc.MergeVerifyRequest, self.verify),
                "commit": (rpc.MergeCommitRequest, self.commit),
                "abort": (rpc.Nothing, self.abort),
                "attest": (rpc.MergeAttestRequest, self.attest),
                "detach": (rpc.Nothing, self.detach),
            }
        )
        self._worker = worker
        self._transfer = _transfer_engine(worker)
        self._weights = self._transfer.weights
        self._device = torch.device(worker.device)
        self._attached: _Attached | None = None
        self._candidate: _Attached | None = None
        self._committed: _Committed | None = None
        self._ledger = ledger_of(worker)

    @property
    def in_use(self) -> bool:
        return self._attached is not None or self._candidate is not None

    def attach(self, request: rpc.MergeAttachRequest) -> rpc.MergeAttachAnswer:
        """Map the rings, find the layers that the weights fill, compare the bases: a candidate."""
        self.abort(rpc.Nothing())
        started = time.perf_counter()
        spec = Spec.from_bytes(request.spec)
        layout = spec.layout.merged
        if layout is None:
            raise LayoutMismatch(
                'the spec is of adapter mode; build the Publisher with mode="merged"'
            )
        self._weights.require_dtype(layout.dtype)
        self._ledger.require_replaceable_by(weight.name for weight in layout.weights)
        layers = self._weights.targets(layout.weights)
        warnings = self._compare_bases(spec.layout)
        collector = BucketCollector(spec, request.timeout_s, self._device)
        self._candidate = _Attached(spec, layout, collector, layers)
        return rpc.MergeAttachAnswer(
            layers=len(layers),
            buckets=collector.buckets,
            transport=collector.transport,
            trace_ms=(time.perf_counter() - started) * 1e3,
            warnings=warnings,
        )

    def adopt(self, _: rpc.Nothing) -> rpc.Nothing:
        """Put the candidate in the place of what was attached."""
        if self._candidate is None:
            raise NotCommitted("no attach is under way")
        previous, self._attached = self._attached, self._candidate
        self._candidate = None
        self._weights.adopt(self._attached.layers)
        if previous is not None:
            previous.collector.close()
        return rpc.Nothing()

    def stage(self, request: rpc.MergeStageRequest) -> rpc.MergeStageAnswer:
        """Wait until every trainer rank offers the version."""
        attached = self._require_attached()
        if request.publisher != attached.spec.publisher:
            raise StaleArena(
                "the ticket belongs to another publisher than the attached spec; attach that "
                "publisher's spec first"
            )
        self._drop_staged()
        wait_ms = attached.collector.begin(request.sequence, request.version, request.timeout_s)
        attached.staged = request
        return rpc.MergeStageAnswer(wait_ms)

    def verify(self, request: rpc.MergeVerifyRequest) -> rpc.MergeVerifyAnswer:
        """Have every trainer rank merge every bucket, and verify every byte of them; in slices, as
        a call must end in time and a model can have many buckets."""
        attached = self._require_attached()
        if attached.staged is None:
            raise CommitFailed("no version is staged; stage it first")
        verified = attached.collector.verify(request.slice_s)
        if verified is None:
            return rpc.MergeVerifyAnswer()
        # From now on updates can replace them.
        self._ledger.merged.update(weight.name for weight in attached.layout.weights)
        self._transfer.bind(attached.collector)
        return rpc.MergeVerifyAnswer(verified.digest, verified.sums.tobytes())

    def commit(self, request: rpc.MergeCommitRequest) -> rpc.MergeCommitAnswer:
        """Make sure that vLLM has loaded exactly the staged version, and remember what it holds."""
        attached = self._require_attached()
        staged = attached.staged
        if staged is None or (staged.sequence, staged.version) != (
            request.sequence,
            request.version,
        ):
            raise CommitFailed(f"version {request.version} is not staged; stage it first")
        collector = attached.collector
        try:
            self._require_loaded(staged, collector.buckets)
            self._committed = _Committed(request.version, attached.layers, self._weights)
        finally:
            self._drop_staged()
        return rpc.MergeCommitAnswer(
            bytes_loaded=collector.total_bytes,
            launches=collector.buckets,
            peak_bytes=collector.take_peak_bytes(),
        )

    def abort(self, _: rpc.Nothing) -> rpc.Nothing:
        """Forget what is staged and any candidate; a load that was begun leaves a mixture."""
        self._drop_staged()
        if self._candidate is not None:
            candidate, self._candidate = self._candidate, None
            candidate.collector.close()
        return rpc.Nothing()

    def attest(self, request: rpc.MergeAttestRequest) -> rpc.AttestAnswer:
        """Read all layers back and compare them with what they were when committed."""
        self._require_attached()
        committed = self._committed
        if committed is None or committed.version != request.version:
            raise NotCommitted(f"version {request.version} was not committed on this worker")
        names, found = self._weights.digests(committed.layers)
        if names != committed.names:
            return rpc.AttestAnswer("the engine's layers are not those that were committed")
        wrong = [names[int(index)] for index in np.flatnonzero(found != committed.digests)]
        more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
        problem = f"differs from its commit in {', '.join(wrong[:4])}{more}" if wrong else ""
        return rpc.AttestAnswer(problem)

    def detach(self, _: rpc.Nothing) -> rpc.Nothing:
        """Unmap the rings; the weights stay as they are. Idempotent."""
        self.abort(rpc.Nothing())
        self._committed = None
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.collector.close()
        return rpc.Nothing()

    def _compare_bases(self, layout: Layout) -> tuple[str, ...]:
        """Of the weights that are still those of the base."""
        merged = self._ledger.merged
        samples = [sample for sample in layout.base if sample.name not in merged]
        warnings = require_same_base(self._weights.compare_bases(samples), layout.base_gaps)
        if len(samples) == len(layout.base):
            return warnings
        return (
            *warnings,
            "the engine's base was not compared where merged weights have taken its place",
        )

    def _require_loaded(self, staged: rpc.MergeStageRequest, buckets: int) -> None:
        if self._transfer.failure:
            raise CommitFailed(self._transfer.failure)
        loaded = [(u.sequence, u.version, u.bucket) for u in self._transfer.updates]
        wanted = [(staged.sequence, staged.version, bucket) for bucket in range(buckets)]
        if loaded != wanted:
            raise CommitFailed(
                f"vLLM loaded {len(loaded)} of the {buckets} buckets of version {staged.version}, or "
                "others"
            )

    def _drop_staged(self) -> None:
        """Let the trainers publish again, and no update take anything any more."""
        self._transfer.bind(None)
        if self._worker._weight_update_active:
            # Left open by a refit that ended half-way: vLLM would refuse to start another.
            self._transfer.abandon()
            self._worker._weight_update_active = False
        if self._attached is not None:
            self._attached.staged = None
            self._attached.collector.end()

    def _require_attached(self) -> _Attached:
        if self._attached is None:
            raise NotCommitted("nothing is attached; call engine.attach(publisher.spec) first")
        return self._attached


def _transfer_engine(worker: Any) -> RefitTransferEngine:
    engine = getattr(worker, "weight_transfer_engine", None)
    if not isinstance(engine, RefitTransferEngine):
        raise LayoutMismatch(
            "the engine does not accept merged weights; start it with "
            f'weight_transfer_config={{"backend": "{BACKEND}"}}, or use adapter mode'
        )
    return engine
