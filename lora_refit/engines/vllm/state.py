"""What the state machines of a worker share: calls by name, and one owner at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from lora_refit.engines.vllm import rpc
from lora_refit.errors import LayoutMismatch

Methods = Mapping[str, tuple[type[msgspec.Struct], Callable[[Any], msgspec.Struct]]]
"""By name: the type of the request, and what answers it."""


class WorkerState(ABC):
    """Belongs to the driver's handle that attached it, until that detaches."""

    def __init__(self, methods: Methods) -> None:
        self._methods = dict(methods)
        self._owner = ""

    @property
    @abstractmethod
    def in_use(self) -> bool:
        """Whether anything is attached, or about to be."""

    def handle(self, call: rpc.Call) -> bytes:
        """Answer a call. Raises LayoutMismatch if another handle owns what is attached."""
        if not self.in_use:
            self._owner = call.owner
        elif call.owner != self._owner:
            raise LayoutMismatch(
                f"{call.adapter!r} belongs to another RefitEngine; close that one first"
                + ("" if call.mode == "merged" else ", or give this one another adapter name")
            )
        request_type, method = self._methods[call.method]
        return msgspec.msgpack.encode(method(msgspec.msgpack.decode(call.body, type=request_type)))
