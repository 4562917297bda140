"""Typed errors. Each message names the module, rank or value at fault and says what to do about it."""

from __future__ import annotations


class RefitError(Exception):
    """Base class of everything lora_refit raises on purpose."""


class NotMovement(RefitError):
    """An exporter or loader computes values instead of moving them, so it cannot be replayed."""


class CoverageError(RefitError):
    """Adapter elements are unused, unbound, or bound twice to different sources."""


class UnsupportedAdapter(RefitError):
    """The adapter uses a feature that this mode or engine cannot serve exactly."""


class LayoutMismatch(RefitError):
    """Trainer and engine disagree about shapes, dtypes, scales or the layout digest."""


class StaleArena(RefitError):
    """An arena does not hold the version or the bytes that the ticket names."""


class ReaderTimeout(RefitError):
    """An engine worker kept an arena half in use for longer than the publisher may wait."""


class WriterTimeout(RefitError):
    """A trainer rank did not publish in time, or is gone."""


class CommitFailed(RefitError):
    """A version could not be put live on every worker."""


class NotCommitted(RefitError):
    """No version is live: nothing was committed yet, or the last commit failed half-way."""


class EngineAsleep(RefitError):
    """The engine sleeps, woke up or dropped its adapters: its state is unknown until attested."""


class TransportUnavailable(RefitError):
    """A transport or backend cannot be used here; the message gives the reason and the remedy."""


__all__ = [
    "CommitFailed",
    "CoverageError",
    "EngineAsleep",
    "LayoutMismatch",
    "NotCommitted",
    "NotMovement",
    "ReaderTimeout",
    "RefitError",
    "StaleArena",
    "TransportUnavailable",
    "UnsupportedAdapter",
    "WriterTimeout",
]
