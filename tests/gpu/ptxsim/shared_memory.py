"""Shared memory of all blocks of a launch, and its race check.

Warps of a block are ordered by bar.sync only, and lanes of a warp also by bar.warp.sync. Between
two of them a granule may be read by any number of threads, or written by one thread that also reads
it, or added to by atomics; all else is a race.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .global_memory import UNITS
from .lanes import WARP, Lanes, Values

FILL = 0xFF
"""Unwritten shared memory reads as NaN in every format."""

# Who used a granule last, as one number: the barrier interval of the block and the warp in the
# upper half, the barrier interval of the warp and the lane in the lower half.
UPPER = 32
ACTORS = 64  # numbers below MANY are warps of the block, or lanes of the warp
MANY = 62
ATOMICS = 63


@dataclass(frozen=True)
class _Stamps:
    """What some lanes compare and leave behind, `int64[lane, 1]`, until the next barrier."""

    lanes: Lanes
    first_bytes: NDArray[np.int64]
    """Where the memory of each lane's block starts, `int64[lane]`."""
    block: NDArray[np.int64]
    """Stamps below this one are from before the block's last barrier."""
    warp: NDArray[np.int64]
    """Stamps of the own warp below this one are from before its last barrier."""
    mine: NDArray[np.int64]


class SharedMemory:
    def __init__(self, blocks: int, block_threads: int, size: int, granule: int) -> None:
        self._size = size
        self._stride = -(-size // 16) * 16
        self._bytes = np.full(max(blocks * self._stride, 16), FILL, np.uint8)
        self._units = {width: self._bytes.view(dtype) for width, dtype in UNITS.items()}
        self._granule = granule
        self._readers = np.zeros(len(self._bytes) // granule, np.int64)
        self._writers = np.zeros(len(self._bytes) // granule, np.int64)
        self._in_flight = np.zeros(len(self._bytes) // granule, bool)
        self._copies_in_flight = False
        threads = np.arange(blocks * block_threads)
        self._block_of = threads // block_threads
        self._lane_of = threads % WARP
        self._warp_of = threads % block_threads // WARP
        self._interval = np.ones(blocks, np.int64)
        self._warp_interval = np.ones(len(threads) // WARP, np.int64)
        self._last_stamps: _Stamps | None = None

    def pass_barrier(self, blocks: NDArray[np.int64]) -> None:
        self._interval[blocks] += 1
        self._last_stamps = None

    def pass_warp_barrier(self, warps: NDArray[np.int64]) -> None:
        self._warp_interval[warps] += 1
        self._last_stamps = None

    def load(self, lanes: Lanes, addresses: Values, size: int) -> Values:
        """Bytes, `uint8[lane, size]`."""
        offsets = self._locate(lanes, addresses, size)
        self._check_read(lanes, offsets, size)
        return self._units[size][offsets // size].view(np.uint8).reshape(len(lanes), size)

    def store(self, lanes: Lanes, addresses: Values, data: Values) -> None:
        size = data.shape[1]
        offsets = self._locate(lanes, addresses, size)
        self._check_write(lanes, offsets, size)
        values = data.view(UNITS[size]).reshape(-1)
        unit = self._units[size]
        unit[offsets // size] = values
        if not np.array_equal(unit[offsets // size].view(np.uint8), values.view(np.uint8)):
            raise PtxError("shared memory race: lanes store different values at one address")

    def add(self, lanes: Lanes, addresses: Values, values: Values, old_wanted: bool) -> Values:
        """Atomic additions. Returns the values found there, if they are wanted."""
        size = values.dtype.itemsize
        offsets = self._locate(lanes, addresses, size)
        index = self._granules(offsets, size)
        block = self._stamps(lanes).block
        now = block + (ATOMICS << UPPER)
        for used in (self._readers[index], self._writers[index]):
            if ((used >= block) & (used != now)).any():
                raise PtxError("shared memory race: an atomic beside a plain access")
        self._writers[index] = now
        cells = self._bytes.view(values.dtype)
        if not old_wanted:
            np.add.at(cells, offsets // size, values)
            return values
        old = np.empty_like(values)
        for lane, cell in enumerate(offsets // size):
            old[lane] = cells[cell]
            cells[cell] += values[lane]
        return old

    def begin_copy(self, lanes: Lanes, addresses: Values, size: int) -> None:
        """cp.async may write from now on until `end_copy`."""
        offsets = self._locate(lanes, addresses, size)
        self._check_write(lanes, offsets, size)
        self._in_flight[self._granules(offsets, size)] = True
        self._copies_in_flight = True

    def end_copy(self, lanes: Lanes, addresses: Values, data: Values) -> None:
        size = data.shape[1]
        self._in_flight[self._granules(self._locate(lanes, addresses, size), size)] = False
        self._copies_in_flight = bool(self._in_flight.any())
        self.store(lanes, addresses, data)

    def _locate(self, lanes: Lanes, addresses: Values, size: int) -> NDArray[np.int64]:
        if (addresses & np.uint64(size - 1)).any():
            raise PtxError(f"misaligned shared access of {size} bytes")
        if (addresses > np.uint64(max(self._size - size, 0))).any() or size > self._size:
            raise PtxError(
                f"out of bounds shared access at byte {int(addresses.max())} of {self._size}"
            )
        return self._stamps(lanes).first_bytes + addresses.astype(np.int64)

    def _granules(self, offsets: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        """`int64[lane, granules of an access]`."""
        first = offsets // self._granule
        return first[:, None] + np.arange(max(1, size // self._granule))

    def _stamps(self, lanes: Lanes) -> _Stamps:
        """Kept for the next access, which is mostly by the same lanes."""
        if self._last_stamps is None or self._last_stamps.lanes is not lanes:
            blocks = lanes.take(self._block_of)
            block = self._interval[blocks] * (ACTORS << UPPER)
            own_warp = lanes.take(self._warp_of) << UPPER
            warp = block + own_warp + self._warp_interval[lanes.threads // WARP] * ACTORS
            self._last_stamps = _Stamps(
                lanes,
                blocks * self._stride,
                block[:, None],
                warp[:, None],
                (warp + lanes.take(self._lane_of))[:, None],
            )
        return self._last_stamps

    def _check_read(self, lanes: Lanes, offsets: NDArray[np.int64], size: int) -> None:
        index = self._granules(offsets, size)
        self._refuse_in_flight(index)
        stamps = self._stamps(lanes)
        self._refuse(self._writers[index], stamps, "a read of what", "writes")
        many_lanes, many_warps = stamps.warp + MANY, stamps.block + (MANY << UPPER)
        known, mine = self._readers[index], stamps.mine
        if ((known == many_lanes) | (known == many_warps) | (known == mine)).all():
            return
        own_warp = known >> UPPER == mine >> UPPER
        after = np.where(own_warp & (known >= stamps.warp), many_lanes, mine)
        after = np.where((known >= stamps.block) & ~own_warp, many_warps, after)
        self._readers[index] = after
        self._mark_joint_readers(index, after, many_lanes, many_warps)

    def _mark_joint_readers(
        self, index: Values, stamps: Values, many_lanes: Values, many_warps: Values
    ) -> None:
        """Where threads read one granule in one instruction, only one of their stamps was kept."""
        kept = self._readers[index]
        other_lane = kept != stamps
        other_warp = kept >> UPPER != stamps >> UPPER
        for lost, joint in ((other_lane & ~other_warp, many_lanes), (other_warp, many_warps)):
            if lost.any():
                self._readers[index[lost]] = np.broadcast_to(joint, index.shape)[lost]

    def _check_write(self, lanes: Lanes, offsets: NDArray[np.int64], size: int) -> None:
        index = self._granules(offsets, size)
        self._refuse_in_flight(index)
        stamps = self._stamps(lanes)
        self._refuse(self._readers[index], stamps, "a write of what", "reads")
        self._refuse(self._writers[index], stamps, "a write of what", "writes")
        self._writers[index] = stamps.mine
        if (self._writers[index] >> UPPER != stamps.mine >> UPPER).any():
            raise PtxError("shared memory race: two warps write at one address")

    def _refuse(self, used: Values, stamps: _Stamps, what: str, does: str) -> None:
        """Uses by another warp since the block's barrier, or another lane since the warp's."""
        is_recent = used >= stamps.block
        if not is_recent.any():
            return
        own_warp = used >> UPPER == stamps.mine >> UPPER
        if (is_recent & ~own_warp).any():
            raise PtxError(f"shared memory race: {what} another warp {does}")
        if (own_warp & (used >= stamps.warp) & (used != stamps.mine)).any():
            raise PtxError(f"shared memory race: {what} another lane of the warp {does}")

    def _refuse_in_flight(self, index: NDArray[np.int64]) -> None:
        if self._copies_in_flight and self._in_flight[index].any():
            raise PtxError("shared memory race: cp.async is still writing there")
