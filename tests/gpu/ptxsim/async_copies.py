"""cp.async: copies to shared memory that happen as late as their waits allow."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .global_memory import GlobalMemory
from .lanes import Lanes, Values
from .shared_memory import SharedMemory


@dataclass
class _Copy:
    """One cp.async instruction of some threads, and the commit group of each."""

    threads: NDArray[np.int64]
    groups: NDArray[np.int64]
    targets: Values
    sources: Values
    size: int
    valid: Values

    def part(self, mask: NDArray[np.bool_]) -> _Copy:
        return _Copy(
            self.threads[mask],
            self.groups[mask],
            self.targets[mask],
            self.sources[mask],
            self.size,
            self.valid[mask],
        )


class AsyncCopies:
    """Copies in flight. Threads commit and wait for themselves only, as the ISA says."""

    def __init__(self, launch_threads: int, memory: GlobalMemory, shared: SharedMemory) -> None:
        self._launch_threads = launch_threads
        self._memory = memory
        self._shared = shared
        self._open_group = np.zeros(launch_threads, np.int64)
        self._pending: list[_Copy] = []

    def issue(
        self, lanes: Lanes, targets: Values, sources: Values, size: int, valid: Values
    ) -> None:
        """`size` bytes each, of which `valid` come from the source and the others are zero."""
        self._memory.load_prefix(sources, size, valid)
        self._shared.begin_copy(lanes, targets, size)
        groups = lanes.take(self._open_group).copy()
        self._pending.append(_Copy(lanes.threads, groups, targets, sources, size, valid))

    def commit(self, lanes: Lanes) -> None:
        lanes.put(self._open_group, lanes.take(self._open_group) + 1)

    def wait_group(self, lanes: Lanes, allowed: int) -> None:
        """Completes all but the `allowed` newest committed groups of each thread."""
        self._complete(lanes, -allowed)

    def wait_all(self, lanes: Lanes) -> None:
        self._complete(lanes, 1)

    def _complete(self, lanes: Lanes, newest: int) -> None:
        """Copies of groups below each waiting thread's open group plus `newest`."""
        limit = np.full(self._launch_threads, -1, np.int64)
        lanes.put(limit, lanes.take(self._open_group) + newest)
        pending, self._pending = self._pending, []
        for copy in pending:
            due = copy.groups < limit[copy.threads]
            if due.any():
                self._perform(copy.part(due))
            if not due.all():
                self._pending.append(copy.part(~due))

    def _perform(self, copy: _Copy) -> None:
        data = self._memory.load_prefix(copy.sources, copy.size, copy.valid)
        lanes = Lanes(copy.threads, self._launch_threads)
        self._shared.end_copy(lanes, copy.targets, data)
