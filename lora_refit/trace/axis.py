"""Maps from positions along one axis to coordinates of a source tensor, stored as arithmetic runs.

A refit moves rows and columns in long regular stretches, so an axis of 14,336 rows is usually one
run. Keeping runs instead of index arrays is what makes maps small enough to ship to every worker.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


class AxisMap(msgspec.Struct, frozen=True, array_like=True):
    """Coordinates of a source tensor for consecutive positions of a destination axis."""

    packed: bytes
    """int64 [n, 3], little endian: each run is (first coordinate, step, count >= 1)."""

    @staticmethod
    def from_coordinates(coordinates: npt.ArrayLike) -> AxisMap:
        """Greedily compress a coordinate per position into arithmetic runs."""
        values = np.asarray(coordinates, dtype=np.int64)
        steps = np.diff(values)
        changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
        runs = []
        start = 0
        for stop in [*changes.tolist(), len(steps)]:
            # The step into a run's first element belongs to no run, so a change right there ends
            # nothing.
            if stop <= start:
                continue
            runs.append((int(values[start]), int(steps[start]), stop - start + 1))
            start = stop + 1
        if start == len(values) - 1:
            runs.append((int(values[start]), 0, 1))
        return AxisMap(np.asarray(runs, dtype="<i8").tobytes())

    @property
    def runs(self) -> IntArray:
        return np.frombuffer(self.packed, dtype="<i8").reshape(-1, 3)

    @property
    def length(self) -> int:
        """Number of positions covered."""
        return int(self.runs[:, 2].sum())

    def coordinates(self) -> IntArray:
        """The coordinate of every position, int64 [length]."""
        parts = [first + step * np.arange(count) for first, step, count in self.runs.tolist()]
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
