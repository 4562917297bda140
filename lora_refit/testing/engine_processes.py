"""Starts vLLM's processes by fork from one server that has already imported vLLM.

vLLM's CPU platform spawns an engine core and a worker per rank, each of which spends ten seconds of
CPU time on imports: 107 s for tensor parallel 3 on two cores, against 4 s this way. The server is
a clean process; forking the caller would copy its arenas, locks and process groups.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver, popen_forkserver
from multiprocessing.context import ForkContext, ForkProcess, ForkServerContext, ForkServerProcess
from typing import Any
from unittest import mock

import torch

# A server of our own: `TrainerRanks` fills the default one with Megatron.
_server = forkserver.ForkServer()
_server.set_forkserver_preload(["lora_refit.testing.engine_preload"])


def start_server() -> None:
    """Start the server unless it runs; returns while it imports. It ends with this process."""
    _server.ensure_running()


class _ServerPopen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        with mock.patch.object(
            forkserver, "connect_to_new_process", _server.connect_to_new_process
        ):
            super()._launch(process_obj)  # type: ignore[misc]


class _EngineCoreProcess(ForkServerProcess):
    """Runs in the environment its parent had at the start, as a spawned process does."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _ServerPopen(process_obj)

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class EngineCoreContext(ForkServerContext):
    """The `multiprocessing` context in which a client starts its engine core."""

    Process = _EngineCoreProcess


class _WorkerProcess(ForkProcess):
    def run(self) -> None:
        # The OpenMP runtime read its variable when the server started.
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        super().run()


class WorkerContext(ForkContext):
    """The context in which an engine core starts its workers: by fork, vLLM's own default."""

    Process = _WorkerProcess
