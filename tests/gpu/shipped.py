"""The kernels that ship, as PTX and as cubins: out of lora_refit/kernels.fatbin, or compiled here.

A build without CUDA has no fatbin; then nvcc compiles the same sources into a cache folder.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import ptxsim

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
FATBIN = ROOT / "lora_refit" / "kernels.fatbin"
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
PTX_ARCHITECTURE = 80
"""What the fatbin holds as PTX, for architectures that come later."""

NVCC_FLAGS = ("-std=c++17", "-O3")


def kernel(name: str, source: str, architecture: int = PTX_ARCHITECTURE) -> ptxsim.Kernel:
    """A kernel of `csrc/cuda/<source>`, parsed from its PTX for compute_<architecture>."""
    return _parsed(ptx(source, architecture))[name]


@cache
def _parsed(text: str) -> dict[str, ptxsim.Kernel]:
    return ptxsim.parse(text)


def ptx(source: str, architecture: int = PTX_ARCHITECTURE) -> str:
    """The PTX text of `csrc/cuda/<source>`; for the fatbin's architecture, the shipped one."""
    if architecture == PTX_ARCHITECTURE and FATBIN.exists():
        return _shipped_ptx()
    return compile_source(
        CSRC / "cuda" / source, f"-arch=compute_{architecture}", "-ptx"
    ).read_text()


@cache
def cubins() -> dict[int, Path]:
    """The machine code of all kernels by architecture."""
    if FATBIN.exists():
        return _shipped_cubins()
    everything = CSRC / "cuda" / "kernels.cu"
    return {
        arch: compile_source(everything, f"-arch=sm_{arch}", "-cubin") for arch in ARCHITECTURES
    }


def compile_source(source: Path, *flags: str, include: Iterable[Path] = ()) -> Path:
    """nvcc's output file. Compiled once for each text of the sources. `include` comes first."""
    folders = [*include, CSRC]
    arguments = [*NVCC_FLAGS, *(f"-I{folder}" for folder in folders), *flags, str(source)]
    key = _digest([source, *_headers(folders)], " ".join(arguments))
    target = _cache_folder() / f"{source.stem}-{key}"
    if not target.exists():
        unfinished = target.with_suffix(f".{os.getpid()}")
        nvcc = toolkit() / "bin/nvcc"
        subprocess.run([nvcc, *arguments, "-o", unfinished], check=True)
        unfinished.replace(target)
    return target


def toolkit() -> Path:
    """The folder of the CUDA toolkit: CUDA_HOME, the wheels of requirements/cuda.txt, or usual."""
    wheels = Path(sysconfig.get_path("purelib")) / "nvidia/cu13"
    for home in (os.environ.get("CUDA_HOME"), wheels, "/usr/local/cuda"):
        if home and (Path(home) / "bin/nvcc").is_file():
            return Path(home)
    raise AssertionError("no nvcc: set CUDA_HOME or pip install -r requirements/cuda.txt")


def cuobjdump() -> str:
    """Of the wheel, which also disassembles, or of the toolkit."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/cuobjdump"
    found = shutil.which(wheel) or shutil.which(toolkit() / "bin/cuobjdump")
    assert found, "no cuobjdump: pip install -r requirements/cuda.txt"
    return found


def _headers(folders: list[Path]) -> list[Path]:
    return sorted(
        path
        for folder in folders
        for ending in ("h", "cuh", "cu")
        for path in folder.rglob(f"*.{ending}")
    )


def _digest(files: list[Path], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"lora_refit_kernels_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@cache
def _extracted(kind: str) -> list[Path]:
    """The members of the fatbin of a kind, `ptx` or `elf`."""
    folder = _cache_folder() / _digest([FATBIN], kind)
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=_cache_folder()) as unfinished:
            command = [cuobjdump(), f"-x{kind}", "all", str(FATBIN)]
            subprocess.run(command, cwd=unfinished, check=True, stdout=subprocess.DEVNULL)
            shutil.copytree(unfinished, folder)
    return sorted(folder.iterdir())


def _shipped_ptx() -> str:
    (file,) = _extracted("ptx")
    return file.read_text()


def _shipped_cubins() -> dict[int, Path]:
    files = {
        arch: [f for f in _extracted("elf") if f"sm_{arch}." in f.name] for arch in ARCHITECTURES
    }
    return {arch: file for arch, (file,) in files.items()}
