"""Data halves that a GPU packs or reads: CUDA IPC, a VMM file descriptor, or pinned host memory.

The memory is allocated here and not by torch, so expandable segments, memory pools and sleep modes
of the caller's allocator do not matter.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lora_refit import _C
from lora_refit.arena.fd_server import FdServer, receive_fd
from lora_refit.arena.layout import HALVES, ArenaLayout
from lora_refit.arena.region import HostRegion, Region
from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.kernels.cuda import missing, ordinal
from lora_refit.messages import HostStorage, IpcStorage, Storage, VmmStorage

IPC_HANDLE_BYTES = 64

_log = logging.getLogger(__name__)


_abandoned: list[Callable[[], None]] = []
"""Keeps abandoned memory from being collected."""


@dataclass
class DeviceRegion:
    """GPU memory, mapped into this process."""

    address: int
    transport: str
    _close: Callable[[], None]

    def close(self) -> None:
        self._close()

    def abandon(self) -> None:
        """Leave the memory mapped until the process ends: somebody still reads it."""
        _abandoned.append(self._close)
        self._close = lambda: None


def create_on_device(
    layout: ArenaLayout, device: torch.device, memory: str, token: bytes, arena: str
) -> tuple[Region, Storage] | None:
    """GPU memory that other processes can map, or None if only host memory can be shared.

    memory: "ipc", "vmm", or "auto" for the first of them that the driver can share.
    Raises TransportUnavailable if the GPU has no room, or cannot share what was asked for.
    """
    makers = {"ipc": _create_ipc, "vmm": _create_vmm}
    nbytes = HALVES * layout.half_bytes
    for kind in makers if memory == "auto" else (memory,):
        try:
            return makers[kind](nbytes, require_gpu(device, arena), token)
        except _C.cuda.CudaError as error:
            if memory != "auto" or "OUT_OF_MEMORY" in str(error):
                raise TransportUnavailable(f"{arena}: {error}") from error
            _log.warning("%s: no %s memory, trying the next kind: %s", arena, kind, error)
    return None


def open_on_device(
    storage: Storage,
    memory_fd: int,
    layout: ArenaLayout,
    device: torch.device,
    token: bytes,
    arena: str,
) -> Region:
    """Map a trainer's data halves for kernels on `device`.

    Raises TransportUnavailable, with a remedy, if the device cannot read them.
    """
    index = require_gpu(device, arena)
    try:
        if isinstance(storage, HostStorage):
            return pin_host(memory_fd, layout, device)
        _require_reachable(storage.device, index, arena)
        _require_whole(storage, layout, arena)
        if isinstance(storage, IpcStorage):
            return _open_ipc(storage, index)
        fd = receive_fd(storage.socket, token)
        try:
            mapping = _C.cuda.open_fd(index, fd, storage.nbytes)
        finally:
            os.close(fd)
        return DeviceRegion(mapping.address, "CUDA VMM file descriptor", mapping.close)
    except _C.cuda.CudaError as error:
        raise TransportUnavailable(
            f'{arena}: {error}; build the Publisher with memory="host" where GPU memory cannot be '
            "shared"
        ) from error


def pin_host(memory_fd: int, layout: ArenaLayout, device: torch.device) -> Region:
    """The shared memory file's data halves, pinned and addressed as the GPU sees them.

    Raises CudaError if they cannot be pinned, OSError if they cannot be mapped.
    """
    with contextlib.ExitStack() as undo:
        host = HostRegion(memory_fd, layout, writable=True)
        undo.callback(host.close)
        pinned = _C.cuda.register_host(ordinal(device), host.address, HALVES * layout.half_bytes)
        undo.callback(pinned.close)
        close = undo.pop_all().close
    return DeviceRegion(pinned.address, "pinned host memory (memfd)", close)


def require_gpu(device: torch.device, arena: str) -> int:
    """The driver's number of the device. Raises TransportUnavailable if CUDA cannot be used."""
    reason = missing()
    if reason:
        raise TransportUnavailable(f"{arena}: device {device}: {reason}")
    return ordinal(device)


