"""A set of threads that execute an instruction together."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

WARP = 32

Threads = NDArray[np.int64]
Values = NDArray[Any]


class Lanes:
    """Thread numbers of a launch, ascending."""

    def __init__(self, threads: Threads, launch_threads: int) -> None:
        self.threads = threads
        self.launch_threads = launch_threads
        self._count = len(threads)
        is_run = self._count > 0 and threads[-1] - threads[0] == self._count - 1
        self._run = slice(int(threads[0]), int(threads[-1]) + 1) if is_run else None
        self.is_everyone = self._count == launch_threads

    def __len__(self) -> int:
        return self._count

    def take(self, values: Values) -> Values:
        """Their entries of an array with one entry per thread; it may be a view."""
        if self._run is not None:
            return values[self._run]
        if self.warps is not None:
            return values.reshape(-1, WARP)[self.warps].reshape(-1)
        return values[self.threads]

    def put(self, into: Values, values: Values) -> None:
        if self._run is not None:
            into[self._run] = values
        elif self.warps is not None:
            rows = values.reshape(-1, WARP) if np.ndim(values) else values
            into.reshape(-1, WARP)[self.warps] = rows
        else:
            into[self.threads] = values

    def where(self, mask: NDArray[np.bool_]) -> Lanes:
        return self if mask.all() else Lanes(self.threads[mask], self.launch_threads)

    def none(self) -> Lanes:
        return Lanes(self.threads[:0], self.launch_threads)

    def joined(self, other: Lanes) -> Lanes:
        if not len(self) or not len(other):
            return self if len(self) else other
        threads = np.concatenate([self.threads, other.threads])
        return Lanes(np.sort(threads, kind="stable"), self.launch_threads)

    @cached_property
    def warps(self) -> Threads | None:
        """The warps, if they are all complete, else None. They are moved as rows: it is faster."""
        firsts, lasts = self.threads[::WARP], self.threads[WARP - 1 :: WARP]
        if self._count % WARP or ((firsts % WARP) | (lasts - firsts != WARP - 1)).any():
            return None
        return firsts // WARP

    @cached_property
    def active_masks(self) -> NDArray[np.uint32]:
        """For each thread, which lanes of its warp are in this set, as bits."""
        if self.warps is not None:
            return np.full(len(self), 0xFFFFFFFF, np.uint32)
        warp = self.threads // WARP
        bits = np.uint32(1) << (self.threads % WARP).astype(np.uint32)
        starts = np.flatnonzero(np.diff(warp, prepend=-1))
        masks = np.bitwise_or.reduceat(bits, starts)
        return np.repeat(masks, np.diff(starts, append=len(warp)))
