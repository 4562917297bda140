"""Forked processes of a test: they start at once, and forking is what trainers do to live arenas."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

from typing_extensions import Self

FORK = multiprocessing.get_context("fork")
LONG_S = 30.0


class Child:
    """A forked process that runs `target(connection, *args)`, ended when the block ends."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self.connection, other = FORK.Pipe()

        def run() -> None:
            self.connection.close()
            target(other, *args)

        self.process: BaseProcess = FORK.Process(target=run)
        self.process.start()
        other.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def receive(self) -> Any:
        assert self.connection.poll(LONG_S), "the child says nothing"
        return self.connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.connection.close()
