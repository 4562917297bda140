"""What a worker's own weights hold, for whoever attaches to it: base, merged policy, or neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lora_refit.errors import LayoutMismatch

_REMEDY = "load the engine's base again: publisher.base_state(path), then engine.load_base(path)"


class BaseLedger:
    """Outlives what is attached: merged weights stay when their publisher is gone.

    merged: checkpoint names of the weights in whose place merged ones were loaded.
    """

    def __init__(self) -> None:
        self.merged: set[str] = set()
        self._half_loaded = ""

    def require_base(self) -> None:
        """Raises LayoutMismatch if an adapter would be applied to anything but a base."""
        self._require_loaded()
        if self.merged:
            raise LayoutMismatch(
                f"the engine's own weights hold a merged policy ({_some(self.merged)}), on which an "
                f"adapter would count twice; {_REMEDY}"
            )

    def require_replaceable_by(self, weights: Iterable[str]) -> None:
        """Raises LayoutMismatch if merged weights of before would stay beside those."""
        self._require_loaded()
        left = self.merged - set(weights)
        if left:
            raise LayoutMismatch(
                f"the engine holds merged weights that this publisher does not send "
                f"({_some(left)}), and would keep their old update; adapt the same modules, or "
                f"{_REMEDY}"
            )

    def begin_loading(self, path: str) -> None:
        """Until `finish_loading` nobody knows what the weights are."""
        self._half_loaded = path

    def finish_loading(self) -> None:
        self._half_loaded = ""
        self.merged.clear()

    def _require_loaded(self) -> None:
        if self._half_loaded:
            raise LayoutMismatch(
                f"loading {self._half_loaded} into the engine failed half-way; load a base first"
            )


def ledger_of(worker: Any) -> BaseLedger:
    """The worker's ledger, made when it is first asked for."""
    if not hasattr(worker, "_lora_refit_ledger"):
        worker._lora_refit_ledger = BaseLedger()
    ledger: BaseLedger = worker._lora_refit_ledger
    return ledger


def _some(names: set[str]) -> str:
    shown = sorted(names)[:3]
    return ", ".join(shown) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
