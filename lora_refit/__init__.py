"""Refit a LoRA adapter from a training policy into a running inference engine."""

from lora_refit.errors import (
    CommitFailed,
    CoverageError,
    EngineAsleep,
    LayoutMismatch,
    NotCommitted,
    NotMovement,
    ReaderTimeout,
    RefitError,
    StaleArena,
    TransportUnavailable,
    UnsupportedAdapter,
    WriterTimeout,
)
from lora_refit.publisher import Publisher
from lora_refit.report import AttachReport, Attestation, RefitReport
from lora_refit.sources.megatron import MegatronSource
from lora_refit.spec import Spec, Ticket

__version__ = "0.1.0"

__all__ = [
    "AttachReport",
    "Attestation",
    "CommitFailed",
    "CoverageError",
    "EngineAsleep",
    "LayoutMismatch",
    "MegatronSource",
    "NotCommitted",
    "NotMovement",
    "Publisher",
    "ReaderTimeout",
    "RefitError",
    "RefitReport",
    "Spec",
    "StaleArena",
    "Ticket",
    "TransportUnavailable",
    "UnsupportedAdapter",
    "WriterTimeout",
]
