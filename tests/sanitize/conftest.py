"""Fuzz drivers, built with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILE = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *SANITIZERS]


@pytest.fixture(scope="session")
def fuzzers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every fuzz_*.cpp of this folder by its name, linked with all of the CPU kernels."""
    compiler = os.environ.get("CXX", "g++")
    folder = tmp_path_factory.mktemp("sanitize")

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.parent.name}-{source.stem}.o")
        include = f"-I{CSRC}"
        subprocess.run([compiler, *COMPILE, include, "-c", str(source), "-o", target], check=True)
        return target

    drivers = sorted(HERE.glob("fuzz_*.cpp"))
    parts = [*(CSRC / "plan").glob("*.cpp"), *(CSRC / "cpu").glob("*.cpp")]
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, [*drivers, *parts]))
    linked = {}
    for driver, compiled in zip(drivers, objects, strict=False):
        linked[driver.stem] = folder / driver.stem
        command = [compiler, "-pthread", *SANITIZERS, compiled, *objects[len(drivers) :]]
        subprocess.run([*command, "-o", str(linked[driver.stem])], check=True)
    return linked


@pytest.fixture(scope="session")
def fuzz(fuzzers: dict[str, Path]) -> Callable[[str, int, str], str]:
    """`fuzz(driver, cases, simd)` is what the driver prints; it fails where the driver does."""

    def run(driver: str, cases: int, simd: str) -> str:
        # A vLLM engine that ran before preloads libraries, and ASan wants to be the first.
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        result = subprocess.run(
            [str(fuzzers[driver]), str(cases)],
            env={**environment, "LORA_REFIT_SIMD": simd},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run
