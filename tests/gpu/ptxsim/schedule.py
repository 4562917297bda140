"""Which threads run next: the lowest program counter first, so that diverged lanes meet again."""

from __future__ import annotations

import heapq

import numpy as np

from .errors import PtxError
from .lanes import Lanes

NEVER = 1 << 62


class Schedule:
    """Every thread is at a program counter, waits at a barrier or for its warp, or has exited.

    A warp collective runs for a warp once all lanes that its mask names have arrived; those that
    came first wait. Barriers open when nothing else can run.
    """

    def __init__(self, blocks: int, block_threads: int) -> None:
        self._block_threads = block_threads
        self._blocks = blocks
        self._launch_threads = blocks * block_threads
        self._runnable: dict[int, list[Lanes]] = {}
        self._order: list[int] = []
        self._at_barrier: list[tuple[int, Lanes]] = []
        self._for_warp: dict[int, Lanes] = {}
        everyone = np.arange(self._launch_threads, dtype=np.int64)
        self.add(0, Lanes(everyone, self._launch_threads))

    def add(self, pc: int, lanes: Lanes) -> None:
        if not len(lanes):
            return
        if pc not in self._runnable:
            heapq.heappush(self._order, pc)
            self._runnable[pc] = []
        self._runnable[pc].append(lanes)

    @property
    def lowest(self) -> int:
        """The lowest program counter of a runnable thread."""
        return self._order[0] if self._order else NEVER

    def take(self) -> tuple[int, Lanes] | None:
        """The next threads to run; None when no thread is runnable."""
        if not self._order:
            return None
        pc = heapq.heappop(self._order)
        groups = self._runnable.pop(pc)
        if len(groups) == 1:
            return pc, groups[0]
        threads = np.sort(np.concatenate([lanes.threads for lanes in groups]), kind="stable")
        return pc, Lanes(threads, self._launch_threads)

    def wait_at_barrier(self, pc: int, lanes: Lanes) -> None:
        self._at_barrier.append((pc, lanes))

    def wait_for_warp(self, pc: int, lanes: Lanes) -> None:
        if len(lanes):
            self._for_warp[pc] = lanes

    def with_waiting(self, pc: int, lanes: Lanes) -> Lanes:
        """Those that arrive at the collective at `pc`, and those that wait for them there."""
        waiting = self._for_warp.pop(pc, None)
        return lanes if waiting is None else lanes.joined(waiting)

    def open_barriers(self) -> np.ndarray | None:
        """Releases all blocks at their barriers and returns them; None if every thread exited.

        Raises:
            PtxError: a thread waits for others that can no longer come.
        """
        if self._for_warp:
            pc, lanes = next(iter(self._for_warp.items()))
            raise PtxError(
                f"instruction {pc}: {len(lanes)} lanes wait for lanes of their warps that are "
                "named in the mask but never come"
            )
        if not self._at_barrier:
            return None
        arrived = np.concatenate([lanes.threads for _, lanes in self._at_barrier])
        counts = np.bincount(arrived // self._block_threads, minlength=self._blocks)
        if ((counts != 0) & (counts != self._block_threads)).any():
            raise PtxError("bar.sync: some threads of the block exited and never come")
        waiting, self._at_barrier = self._at_barrier, []
        for pc, lanes in waiting:
            self.add(pc + 1, lanes)
        return np.flatnonzero(counts)