class _Shared:
    """GPU memory that this process exports, and may use itself under the same handle: CUDA does not
    open an IPC handle in the process that made it. Freed when the last user has closed."""

    def __init__(self, memory: _C.cuda.DeviceMemory) -> None:
        self._memory = memory
        self._users = 0

    def region(self) -> DeviceRegion:
        self._users += 1
        close = contextlib.ExitStack()  # a second close leaves nothing once more
        close.callback(self._leave)
        return DeviceRegion(self._memory.address, "CUDA IPC", close.close)

    def _leave(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._memory.close()


_exported: weakref.WeakValueDictionary[tuple[int, bytes], _Shared] = weakref.WeakValueDictionary()
"""By process and handle: what a forked child inherits is not its own."""


def _create_ipc(nbytes: int, device: int, token: bytes) -> tuple[Region, Storage]:
    memory = _C.cuda.DeviceMemory(device, nbytes)
    try:
        handle = memory.ipc_handle()
    except BaseException:
        memory.close()
        raise
    shared = _exported[os.getpid(), handle] = _Shared(memory)
    return shared.region(), IpcStorage(device=_uuid(device), handle=handle, nbytes=memory.bytes)


def _open_ipc(storage: IpcStorage, device: int) -> Region:
    own = _exported.get((os.getpid(), storage.handle))
    if own is not None:
        owner = _C.cuda.ordinal_of(storage.device)
        if owner is not None and owner != device:
            _C.cuda.enable_peer_access(device, owner)  # an opened handle does this by itself
        return own.region()
    mapping = _C.cuda.open_ipc(device, storage.handle)
    return DeviceRegion(mapping.address, "CUDA IPC", mapping.close)


def _create_vmm(nbytes: int, device: int, token: bytes) -> tuple[Region, Storage]:
    with contextlib.ExitStack() as undo:
        memory = _C.cuda.SharedDeviceMemory(device, nbytes)
        undo.callback(memory.close)
        fd = memory.export_fd()
        with contextlib.ExitStack() as unless_served:
            unless_served.callback(os.close, fd)
            os.set_inheritable(fd, False)
            server = FdServer(fd, token)
            unless_served.pop_all()
        undo.callback(server.close)
        storage = VmmStorage(device=_uuid(device), socket=server.name, nbytes=memory.bytes)
        close = undo.pop_all().close
    return DeviceRegion(memory.address, "CUDA VMM file descriptor", close), storage


def _require_whole(storage: IpcStorage | VmmStorage, layout: ArenaLayout, arena: str) -> None:
    """What a handle says is not believed: a kernel that reads too far costs this process its GPU."""
    needed = HALVES * layout.half_bytes
    if not needed <= storage.nbytes < 2**63:
        raise LayoutMismatch(
            f"{arena}: the handle says {storage.nbytes} bytes of GPU memory, its halves need "
            f"{needed}; the spec was altered, or comes from another version of lora_refit"
        )
    if isinstance(storage, IpcStorage) and len(storage.handle) != IPC_HANDLE_BYTES:
        raise LayoutMismatch(
            f"{arena}: the CUDA IPC handle has {len(storage.handle)} bytes, not "
            f"{IPC_HANDLE_BYTES}; the spec was altered"
        )


def _require_reachable(uuid: str, reader: int, arena: str) -> None:
    owner = _C.cuda.ordinal_of(uuid)
    if owner is None:
        visible = ", ".join(item.uuid for item in _C.cuda.devices())
        raise TransportUnavailable(
            f"{arena}: lies on {uuid}, this process sees {visible}; add it to "
            'CUDA_VISIBLE_DEVICES, or build the Publisher with memory="host"'
        )
    if owner != reader and not _C.cuda.can_access_peer(reader, owner):
        raise TransportUnavailable(
            f"{arena}: lies on {uuid}, which {_uuid(reader)} cannot access as a peer; place "
            'trainer and worker on one GPU, or build the Publisher with memory="host"'
        )


def _uuid(device: int) -> str:
    return str(_C.cuda.devices()[device].uuid)
