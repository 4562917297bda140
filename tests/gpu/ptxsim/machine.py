"""The state of one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .async_copies import AsyncCopies
from .errors import PtxError
from .global_memory import GlobalMemory
from .lanes import WARP, Lanes, Values
from .program import Program
from .registers import RegisterFile
from .schedule import Schedule
from .shared_memory import SharedMemory


class Machine:
    def __init__(
        self,
        program: Program,
        blocks: int,
        block_threads: int,
        parameters: bytes,
        buffers: list[NDArray[Any]],
        shared_bytes: int,
    ) -> None:
        launch_threads = blocks * block_threads
        threads = np.arange(launch_threads)
        self.block_of = threads // block_threads
        self._special = {
            "%tid.x": (threads % block_threads).astype(np.uint32),
            "%ntid.x": np.uint32(block_threads),
            "%ctaid.x": self.block_of.astype(np.uint32),
            "%nctaid.x": np.uint32(blocks),
            "%laneid": (threads % WARP).astype(np.uint32),
        }
        self._parameters = np.frombuffer(parameters, np.uint8)
        self.registers = RegisterFile(
            program.registers.names, program.registers.widths, launch_threads
        )
        self.memory = GlobalMemory(buffers, program.global_granule)
        self.shared = SharedMemory(blocks, block_threads, shared_bytes, program.shared_granule)
        self.copies = AsyncCopies(launch_threads, self.memory, self.shared)
        self.schedule = Schedule(blocks, block_threads)

    def special(self, name: str, lanes: Lanes) -> Values:
        value = self._special[name]
        return lanes.take(value) if np.ndim(value) else value

    def load_parameters(self, addresses: Values, size: int) -> Values:
        """Bytes, `uint8[lane, size]`."""
        if (addresses % np.uint64(size)).any():
            raise PtxError(f"misaligned parameter access of {size} bytes")
        if (addresses + np.uint64(size) > np.uint64(len(self._parameters))).any():
            raise PtxError("out of bounds parameter access")
        return self._parameters[addresses.astype(np.int64)[:, None] + np.arange(size)]
