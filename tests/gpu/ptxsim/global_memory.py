"""Global memory: the caller's buffers at their own addresses, with bounds and ownership checked."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import PtxError
from .lanes import WARP, Lanes, Values

Offsets = NDArray[np.int64]

GAP = 64
"""Bytes between buffers in the arena, so that a rounded-up access stays inside it."""
UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}
"""How an access of so many bytes is moved; c16 is the one plain dtype of 16 bytes."""
ATOMIC = -1


class GlobalMemory:
    """A copy of all buffers in one arena, at equal alignment, so that one gather serves all lanes.

    Every granule remembers the thread that wrote it. It is an error if another thread writes a
    different value there, if a thread of another block reads it, or if `ld.global.nc` does. (A read
    that happens to come before the other block's store is not seen.)
    """

    def __init__(self, buffers: list[NDArray[Any]], granule: int) -> None:
        for buffer in buffers:
            if not buffer.flags.c_contiguous:
                raise PtxError("a buffer is not contiguous")
        views = [buffer.reshape(-1).view(np.uint8) for buffer in buffers if buffer.nbytes]
        self._views = sorted(views, key=lambda view: view.ctypes.data)
        self._bases = np.array([view.ctypes.data for view in self._views], np.uint64)
        self._sizes = np.array([view.size for view in self._views], np.uint64)
        if (self._bases[1:] < self._bases[:-1] + self._sizes[:-1]).any():
            raise PtxError("buffers overlap")
        self._starts, arena_size = self._place()
        arena = np.zeros(arena_size // 16, "c16").view(np.uint8)
        for view, start in zip(self._views, self._starts, strict=True):
            arena[start : start + view.size] = view
        self._bytes = arena
        self._units = {size: arena.view(dtype) for size, dtype in UNITS.items()}
        self._granule = granule
        self._writers = np.zeros(arena_size // granule, np.int32)
        self._is_written = np.zeros(len(views), bool)

    def write_back(self) -> None:
        """Brings what the launch wrote into the caller's buffers."""
        for index in np.flatnonzero(self._is_written):
            view, start = self._views[index], self._starts[index]
            view[:] = self._bytes[start : start + view.size]

    def load(
        self, lanes: Lanes, block_of: Values, addresses: Values, size: int, read_only: bool
    ) -> Values:
        """Bytes, `uint8[lane, size]`. `read_only` is the promise of `ld.global.nc`."""
        offsets, buffers = self._locate(addresses, size, size)
        if self._is_written[buffers].any():
            self._check_readers(lanes, block_of, offsets, size, read_only)
        return self._units[size][offsets // size].view(np.uint8).reshape(len(lanes), size)

    def load_prefix(self, addresses: Values, size: int, valid: Values) -> Values:
        """As `load`, of which each lane reads only its first `valid` bytes; the others are zero."""
        data = np.zeros((len(addresses), size), np.uint8)
        some = valid > 0
        if some.any():
            offsets, _ = self._locate(addresses[some], size, valid[some].astype(np.uint64))
            columns = np.arange(size)
            inside = columns < valid[some][:, None]
            data[some] = np.where(inside, self._bytes[offsets[:, None] + columns], 0)
        return data

    def store(self, lanes: Lanes, addresses: Values, data: Values) -> None:
        size = data.shape[1]
        offsets, buffers = self._locate(addresses, size, size)
        self._mark_written(buffers)
        self._claim(lanes, offsets, data)
        values = data.view(UNITS[size]).reshape(-1)
        unit = self._units[size]
        unit[offsets // size] = values
        kept = unit[offsets // size]
        if not np.array_equal(kept.view(np.uint8), values.view(np.uint8)):
            raise PtxError("global memory race: two threads store different values at one address")

    def add(self, lanes: Lanes, addresses: Values, values: Values, old_wanted: bool) -> Values:
        """Atomic additions. Returns the values found there, if they are wanted."""
        size = values.dtype.itemsize
        offsets, buffers = self._locate(addresses, size, size)
        self._mark_written(buffers)
        writers = self._writers.reshape(-1, size // self._granule)
        found = writers[offsets // size]
        if (found > 0).any():
            raise PtxError("global memory race: an atomic where a thread stored plainly")
        writers[offsets // size] = ATOMIC
        cells = self._bytes.view(values.dtype)
        index = offsets // size
        if not old_wanted:
            np.add.at(cells, index, values)
            return values
        old = np.empty_like(values)
        for lane, cell in enumerate(index):
            old[lane] = cells[cell]
            cells[cell] += values[lane]
        return old

    def _place(self) -> tuple[Offsets, int]:
        starts, end = np.zeros(len(self._views), np.int64), GAP
        for index, view in enumerate(self._views):
            starts[index] = -(-end // 16) * 16 + view.ctypes.data % 16
            end = int(starts[index]) + view.size + GAP
        return starts, -(-end // 16) * 16

    def _locate(
        self, addresses: Values, align: int, size: int | Values
    ) -> tuple[Offsets, NDArray[np.int64]]:
        """Places in the arena, and the buffer of each lane. Checks alignment and bounds."""
        if (addresses & np.uint64(align - 1)).any():
            bad = int(addresses[(addresses & np.uint64(align - 1)) != 0][0])
            raise PtxError(f"misaligned global access of {align} bytes at {bad:#x}")
        if not len(self._bases):
            raise PtxError(f"wild global access at {int(addresses[0]):#x}: there is no buffer")
        buffers = np.repeat(self._find(addresses[::WARP]), WARP)[: len(addresses)]
        if not self._inside(addresses, size, buffers).all():
            buffers = self._find(addresses)
            inside = self._inside(addresses, size, buffers)
            if not inside.all():
                self._report_outside(addresses[~inside][0], buffers[~inside][0])
        offsets = (addresses - self._bases[buffers]).astype(np.int64) + self._starts[buffers]
        return offsets, buffers

    def _find(self, addresses: Values) -> NDArray[np.int64]:
        """The last buffer that starts at or before each address, or the first."""
        return np.maximum(np.searchsorted(self._bases, addresses, "right") - 1, 0)

    def _inside(self, addresses: Values, size: int | Values, buffers: NDArray[np.int64]) -> Values:
        offsets = addresses - self._bases[buffers]
        sizes = self._sizes[buffers]
        return (offsets < sizes) & (offsets + np.asarray(size, np.uint64) <= sizes)

    def _report_outside(self, address: np.uint64, buffer: np.int64) -> None:
        offset = int(address) - int(self._bases[buffer])
        raise PtxError(
            f"out of bounds global access at {int(address):#x}: byte {offset} of a buffer of "
            f"{int(self._sizes[buffer])} bytes"
        )

    def _mark_written(self, buffers: NDArray[np.int64]) -> None:
        if self._is_written[buffers].all():
            return
        for index in np.unique(buffers):
            if not self._views[index].flags.writeable:
                raise PtxError("a store into a read-only buffer")
            self._is_written[index] = True

    def _check_readers(
        self, lanes: Lanes, block_of: Values, offsets: Offsets, size: int, read_only: bool
    ) -> None:
        granules = max(1, size // self._granule)
        writers = self._writers.reshape(-1, granules)[offsets // self._granule // granules]
        if read_only and writers.any():
            raise PtxError("ld.global.nc of memory that this launch wrote")
        if (writers == ATOMIC).any():
            raise PtxError("global memory race: a plain load of what atomics add to")
        by_thread = writers > 0
        writer_blocks = block_of[np.where(by_thread, writers - 1, 0)]
        if (by_thread & (writer_blocks != block_of[lanes.threads][:, None])).any():
            raise PtxError("global memory race: a thread loads what another block stored")

    def _claim(self, lanes: Lanes, offsets: Offsets, data: Values) -> None:
        size = data.shape[1]
        rows = self._writers.reshape(-1, size // self._granule)
        index = offsets // size
        found = rows[index]
        mine = (lanes.threads + 1).astype(np.int32)[:, None]
        foreign = (found != 0) & (found != mine)
        if foreign.any():
            before = self._units[size][index].view(np.uint8).reshape(len(index), -1, self._granule)
            changes = (before != data.reshape(before.shape)).any(axis=2)
            if (foreign & changes).any():
                raise PtxError("global memory race: two threads store different values")
        rows[index] = np.broadcast_to(mine, found.shape)
