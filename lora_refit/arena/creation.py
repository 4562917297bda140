"""The memory of an arena in the process that creates it, and how it is taken back from readers."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import weakref

import torch

from lora_refit.arena import device_region
from lora_refit.arena.control import Identity
from lora_refit.arena.device_region import DeviceRegion
from lora_refit.arena.layout import (
    HALVES,
    LAYOUT_DIGEST_BYTES,
    READER_CAPACITY,
    TOKEN_BYTES,
    ArenaLayout,
)
from lora_refit.arena.liveness import WRITER_BYTE
from lora_refit.arena.memory import MappedArena, create_memory, transport_errors
from lora_refit.arena.region import HostRegion, Region
from lora_refit.arena.waiting import attempts
from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.messages import ArenaHandle, HostStorage, IpcStorage, Storage

MEMORY_KINDS = ("auto", "ipc", "vmm", "host")
TAKE_BACK_TIMEOUT_S = 5.0

_log = logging.getLogger(__name__)


class CreatedArena:
    """A new arena or bucket ring, mapped and locked as its writer's. Closed when dropped.

    Args:
        kind: "arena" or "bucket ring", for messages.
        memory: one of `MEMORY_KINDS`, see `ArenaWriter`.

    Raises:
        TransportUnavailable: the memory cannot be had.
        LayoutMismatch: the layout digest does not have 32 bytes.
    """

    handle: ArenaHandle

    def __init__(
        self,
        kind: str,
        layout: ArenaLayout,
        rank: int,
        layout_digest: bytes,
        device: torch.device,
        memory: str,
    ) -> None:
        if len(layout_digest) != LAYOUT_DIGEST_BYTES:
            raise LayoutMismatch(
                f"trainer rank {rank}: a layout digest has {LAYOUT_DIGEST_BYTES} bytes, "
                f"not {len(layout_digest)}"
            )
        self.name = f"{kind} of trainer rank {rank}"
        token = secrets.token_bytes(TOKEN_BYTES)
        with (
            transport_errors(self.name, "raise the limit that this process ran into"),
            contextlib.ExitStack() as undo,
        ):
            memory_fd, region, storage = _create(layout, device, memory, token, self.name, undo)
            self.mapped = MappedArena(memory_fd, layout, region)
            undo.callback(self.mapped.close)
            if isinstance(region, DeviceRegion) and isinstance(storage, IpcStorage):
                undo.callback(_take_back, self.mapped, region, self.name)
            self.mapped.page.write_identity(Identity.of(layout, token, layout_digest))
            self.mapped.locks.try_lock(WRITER_BYTE)
            self._finalizer = weakref.finalize(self, undo.pop_all().close)
        self.handle = ArenaHandle(
            rank=rank,
            pid=os.getpid(),
            fd=memory_fd,
            token=token,
            total_bytes=layout.file_bytes(storage),
            entry_bytes=layout.entry_bytes,
            storage=storage,
        )

    def live_holders(self, half: int) -> list[int]:
        """Readers that pin this half, which must be hidden; dead readers' pins are cleared."""
        return _live_holders(self.mapped, half)

    def close(self) -> None:
        """Take the memory back from readers, unmap and unlock. May be called again."""
        self._finalizer()


def _live_holders(mapped: MappedArena, half: int) -> list[int]:
    holders = []
    for reader in range(READER_CAPACITY):
        pinned = mapped.page.pin(reader)
        if not pinned or pinned % HALVES != half:
            continue
        if mapped.locks.is_locked(reader):
            holders.append(reader)
        else:
            mapped.page.clear_pin(reader, pinned)
    return holders


def _take_back(mapped: MappedArena, region: DeviceRegion, arena: str) -> None:
    """Before the memory behind an IPC handle is freed: CUDA does not say what a reader finds then."""
    if mapped.closed or not mapped.owned:
        return
    for half in range(HALVES):
        mapped.page.hide(half)
    for _ in attempts(TAKE_BACK_TIMEOUT_S):
        if not any(_live_holders(mapped, half) for half in range(HALVES)):
            return
    region.abandon()
    _log.warning("%s: a reader keeps its pin, so the memory stays until this process ends", arena)


def _create(
    layout: ArenaLayout,
    device: torch.device,
    memory: str,
    token: bytes,
    arena: str,
    undo: contextlib.ExitStack,
) -> tuple[int, Region, Storage]:
    """The shared memory file and the data halves; `undo` closes them."""
    if memory not in MEMORY_KINDS:
        raise TransportUnavailable(f"memory={memory!r}: use one of {', '.join(MEMORY_KINDS)}")
    if device.type == "cpu" and memory in ("ipc", "vmm"):
        raise TransportUnavailable(
            f'{arena}: memory="{memory}" is GPU memory, but the adapter lies on the CPU; use "auto"'
        )
    shared = None
    if device.type != "cpu" and memory != "host":
        shared = device_region.create_on_device(layout, device, memory, token, arena)
    if shared is not None:
        region, storage = shared
        undo.callback(region.close)
        memory_fd = create_memory(layout.file_bytes(storage), arena)
        undo.callback(os.close, memory_fd)
        return memory_fd, region, storage
    memory_fd = create_memory(layout.total_bytes, arena)
    undo.callback(os.close, memory_fd)
    region = _host_region(memory_fd, layout, device, arena)
    undo.callback(region.close)
    return memory_fd, region, HostStorage()


def _host_region(memory_fd: int, layout: ArenaLayout, device: torch.device, arena: str) -> Region:
    if device.type == "cpu":
        return HostRegion(memory_fd, layout, writable=True)
    device_region.require_gpu(device, arena)
    try:
        return device_region.pin_host(memory_fd, layout, device)
    except RuntimeError as error:
        raise TransportUnavailable(f"{arena}: {error}") from error
