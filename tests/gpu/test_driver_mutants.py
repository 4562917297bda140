"""Faults planted in csrc/driver are found by checks that the driver's own code passes."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import driver_process
import pybind11
import pytest
import stand_in

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
MODULE = HERE / "cuda_module.cpp"
COMPILE = ["-std=c++17", "-O0", "-fPIC", "-fvisibility=hidden", "-pthread", f"-I{CSRC}"]
INCLUDE = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]


@dataclass(frozen=True)
class Mutant:
    """A text that occurs once in a source file, its wrong replacement, and what must find it."""

    file: str
    right: str
    wrong: str
    check: str


MUTANTS = {
    "reads the digests without waiting": Mutant(
        "submission.cpp",
        "  wait();\n  const char* result",
        "  const char* result",
        "digests_are_those_of_the_run",
    ),
    "adds to the digests of the last run": Mutant(
        "submission.cpp",
        "  results_.zero(stream);\n",
        "",
        "digests_are_those_of_the_run",
    ),
    "keeps the first addresses": Mutant(
        "address_table.cpp",
        "return uploaded_ && std::equal(",
        "return uploaded_ || std::equal(",
        "addresses_follow_the_buffers",
    ),
    "overwrites addresses before they are uploaded": Mutant(
        "submission.cpp",
        "    wait();  // an upload",
        "    // an upload",
        "uploads_wait_for_the_launch_before",
    ),
    "lets launches overtake each other": Mutant(
        "submission.cpp",
        "    finished_.precede(stream);\n",
        "",
        "launches_keep_their_order",
    ),
    "takes a failed upload for done": Mutant(
        "submission.cpp",
        "  addresses_.forget();\n",
        "",
        "failed_runs_are_forgotten",
    ),
    "returns before an upload has arrived": Mutant(
        "memory.cpp",
        "  context.call(&Api::cuStreamSynchronize, StreamHandle{});\n",
        "",
        "uploads_have_arrived",
    ),
    "maps memory without access": Mutant(
        "shared_memory.cpp",
        "  context.call(&Api::cuMemSetAccess, address, bytes, &access, size_t{1});\n",
        "  static_cast<void>(access);\n",
        "shared_memory_can_be_used",
    ),
    "releases an imported handle twice": Mutant(
        "shared_memory.cpp",
        "  return PhysicalMapping(device, physical.get(), bytes);\n",
        "  const Owned<PhysicalHandle> again(device, &Api::cuMemRelease, physical.get());\n"
        "  return PhysicalMapping(device, physical.get(), bytes);\n",
        "everything_is_given_back_once",
    ),
    "does not unregister host memory": Mutant(
        "mapping.cpp",
        "(device, &Api::cuMemHostUnregister, host)",
        "(device, &Api::cuMemFreeHost, host)",
        "everything_is_given_back_once",
    ),
    "leaks captured graphs": Mutant(
        "stream.cpp",
        "  const Owned<GraphHandle> graph(device, &Api::cuGraphDestroy, captured);\n"
        "  return Graph(device, graph.get());\n",
        "  return Graph(device, captured);\n",
        "everything_is_given_back_once",
    ),
    "leaves its context current": Mutant(
        "context.cpp",
        "  result_of(&Api::cuCtxPopCurrent, &popped);\n",
        "  static_cast<void>(popped);\n",
        "contexts_are_popped",
    ),
    "forgets to ask for shared memory": Mutant(
        "module.cpp",
        "  context.call(&Api::cuFuncSetAttribute, function_, kFunctionMaxDynamicSharedBytes,\n"
        "               static_cast<int>(dynamic_shared));\n",
        "",
        "merges_get_their_shared_memory",
    ),
    "uses the driver in a forked process": Mutant(
        "library.cpp",
        "  if (driver->process != here) {",
        "  if (false) {",
        "forked_processes_are_told",
    ),
}


def compiled(source: Path, folder: Path) -> Path:
    target = unused(folder, f"{source.stem}.o")
    run_compiler(*COMPILE, *INCLUDE, "-c", str(source), "-o", str(target))
    return target


def linked(objects: Iterable[Path], folder: Path) -> Path:
    target = unused(folder, "_C.so")
    run_compiler("-shared", "-pthread", *map(str, objects), "-o", str(target), "-ldl")
    return target


def unused(folder: Path, name: str) -> Path:
    return Path(tempfile.mkdtemp(dir=folder)) / name


def run_compiler(*arguments: str) -> None:
    subprocess.run([os.environ.get("CXX", "g++"), *arguments], check=True)


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The CUDA backend as an extension: of each mutant, and under "" of the driver's own code."""
    folder = tmp_path_factory.mktemp("driver")
    parts = [*CSRC.glob("driver/*.cpp"), *CSRC.glob("plan/*.cpp")]
    right = {part.name: part for part in [CSRC / "cuda_bindings.cpp", MODULE, *parts]}
    variants = {"": right}
    for name, mutant in MUTANTS.items():
        variants[name] = {**right, mutant.file: planted(mutant, folder / name)}
    sources = dict.fromkeys(s for variant in variants.values() for s in variant.values())
    with ThreadPoolExecutor(max_workers=2) as pool:
        compiling = {source: pool.submit(compiled, source, folder) for source in sources}
        objects = {source: job.result() for source, job in compiling.items()}
        linking = {
            name: pool.submit(linked, [objects[source] for source in variant.values()], folder)
            for name, variant in variants.items()
        }
        return {name: job.result() for name, job in linking.items()}


def planted(mutant: Mutant, folder: Path) -> Path:
    text = (CSRC / "driver" / mutant.file).read_text()
    assert text.count(mutant.right) == 1, mutant
    folder.mkdir()
    source = folder / mutant.file
    source.write_text(text.replace(mutant.right, mutant.wrong))
    return source


def run_check(check: str, extension: Path) -> None:
    """Raises AssertionError with what the process printed if it fails."""
    driver_process.run(
        HERE / "driver_checks.py",
        check,
        stand_in.fatbin([("ptx", 80)]).hex(),
        environment=stand_in.environment(),
        extension=extension,
    )


@pytest.mark.parametrize("check", sorted({mutant.check for mutant in MUTANTS.values()}))
def test_the_driver_passes(check: str, extensions: dict[str, Path]) -> None:
    run_check(check, extensions[""])


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, extensions: dict[str, Path]) -> None:
    with pytest.raises(AssertionError) as caught:
        run_check(MUTANTS[name].check, extensions[name])
    print(f"{name}: {str(caught.value).strip().splitlines()[-1]}")
    assert "Error" in str(caught.value)
