"""The stand-in CUDA driver: a libcuda.so.1 without a GPU. See fakecuda/state.h for what it is.

`load()` gives this process a CUDA driver; so does `environment()` a child process. It cannot be
unloaded, so tests that need another, or none, start a process of their own.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from lora_refit import _C

ROOT = Path(__file__).parents[2]
GPU_TESTS = ROOT / "tests/gpu"
FATBIN = ROOT / "lora_refit/kernels.fatbin"
INCLUDE = [GPU_TESTS / "cuemu/include", GPU_TESTS, ROOT / "csrc"]
COMPILE = [
    "-std=c++17",
    "-O1",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-pthread",
]
NAME = "libcuda.so.1"

STEADY_RUN = [
    "cuCtxPushCurrent",
    "cuStreamIsCapturing",
    "cuMemsetD8Async",
    "cuLaunchKernel",
    "cuMemcpyDtoHAsync",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuCtxPopCurrent",
]
"""The driver calls of a run whose addresses have not changed."""


class StandIn:
    """Steers the stand-in in this process and looks into it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in ("take_log", "live", "last_error"):
            getattr(library, f"fakecuda_{name}").restype = ctypes.c_char_p

    @contextmanager
    def failing(self, call: str, code: int, occurrence: int = 0) -> Iterator[None]:
        """Makes the driver's `call`, or any if "*", return `code`: each, or only the n-th."""
        self._library.fakecuda_fail(f"{call}:{code}:{occurrence}".encode())
        try:
            yield
        finally:
            self._library.fakecuda_fail(b"")

    def take_calls(self) -> list[str]:
        """Names of the driver calls since the last time; those that failed end in "=code"."""
        return self._text("take_log").split()

    def live(self) -> dict[str, int]:
        """How many objects of each kind exist."""
        lines = self._text("live").splitlines()
        return {kind: int(count) for kind, _, count in (line.rpartition(" ") for line in lines)}

    def last_error(self) -> str:
        """Why the last kernel failed."""
        return self._text("last_error")

    def context_depth(self) -> int:
        """Contexts that this thread has pushed and not popped."""
        return int(self._library.fakecuda_context_depth())

    def shut_down(self) -> None:
        """From now on the driver is gone, as while a process exits."""
        self._library.fakecuda_shut_down()

    def _text(self, name: str) -> str:
        return str(getattr(self._library, f"fakecuda_{name}")().decode())


@cache
def load() -> StandIn:
    """The CUDA driver of this process from now on, with two devices and the kernels handed over."""
    stand_in = StandIn(ctypes.CDLL(str(build())))
    assert _C.cuda.status() == ""
    _C.cuda.set_image(image())
    stand_in.take_calls()
    return stand_in


@contextmanager
def nothing_left_over() -> Iterator[StandIn]:
    """At the end as many objects must live as before, and the driver may have refused nothing."""
    driver = load()
    before = driver.live()
    driver.take_calls()
    yield driver
    failed = {call for call in driver.take_calls() if "=" in call}
    assert failed <= {"cuEventQuery=600"}, failed  # not ready
    assert driver.context_depth() == 0
    if driver.live() != before:
        gc.collect()  # caught exceptions keep their frames' objects
    assert driver.live() == before, driver.live()


def image() -> bytes:
    """The shipped kernels. A build without them gets an image that only says it has some: the
    stand-in runs its own build of the sources in any case."""
    return FATBIN.read_bytes() if FATBIN.exists() else fatbin([("ptx", 80)])


def fatbin(entries: list[tuple[str, int]]) -> bytes:
    """An image as nvcc lays it out, of empty parts: each "ptx" or "elf", and for which sm."""
    kinds = {"ptx": 1, "elf": 2}
    parts = [
        struct.pack("<HHIQ12xI32x", kinds[kind], 0x0101, 64, 8, sm) + bytes(8)
        for kind, sm in entries
    ]
    payload = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(payload)) + payload


def environment(**settings: str) -> dict[str, str]:
    """Variables that give a child process the stand-in as its driver.

    settings: FAKECUDA_DEVICES (2), FAKECUDA_PEERS (1), FAKECUDA_SM (90), and FAKECUDA_FAIL, a
        failure as fakecuda/control.h describes it.
    """
    path = os.pathsep.join([str(build().parent), os.environ.get("LD_LIBRARY_PATH", "")])
    return {**os.environ, "LD_LIBRARY_PATH": path, **settings}


@cache
def build() -> Path:
    """libcuda.so.1, compiled once for each text of its sources."""
    folder = _cache_folder() / _digest()
    if not folder.exists():
        unfinished = Path(tempfile.mkdtemp(dir=_cache_folder()))
        _link(unfinished)
        try:
            unfinished.rename(folder)
        except OSError:  # another process was faster
            shutil.rmtree(unfinished)
    return folder / NAME


def _link(folder: Path) -> None:
    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.parent.name}_{source.stem}.o")
        include = [f"-I{path}" for path in INCLUDE]
        command = [_compiler(), *COMPILE, *include, "-x", "c++", "-c", str(source), "-o", target]
        subprocess.run(command, check=True)
        return target

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, _sources()))
    link = ["-shared", "-pthread", "-Wl,-z,defs", f"-Wl,-soname,{NAME}", "-o", str(folder / NAME)]
    subprocess.run([_compiler(), *objects, *link], check=True)


def _sources() -> list[Path]:
    kernels = ROOT / "csrc/cuda/kernels.cu"  # first: it takes longest
    return [kernels, *sorted(GPU_TESTS.glob("fakecuda/*.cpp")), *GPU_TESTS.glob("cuemu/*.cpp")]


def _digest() -> str:
    digest = hashlib.sha256(" ".join([_compiler(), *COMPILE]).encode())
    folders = [ROOT / "csrc/cuda", GPU_TESTS / "fakecuda", GPU_TESTS / "cuemu"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [*(ROOT / "csrc").glob("*.h"), ROOT / "csrc/driver/api.h"]
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compiler() -> str:
    return os.environ.get("CXX", "g++")


def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"lora_refit_kernels_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
