"""The memory itself: one sealed memfd, created by the writer and opened through its process."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from lora_refit.arena.capacity import available_bytes
from lora_refit.arena.control import ControlPage
from lora_refit.arena.layout import HALVES, ArenaLayout
from lora_refit.arena.liveness import ByteLocks
from lora_refit.arena.region import Region
from lora_refit.errors import TransportUnavailable
from lora_refit.messages import ArenaHandle

_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""With these nobody can shrink the file under a mapping, which would be SIGBUS for the others."""


@contextlib.contextmanager
def transport_errors(arena: str, remedy: str) -> Iterator[None]:
    """Turn what the operating system refuses into an error that names the arena and a remedy."""
    try:
        yield
    except OSError as error:
        raise TransportUnavailable(f"{arena}: {error}; {remedy}") from error


def create_memory(total_bytes: int, arena: str) -> int:
    """Create, fill and seal the arena's memory; returns its file descriptor.

    All pages are allocated here, so that a full machine is an error now and not a SIGBUS later.
    """
    available = available_bytes()
    if total_bytes > available:
        raise TransportUnavailable(
            f"{arena}: {total_bytes} bytes of shared memory are needed, {available} are available; "
            "free memory or raise the container's limit"
        )
    fd = os.memfd_create("lora_refit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, stat.S_IRUSR | stat.S_IWUSR)
        os.posix_fallocate(fd, 0, total_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_memory(handle: ArenaHandle) -> int:
    """Open the arena behind the handle; returns a new file descriptor, or raises OSError.

    The descriptor number may have been reused for any file, so opening must not block or take a
    terminal, and nothing is mapped before size and seals have been checked.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        _require_sealed_file(fd, handle.total_bytes, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_sealed_file(fd: int, total_bytes: int, path: str) -> None:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EBADF, "not a shared memory file", path)
    if status.st_size != total_bytes:
        reason = f"{status.st_size} bytes long, the handle says {total_bytes}"
        raise OSError(errno.EBADF, reason, path)
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise OSError(errno.EBADF, "not a memfd", path) from error
    if seals & _SIZE_SEALS != _SIZE_SEALS:
        raise OSError(errno.EBADF, "not sealed against a change of its size", path)


class MappedArena:
    """One process's mappings of an arena, and its locks.

    Args:
        memory_fd: stays the caller's.
        region: the data halves; closed with the arena, and by the caller if this raises.

    Raises:
        OSError: no address space, file descriptors or /proc left.
    """

    def __init__(self, memory_fd: int, layout: ArenaLayout, region: Region) -> None:
        self.owner_pid = os.getpid()
        self._region = region
        with contextlib.ExitStack() as undo:
            self.locks = ByteLocks(memory_fd)
            undo.callback(self.locks.close)
            self.control = mmap.mmap(memory_fd, layout.control_bytes)
            undo.pop_all()
        self.page = ControlPage(self.control, layout)
        self._entry_addresses = _entry_addresses(region.address, layout)

    @property
    def transport(self) -> str:
        """How the bytes travel, for reports."""
        return self._region.transport

    def entry_addresses(self, half: int) -> npt.NDArray[np.uint64]:
        """Address of each entry in this process, uint64 [entries]; read-only array."""
        return self._entry_addresses[half]

    @property
    def owned(self) -> bool:
        """False in a forked child, where words and locks still belong to the parent."""
        return os.getpid() == self.owner_pid

    @property
    def closed(self) -> bool:
        return self.control.closed

    def close(self) -> None:
        """Unmap, and unlock unless in a forked child; may be called again."""
        self._region.close()
        self.control.close()
        self.locks.close()

    def require_usable(self, arena: str) -> None:
        """Raises TransportUnavailable when closed, or when used in a forked child."""
        if self.closed:
            raise TransportUnavailable(f"{arena} is closed in process {os.getpid()}; open it again")
        if not self.owned:
            raise TransportUnavailable(
                f"{arena} was opened by process {self.owner_pid} and is used in its forked child "
                f"{os.getpid()}; open it in the process that uses it"
            )


def _entry_addresses(base: int, layout: ArenaLayout) -> tuple[npt.NDArray[np.uint64], ...]:
    offsets = np.array(layout.offsets, dtype=np.uint64)
    halves = tuple(offsets + np.uint64(base + half * layout.half_bytes) for half in range(HALVES))
    for addresses in halves:
        addresses.flags.writeable = False
    return halves
