"""The C++ copy program under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
COMPILE = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", *SANITIZERS]


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fuzz driver, built with every source file of the copy program."""
    compiler = os.environ.get("CXX", "g++")
    folder = tmp_path_factory.mktemp("sanitize")

    def compile_one(source: Path) -> str:
        target = str(folder / f"{source.stem}.o")
        include = f"-I{ROOT / 'csrc'}"
        subprocess.run([compiler, *COMPILE, include, "-c", str(source), "-o", target], check=True)
        return target

    parts = [*(ROOT / "csrc/plan").glob("*.cpp"), *(ROOT / "csrc/cpu").glob("*.cpp")]
    sources = [Path(__file__).with_name("fuzz_copy.cpp"), *parts]
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "fuzz_copy"
    subprocess.run([compiler, "-pthread", *SANITIZERS, *objects, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("simd", ["auto", "portable"])
def test_random_block_lists_are_clean_under_sanitizers(fuzzer: Path, simd: str) -> None:
    """Random block lists equal a plain loop; absurd ones are refused; no access strays."""
    # A vLLM engine that ran before preloads libraries, and ASan wants to be the first.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    result = subprocess.run(
        [str(fuzzer), "150"],
        env={**environment, "LORA_REFIT_SIMD": simd},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "150 random block lists equal the plain loop" in result.stdout
