"""Register files: one array per register, and who has written it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .lanes import Lanes

Bits = NDArray[Any]

STORAGE = {1: np.dtype(bool), 16: np.dtype("u2"), 32: np.dtype("u4"), 64: np.dtype("u8")}
"""How a register of so many bits is kept; predicates have one."""


def width_of(register_type: str) -> int:
    return 1 if register_type == "pred" else int(register_type[1:])


class RegisterFile:
    """All registers of all threads of a launch. Reading one before it is written is an error."""

    def __init__(self, names: list[str], widths: list[int], launch_threads: int) -> None:
        self._names = names
        self._widths = widths
        self._threads = launch_threads
        self._values: list[Bits | None] = [None] * len(names)
        self._written: list[NDArray[np.bool_] | None] = [None] * len(names)
        self._complete = [False] * len(names)
        self._last_writers: list[Lanes | None] = [None] * len(names)

    def read(self, register: int, lanes: Lanes) -> Bits:
        values = self._values[register]
        if self._last_writers[register] is not lanes and not self._complete[register]:
            written = self._written[register]
            if values is None or written is None or not lanes.take(written).all():
                raise PtxError(f"register {self._names[register]} is read before it is written")
        assert values is not None
        return lanes.take(values)

    def write(self, register: int, lanes: Lanes, bits: Bits) -> None:
        values = self._values[register]
        if values is None:
            values = np.zeros(self._threads, STORAGE[self._widths[register]])
            self._values[register] = values
        lanes.put(values, bits)
        if self._complete[register] or self._last_writers[register] is lanes:
            return
        self._last_writers[register] = lanes
        if lanes.is_everyone:
            self._complete[register] = True
            return
        written = self._written[register]
        if written is None:
            written = np.zeros(self._threads, bool)
            self._written[register] = written
        lanes.put(written, np.True_)
