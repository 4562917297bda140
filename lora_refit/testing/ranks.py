"""Trainer ranks: worker processes that share a gloo process group and run functions on command."""

from __future__ import annotations

import contextlib
import datetime
import io
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from typing_extensions import Self

_GRACE_AFTER_ERROR_S = 5.0
"""How long the other ranks may still answer once one has failed; they may hang in a collective."""


class RankError(RuntimeError):
    """A rank raised, died or did not answer in time. `rank` says which, the message why."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"trainer rank {rank}: {reason}")
        self.rank = rank


_server = forkserver.ForkServer()
_server.set_forkserver_preload(["lora_refit.testing.megatron_preload"])


class TrainerRanks:
    """A process group of `world_size` local worker processes.

    ```python
    def build(state, config):  # importable, module level; `state` is this rank's own dict
        state["policy"] = build_policy(config)
        return torch.distributed.get_rank()


    with TrainerRanks(2) as ranks:
        assert ranks.call(build, config) == [0, 1]
    ```

    The workers are forked from one server process that has imported Megatron, so each starts within
    tenths of a second. They end with the context, and also when this process dies. Scripts that
    use this need the `if __name__ == "__main__"` guard of `multiprocessing`.
    Arguments and results are pickled, tensors by value; the pipes connect only this process and the
    workers that it started.
    """

    def __init__(self, world_size: int, timeout_s: float = 600.0, threads: int = 1) -> None:
        """`timeout_s` bounds each call; `threads` is the number of torch threads of a worker."""
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._threads = threads
        self._connections: list[Connection] = []
        self._unanswered: dict[int, str] = {}

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="lora-refit-ranks-")
        rendezvous = f"file://{self._folder.name}/rendezvous"
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, rank, self.world_size, rendezvous, self._threads),
                name=f"trainer-rank-{rank}",
            )
            _start_warm(process)
            theirs.close()
            self.processes.append(process)
            self._connections.append(ours)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self.processes:
            process.join(timeout=0.0 if kind or self._unanswered else 30.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `function(state, *arguments)` on every rank; return the results in rank order.

        Raises:
            RankError: naming the first rank that raised, died, or stayed silent past the timeout.
        """
        return self.collect(self.submit(function, *arguments))

    def call_on(self, rank: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run `function(state, *arguments)` on one rank only and return its result."""
        return self.collect(self.submit(function, *arguments, ranks=[rank]))[0]

    def submit(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: Sequence[int] | None = None,
    ) -> list[int]:
        """Start a call without waiting; hand the returned ranks to `collect`."""
        chosen = list(range(self.world_size)) if ranks is None else list(ranks)
        for rank in chosen:
            if rank in self._unanswered and not self._discard_late_answer(rank):
                raise RankError(rank, f"is still running {self._unanswered[rank]}")
        command = _encode((function, arguments))
        for rank in chosen:
            self._unanswered[rank] = function.__name__
            try:
                self._connections[rank].send_bytes(command)
            except OSError:
                raise RankError(rank, self._obituary(rank)) from None
        return chosen

    def collect(self, ranks: Sequence[int]) -> list[Any]:
        """Wait for the results of `submit`, in the order of `ranks`."""
        deadline = time.monotonic() + self.timeout_s
        results: dict[int, Any] = {}
        first_error: RankError | None = None
        missing = list(ranks)
        while missing and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([self._connections[rank] for rank in missing], remaining)
            for rank in [rank for rank in missing if self._connections[rank] in ready]:
                missing.remove(rank)
                try:
                    results[rank] = self._receive(rank)
                except RankError as error:
                    if first_error is None:
                        first_error = error
                        deadline = min(deadline, time.monotonic() + _GRACE_AFTER_ERROR_S)
        if first_error is not None:
            raise first_error
        if missing:
            rank = missing[0]
            raise RankError(
                rank,
                f"no answer from {self._unanswered[rank]} within {self.timeout_s} s",
            )
        return [results[rank] for rank in ranks]

    def _receive(self, rank: int) -> Any:
        function = self._unanswered[rank]
        try:
            succeeded, answer = pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            raise RankError(rank, self._obituary(rank)) from None
        del self._unanswered[rank]
        if not succeeded:
            raise RankError(rank, f"{function} raised\n{answer}")
        return answer

    def _discard_late_answer(self, rank: int) -> bool:
        """Read the answer that a failed call did not wait for, if it has come by now."""
        if not self._connections[rank].poll(_GRACE_AFTER_ERROR_S):
            return False
        with contextlib.suppress(RankError):
            self._receive(rank)
        return rank not in self._unanswered

    def _obituary(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(timeout=5.0)
        return (
            f"process {process.pid} died in {self._unanswered[rank]} (exit code {process.exitcode})"
        )


def _start_warm(process: multiprocessing.process.BaseProcess) -> None:
    """Start a process from our own fork server.

    Python has one fork server for everybody; another user of it (a vLLM engine) preloads other
    modules, and Megatron on CPU patches what must not leak into an engine.
    """
    with mock.patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process):
        process.start()


class _TensorsByValue(pickle.Pickler):
    """Sends the bytes of a tensor; torch's own ways share memory or need the sender's modules."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1)
        return _decode_tensor, (
            flat.view(torch.uint8).numpy().tobytes(),
            value.dtype,
            value.shape,
        )


def _decode_tensor(data: bytes, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _encode(value: Any) -> bytes:
    buffer = io.BytesIO()
    _TensorsByValue(buffer).dump(value)
    return buffer.getvalue()


def _serve(commands: Connection, rank: int, world_size: int, rendezvous: str, threads: int) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    torch.distributed.init_process_group(
        "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=10),
    )
    state: dict[str, Any] = {}
    while (command := _next_command(commands)) is not None:
        # Not kept in a variable: freeing a large answer would burden whoever calls next.
        commands.send_bytes(_answer(state, command))
    state.clear()
    torch.distributed.destroy_process_group()


def _answer(state: dict[str, Any], command: bytes) -> bytes:
    try:
        function, arguments = pickle.loads(command)
        return _encode((True, function(state, *arguments)))
    except Exception:
        return _encode((False, traceback.format_exc()))


def _next_command(commands: Connection) -> bytes | None:
    try:
        return commands.recv_bytes()
    except EOFError:
        return None


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
