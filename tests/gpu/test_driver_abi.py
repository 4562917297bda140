"""The driver calls and constants that lora_refit declares itself are those of NVIDIA's cuda.h."""

from __future__ import annotations

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "csrc/driver/api.h"
CHECK = Path(__file__).with_name("driver_abi.cpp")


def compile_check(csrc: Path) -> subprocess.CompletedProcess[str]:
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-fsyntax-only"]
    command += [f"-I{csrc}", f"-I{cuda_include()}", str(CHECK)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def cuda_include() -> Path:
    """The folder of cuda.h, of an installed toolkit or of the nvidia-cuda-runtime wheel."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13"
    for home in (os.environ.get("CUDA_HOME", ""), wheel, "/usr/local/cuda"):
        if home and (Path(home) / "include/cuda.h").is_file():
            return Path(home) / "include"
    raise AssertionError("no cuda.h: set CUDA_HOME or pip install -r requirements/cuda.txt")


def test_own_declarations_equal_cuda_h() -> None:
    """Symbols with their versions, parameter lists, struct layouts, error codes and flags."""
    result = compile_check(ROOT / "csrc")
    assert result.returncode == 0, result.stderr


def test_every_constant_is_compared() -> None:
    declared = set(re.findall(r"inline constexpr \w+ (k\w+) =", API.read_text()))
    assert declared == set(re.findall(r"CHECK_VALUE\((k\w+),", CHECK.read_text()))


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [
        ('"cuMemFree_v2", DeviceAddress)', '"cuMemFree", DeviceAddress)'),
        ('cuEventQuery, "cuEventQuery", EventHandle)', 'cuEventQuery, "cuEventQuery", int)'),
        ("kErrorNotReady = 600", "kErrorNotReady = 601"),
        ("  MemoryLocation location;\n  void*", "  void*"),
    ],
    ids=["symbol", "parameter", "constant", "struct"],
)
def test_a_wrong_declaration_is_found(ours: str, wrong: str, tmp_path: Path) -> None:
    text = API.read_text()
    assert text.count(ours) == 1
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver/api.h").write_text(text.replace(ours, wrong))
    assert "static assertion failed" in compile_check(tmp_path).stderr
