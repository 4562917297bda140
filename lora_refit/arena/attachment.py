"""An arena or bucket ring in a process that reads it: opened, checked, with a place among readers."""

from __future__ import annotations

import contextlib
import os
import weakref

import torch

from lora_refit.arena import device_region
from lora_refit.arena.control import Identity
from lora_refit.arena.layout import READER_CAPACITY, ArenaLayout
from lora_refit.arena.liveness import WRITER_BYTE
from lora_refit.arena.memory import MappedArena, open_memory, transport_errors
from lora_refit.arena.region import HostRegion, Region
from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.messages import ArenaHandle, HostStorage


class AttachedArena:
    """What a handle leads to, mapped with read-only data halves. Detached when dropped.

    Args:
        kind: "arena" or "bucket ring", for messages.

    Raises:
        TransportUnavailable: it cannot be opened from here, or has 64 readers already.
        LayoutMismatch: it has another layout, or was packed for another spec.
    """

    def __init__(
        self,
        kind: str,
        handle: ArenaHandle,
        layout: ArenaLayout,
        layout_digest: bytes,
        device: torch.device,
    ) -> None:
        self.trainer = f"trainer rank {handle.rank} (pid {handle.pid})"
        self.name = f"{kind} of {self.trainer}"
        needed = layout.file_bytes(handle.storage)
        if needed != handle.total_bytes:
            raise LayoutMismatch(
                f"{self.name}: the handle says {handle.total_bytes} bytes, its entries need "
                f"{needed}; install the same lora_refit on both sides"
            )
        self.mapped = self._map(handle, layout, device)
        with contextlib.ExitStack() as undo:
            undo.callback(self.mapped.close)
            identity = Identity.of(layout, handle.token, layout_digest)
            self.mapped.page.identity().require(identity, self.name)
            self.index = self._take_index()
            self._finalizer = weakref.finalize(self, _detach, self.mapped, self.index)
            undo.pop_all()

    def writer_is_alive(self) -> bool:
        return self.mapped.locks.is_locked(WRITER_BYTE)

    def close(self) -> None:
        """Release, detach and unmap; in a forked child only unmap. May be called again."""
        self._finalizer()

    def _map(self, handle: ArenaHandle, layout: ArenaLayout, device: torch.device) -> MappedArena:
        remedy = (
            'the trainer must run as the same user in the same pid namespace; use exchange="bytes" '
            "where it does not, and attach again where it was restarted"
        )
        with transport_errors(self.name, remedy), contextlib.ExitStack() as undo:
            memory_fd = open_memory(handle)
            try:
                region = _open_region(handle, memory_fd, layout, device, self.name)
                undo.callback(region.close)
                mapped = MappedArena(memory_fd, layout, region)
            finally:
                os.close(memory_fd)
            undo.pop_all()
            return mapped

    def _take_index(self) -> int:
        page = self.mapped.page
        for index in range(READER_CAPACITY):
            if self.mapped.locks.try_lock(index):
                page.vacate(index)
                page.set_reader_pid(index, os.getpid())
                return index
        pids = sorted({page.reader_pid(index) for index in range(READER_CAPACITY)})
        raise TransportUnavailable(
            f"{self.name}: all {READER_CAPACITY} reader places are taken, by processes {pids}; "
            "close readers that are no longer used"
        )


def _detach(mapped: MappedArena, index: int) -> None:
    if mapped.owned and not mapped.closed:
        mapped.page.vacate(index)
    mapped.close()


def _open_region(
    handle: ArenaHandle, memory_fd: int, layout: ArenaLayout, device: torch.device, arena: str
) -> Region:
    if device.type != "cpu":
        return device_region.open_on_device(
            handle.storage, memory_fd, layout, device, handle.token, arena
        )
    if not isinstance(handle.storage, HostStorage):
        raise TransportUnavailable(
            f"{arena}: lies in the memory of {handle.storage.device}, but the engine's slots are "
            'on the CPU; build the Publisher with memory="host"'
        )
    return HostRegion(memory_fd, layout, writable=False)
