"""Messages between trainer ranks, the driver and engine workers: msgspec structs, never pickle."""

from __future__ import annotations

import msgspec


class HostStorage(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """The data halves follow the control page in the arena's shared memory file."""


class IpcStorage(msgspec.Struct, frozen=True, kw_only=True, tag="ipc"):
    """The data halves are GPU memory behind a CUDA IPC handle."""

    device: str
    """UUID of the GPU: its number differs between processes."""
    handle: bytes
    nbytes: int


class VmmStorage(msgspec.Struct, frozen=True, kw_only=True, tag="vmm"):
    """The data halves are GPU memory behind a file descriptor, which a Unix socket hands out."""

    device: str
    socket: str
    """Name in the abstract namespace."""
    nbytes: int


Storage = HostStorage | IpcStorage | VmmStorage


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How a reader on the same node finds one trainer rank's arena."""

    rank: int
    pid: int
    fd: int
    """Of the shared memory file, in the process `pid`."""
    token: bytes
    """16 random bytes that the arena's header repeats, so that a reused pid is noticed."""
    total_bytes: int
    """Of the shared memory file."""
    entry_bytes: tuple[int, ...]
    storage: Storage = HostStorage()
