"""What the driver and an engine worker say to each other: msgspec structs, never pickle.

A worker answers every call with a Reply and never raises: vLLM's executor stops reading replies at
the first worker that raises, and would hand the others' replies to the next call.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lora_refit import errors


class Call(msgspec.Struct, frozen=True):
    """method: of the worker; body: its encoded request.

    adapter: the name of what is refitted. owner: the driver's handle, which alone may refit it.
    id: repeated by the replies. mode: which state machine of the worker: "adapter", "merged" or
    "base".
    """

    method: str
    body: bytes
    adapter: str = ""
    owner: str = ""
    id: int = 0
    mode: str = ""


class EngineCall(msgspec.Struct, frozen=True):
    """A method of vLLM's own worker, called on all of them; what it returns is not looked at."""

    method: str
    kwargs: dict[str, Any] = {}


class DriverCall(msgspec.Struct, frozen=True):
    """A method of vLLM's engine beside the driver. Its replies are one value: what it returns."""

    method: str
    args: tuple[Any, ...] = ()


class Reply(msgspec.Struct, frozen=True):
    """error: name of a RefitError class, empty when the call went well; body: encoded answer."""

    worker: int
    error: str
    message: str
    body: bytes
    call_id: int = 0

    def exception(self) -> errors.RefitError:
        kind = getattr(errors, self.error, errors.RefitError)
        failure = kind(f"engine worker {self.worker}: {self.message}")
        assert isinstance(failure, errors.RefitError)
        return failure


class AttachRequest(msgspec.Struct, frozen=True):
    """lora_ids: one for each slot to take; live: which of them must go on serving, or -1."""

    spec: bytes
    lora_ids: tuple[int, ...]
    live: int
    timeout_s: float


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Rows and columns of a factor that land in some slot; packed like AxisMap."""

    factor: int
    rows: bytes
    cols: bytes


class AttachAnswer(msgspec.Struct, frozen=True):
    pieces: tuple[Piece, ...]
    blocks: int
    plan_digest: str
    transport: str
    trace_ms: float
    warnings: tuple[str, ...]


class EngineFacts(msgspec.Struct, frozen=True):
    """Facts that the driver needs before attaching. dtype: of the LoRA slots."""

    slots: int
    free_slots: int
    dtype: str


class StageRequest(msgspec.Struct, frozen=True):
    """slot: which of the attached slots to write at commit, as an index into lora_ids.
    publisher: of the ticket."""

    slot: int
    sequence: int
    version: int
    publisher: bytes
    timeout_s: float


class StageAnswer(msgspec.Struct, frozen=True):
    """digest: of the adapter's packed bytes, over all trainer ranks."""

    digest: str
    wait_ms: float
    verify_ms: float


class CommitRequest(msgspec.Struct, frozen=True):
    """The version that was staged; anything else is refused. lora_id: what it will be served as."""

    sequence: int
    version: int
    lora_id: int


class CommitAnswer(msgspec.Struct, frozen=True):
    bytes_written: int
    launches: int
    allocations: int
    scatter_ms: float


class LoadBaseRequest(msgspec.Struct, frozen=True):
    """path: a checkpoint folder that every worker can read."""

    path: str


class MergeAttachRequest(msgspec.Struct, frozen=True):
    spec: bytes
    timeout_s: float


class MergeAttachAnswer(msgspec.Struct, frozen=True):
    """layers: that the merged weights fill. buckets: of one version."""

    layers: int
    buckets: int
    transport: str
    trace_ms: float
    warnings: tuple[str, ...]


class MergeStageRequest(msgspec.Struct, frozen=True):
    """publisher: of the ticket."""

    sequence: int
    version: int
    publisher: bytes
    timeout_s: float


class MergeStageAnswer(msgspec.Struct, frozen=True):
    """wait_ms: for the trainer ranks."""

    wait_ms: float


class MergeVerifyRequest(msgspec.Struct, frozen=True):
    """slice_s: how long to go on before answering."""

    slice_s: float


class MergeVerifyAnswer(msgspec.Struct, frozen=True):
    """digest: over all buckets of all trainer ranks, empty while there are more to verify. sums:
    `MERGE_SUMS_DTYPE` records, one for each merged weight."""

    digest: str = ""
    sums: bytes = b""


class MergeCommitRequest(msgspec.Struct, frozen=True):
    sequence: int
    version: int


class MergeCommitAnswer(msgspec.Struct, frozen=True):
    """bytes_loaded: of merged weights. peak_bytes: the most that was held of them at a time."""

    bytes_loaded: int
    launches: int
    peak_bytes: int


class MergeAttestRequest(msgspec.Struct, frozen=True):
    version: int


class AttestRequest(msgspec.Struct, frozen=True):
    slot: int
    version: int


class AttestAnswer(msgspec.Struct, frozen=True):
    """problem: empty, or what differs from the commit."""

    problem: str


class Nothing(msgspec.Struct, frozen=True):
    """An empty request or answer."""
