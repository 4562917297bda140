"""File descriptors of GPU memory, handed to other processes over a Unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from lora_refit.arena.fd_server import FdServer, receive_fd

TOKEN = bytes(range(16))


@pytest.fixture
def served() -> Iterator[tuple[FdServer, int]]:
    """A server of a memfd, and the file's inode."""
    fd = os.memfd_create("served")
    server = FdServer(fd, TOKEN)
    yield server, os.fstat(fd).st_ino
    server.close()


def test_every_reader_gets_the_same_file(served: tuple[FdServer, int]) -> None:
    server, inode = served
    for _ in range(3):
        fd = receive_fd(server.name, TOKEN)
        assert os.fstat(fd).st_ino == inode
        os.close(fd)


def test_a_wrong_token_gets_nothing_and_stops_nobody(served: tuple[FdServer, int]) -> None:
    server, inode = served
    with pytest.raises(ConnectionRefusedError, match="refused"):
        receive_fd(server.name, bytes(16))
    with socket.socket(socket.AF_UNIX) as mute:
        mute.connect("\0" + server.name)  # says nothing and leaves
    fd = receive_fd(server.name, TOKEN)
    assert os.fstat(fd).st_ino == inode
    os.close(fd)


def test_another_process_receives_it(served: tuple[FdServer, int]) -> None:
    server, inode = served
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(os.fstat(receive_fd(server.name, TOKEN)).st_ino != inode)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_closed_servers_are_gone(served: tuple[FdServer, int]) -> None:
    server, _ = served
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        receive_fd(server.name, TOKEN)
