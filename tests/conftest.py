"""What all tests share: their order, tiny checkpoints, an early engine server, and a clean end."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lora_refit.testing.engine import cpu_engine_environment, start_engine_server

FOLDERS = ("unit", "sanitize", "real", "faults", "gpu")
"""Folders in the order they run: the cheap and basic first. `gpu` gives this process a stand-in CUDA
driver, which cannot be taken away again."""

SESSION_MARK = "LORA_REFIT_TEST_SESSION"
"""Environment variable that every process of this session inherits, orphans included."""


def pytest_configure() -> None:
    os.environ[SESSION_MARK] = secrets.token_hex(8)
    cpu_engine_environment()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _position(_folder(item)))


def pytest_collection_finish(session: pytest.Session) -> None:
    needs_engine = any(_folder(item) == "real" for item in session.items)
    if needs_engine and not session.config.option.collectonly:
        start_engine_server()


def pytest_sessionfinish(session: pytest.Session) -> None:
    terminal = session.config.get_terminal_writer()
    while strays := _strays():
        for process in strays:
            command = " ".join(process.cmdline())
            terminal.line(f"\nkilling stray process {process.pid}: {command[:200]}")
            process.kill()
        psutil.wait_procs(strays)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny("qwen3", **sizes)` is the path of a `tiny_model`, written on first use."""
    from lora_refit.testing.models import tiny_model

    written: dict[str, Path] = {}

    def path(architecture: str = "qwen3", **sizes: Any) -> Path:
        key = f"{architecture} {sorted(sizes.items())}"
        if key not in written:
            written[key] = tiny_model(tmp_path_factory.mktemp(architecture), architecture, **sizes)
        return written[key]

    return path


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(Path(__file__).parent).parts[0]


def _position(folder: str) -> int:
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def _strays() -> list[psutil.Process]:
    strays = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(SESSION_MARK) == os.environ[SESSION_MARK]
            if marked and not _ends_by_itself(process):
                strays.append(process)
        except psutil.Error:
            continue  # gone, or not ours to look at
    return strays


def _ends_by_itself(process: psutil.Process) -> bool:
    """Whether it is this process or a server that `multiprocessing` keeps for it."""
    is_server = "from multiprocessing" in " ".join(process.cmdline())
    return process.pid == os.getpid() or (process.ppid() == os.getpid() and is_server)
