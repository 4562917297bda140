"""Hands a file descriptor to processes of the same user, over a Unix socket.

A GPU allocation's descriptor cannot be opened through /proc as a memfd can; it must be sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import struct
import threading
import time

RECEIVE_TIMEOUT_S = 10.0
SERVE_TIMEOUT_S = 1.0
"""Shorter: a peer that says nothing must not keep the next one waiting for long."""

ACCEPT_PAUSE_S = 0.05
_PASSING_ERRORS = {
    errno.ECONNABORTED,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
}
"""Of accept: the next reader may have more luck."""

_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class FdServer:
    """Serves one descriptor until closed, to peers of the same user that know the token.

    The name is random and in the abstract namespace: nothing is left behind in any file system.
    """

    def __init__(self, fd: int, token: bytes) -> None:
        self._fd = fd
        self._token = token
        self._owner_pid = os.getpid()
        self.name = f"lora_refit-{secrets.token_hex(16)}"
        self._thread = threading.Thread(target=self._serve, name="lora_refit fd", daemon=True)
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.bind("\0" + self.name)
            self._listener.listen()
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """Stop serving and close the descriptor; a forked child only drops its copies."""
        if self._fd < 0:
            return
        if os.getpid() == self._owner_pid:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
        self._listener.close()
        os.close(self._fd)
        self._fd = -1

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno not in _PASSING_ERRORS:
                    return  # closed
                time.sleep(ACCEPT_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):
                connection.settimeout(SERVE_TIMEOUT_S)
                if _same_user(connection) and _receive(connection, len(self._token)) == self._token:
                    socket.send_fds(connection, [b"\0"], [self._fd])


def receive_fd(name: str, token: bytes) -> int:
    """The descriptor that an FdServer serves. Raises OSError if it is gone, stopped or refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(RECEIVE_TIMEOUT_S)
        connection.connect("\0" + name)
        connection.sendall(token)
        try:
            _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        except TimeoutError as error:
            raise TimeoutError(
                f"the trainer's socket {name} did not answer within {RECEIVE_TIMEOUT_S} s, so the "
                "trainer is stopped or hangs"
            ) from error
    if not fds:
        raise ConnectionRefusedError(f"the trainer's socket {name} refused to hand out its memory")
    return fds[0]


def _same_user(connection: socket.socket) -> bool:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(raw)
    return bool(uid == os.geteuid())


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return data
        data += part
    return data
