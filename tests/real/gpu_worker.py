"""An engine worker whose slots pass for GPU memory."""

from __future__ import annotations

from typing import Any

from mutants import MutantWorkerExtension
from pretended_gpu import pretend_gpu


class GpuWorkerExtension(MutantWorkerExtension):
    """The product's worker, unchanged, on the CUDA backend."""

    def lora_refit_call(self, data: bytes) -> bytes:
        pretend_gpu()
        return super().lora_refit_call(data)

    def lora_refit_inspections(self) -> dict[str, Any]:
        return super().lora_refit_inspections() | {"driver_calls": driver_calls}


def driver_calls(worker: Any) -> list[str]:
    """The driver calls of this worker since the last time."""
    return [str(call) for call in pretend_gpu().take_calls()]
