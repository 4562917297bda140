"""Starts vLLM's processes by fork from one server that has imported vLLM already.

vLLM on CPU spawns an engine core and a worker per rank, and each would spend ten seconds of CPU
time on imports: a minute and a half for tensor parallel 3 on two cores, against three seconds this way.
Forking the calling process instead would copy its arenas, locks and process groups as well.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import popen_forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ForkServer
from typing import Any
from unittest import mock

_server = ForkServer()  # not the default one, which `TrainerRanks` fills with Megatron
_server.set_forkserver_preload(["lora_refit.testing.engine_preload"])


def start_server() -> None:
    """Start the server unless it runs; returns while it still imports. It ends with this process."""
    _server.ensure_running()


class _Popen(popen_forkserver.Popen):
    def _launch(self, process_obj: Any) -> None:
        with mock.patch.object(
            popen_forkserver.forkserver, "connect_to_new_process", _server.connect_to_new_process
        ):
            super()._launch(process_obj)


class _Process(ForkServerProcess):
    """Starts with the environment of its parent at that moment, as a spawned process does."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class EngineContext(ForkServerContext):
    """A `multiprocessing` context for engine cores."""

    Process = _Process  # type: ignore[assignment]


def worker_context() -> multiprocessing.context.BaseContext:
    """The context in which an engine core starts its workers: vLLM's default off the CPU."""
    return multiprocessing.get_context("fork")
