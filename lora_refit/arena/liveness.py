"""Who is alive: byte locks that the kernel drops when their holder's process ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import weakref

WRITER_BYTE = 1000
"""The writer's byte; reader `i` locks byte `i`."""

_FLOCK = struct.Struct("@hhqqi0q")
"""struct flock: type, whence, start, length, pid."""


class ByteLocks:
    """Open-file-description locks of one participant, on an open file description of its own.

    Such locks belong to the open file description, which a forked child shares: the child would
    keep its dead parent looking alive. So children drop the descriptor right after the fork.
    """

    def __init__(self, memory_fd: int) -> None:
        """Raises OSError when the memory cannot be opened a second time."""
        self._fd = os.open(f"/proc/self/fd/{memory_fd}", os.O_RDWR | os.O_CLOEXEC)
        self._owner_pid = os.getpid()
        _open_locks.add(self)

    def try_lock(self, byte: int) -> bool:
        try:
            self._control(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, byte, 1)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def is_locked(self, byte: int) -> bool:
        """True when another participant holds the byte, so it is alive (or stopped, not dead)."""
        answer = self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte, 1)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Unlock and close; in a forked child only close."""
        if self._fd < 0:
            return
        if os.getpid() == self._owner_pid:
            with contextlib.suppress(OSError):
                self._control(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, 0, 0)
        os.close(self._fd)
        self._fd = -1

    def _control(self, command: int, kind: int, start: int, length: int) -> bytes:
        request = _FLOCK.pack(kind, os.SEEK_SET, start, length, 0)
        return fcntl.fcntl(self._fd, command, request)


_open_locks: weakref.WeakSet[ByteLocks] = weakref.WeakSet()


def _drop_inherited_locks() -> None:
    for locks in list(_open_locks):
        locks.close()


os.register_at_fork(after_in_child=_drop_inherited_locks)
