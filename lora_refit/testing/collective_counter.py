"""Counts collectives where they happen, so that "a refit uses none" can be checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_SHARED_MEMORY_PREFIX = "shm_"
"""vLLM's CPU workers exchange tensors by operators of their own: `shm_allreduce` and the like."""


class CollectiveCounter(TorchDispatchMode):
    """Between `start` and `stop`, counts this thread's collectives: torch.distributed's and vLLM's.

    They are seen in torch's dispatcher, so it does not matter how a caller got hold of the function.
    """

    def start(self) -> None:
        self._count = 0
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> int:
        """Collectives since `start`."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._count

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self._count += func.namespace == "c10d" or func._opname.startswith(_SHARED_MEMORY_PREFIX)
        run: Callable[..., Any] = func
        return run(*args, **(kwargs or {}))
