"""Builds programs that run the CUDA kernels' own source on the emulator (cuemu).

Only the code that runs on the emulated GPU is built with a sanitizer: the rest of a program is
host code with tests of its own, and the emulator tells the sanitizers what CUDA promises.
"""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
EMULATOR = tuple(sorted((HERE / "cuemu").glob("*.cpp")))
INCLUDE = (HERE / "cuemu" / "include", HERE, CSRC)
FLAGS = ("-std=c++17", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-pthread")
SANITIZERS = {
    "plain": (),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": ("-fsanitize=thread",),
}
LINK = {"plain": (), "address": ("-fsanitize=address,undefined",), "thread": ("-fsanitize=thread",)}
REPORTED = 66
"""Exit status of a program that a sanitizer has stopped."""

Object = Future[Path]
_POOL = ThreadPoolExecutor(max_workers=os.cpu_count())


@dataclass(frozen=True)
class Edit:
    """A change to one file below csrc/cuda: `old`, which occurs there exactly once, becomes `new`."""

    file: str
    old: str
    new: str

    def text(self) -> str:
        original = (CSRC / "cuda" / self.file).read_text()
        assert original.count(self.old) == 1, f"{self.file} has not exactly one {self.old!r}"
        return original.replace(self.old, self.new)


@dataclass(frozen=True)
class Program:
    """What is linked: kernels and other code of the emulated GPU, and host code."""

    device: tuple[Path, ...]
    host: tuple[Path, ...]


def start(program: Program, sanitizer: str = "plain", edit: Edit | None = None) -> list[Object]:
    """Starts to compile what `build` will link. Object files are shared by all programs."""
    host = [_host_object(source) for source in (*program.host, *EMULATOR)]
    return [*host, *(_device_object(source, sanitizer, edit) for source in program.device)]


def build(program: Program, sanitizer: str = "plain", edit: Edit | None = None) -> Path:
    """The executable."""
    objects = [str(compiling.result()) for compiling in start(program, sanitizer, edit)]
    executable = _fresh_path("program")
    _compile("-pthread", *LINK[sanitizer], *objects, "-o", str(executable))
    return executable


def run(executable: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs to the end, however it ends. Sanitizers stop a program with status `REPORTED`."""
    # A vLLM engine that ran before preloads libraries, and sanitizers want to be the first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    for options in ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS"):
        environment[options] = f"halt_on_error=1:exitcode={REPORTED}"
    command = [str(executable), *map(str, arguments)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@cache
def _host_object(source: Path) -> Object:
    return _POOL.submit(_compiled, source, "-Werror", "-O1", *_includes(INCLUDE))


@cache
def _device_object(source: Path, sanitizer: str, edit: Edit | None) -> Object:
    # Without optimisation, which would take longer than these programs run.
    flags = ["-x", "c++", "-O0", *SANITIZERS[sanitizer]]
    if edit is None:
        return _POOL.submit(_compiled, source, "-Werror", *flags, *_includes(INCLUDE))
    folder = _fresh_path("edited")
    changed = folder / "cuda" / edit.file
    changed.parent.mkdir(parents=True)
    changed.write_text(edit.text())
    source = changed if source.name == edit.file else source
    return _POOL.submit(_compiled, source, "-w", *flags, *_includes((folder, *INCLUDE)))


def _compiled(source: Path, *flags: str) -> Path:
    target = _fresh_path(f"{source.stem}.o")
    _compile(*FLAGS, *flags, "-c", str(source), "-o", str(target))
    return target


def _includes(folders: Iterable[Path]) -> list[str]:
    return [f"-I{folder}" for folder in folders]


def _compile(*arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "g++"), *arguments], check=True)


def _fresh_path(name: str) -> Path:
    return _folder() / f"{next(_numbers)}-{name}"


_numbers = itertools.count()


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="lora-refit-emulated-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
