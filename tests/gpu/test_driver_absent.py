"""On a machine without a CUDA driver, or with one that cannot serve, each call says what is missing.

Each case is a process of its own: a driver that was loaded once stays.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import driver_process
import pytest
import stand_in

from lora_refit import _C

CALLS = """
import json

none, one = np.zeros(0, np.uint64), np.ones(1, np.uint64)
calls = {
    "devices": lambda: cuda.devices(),
    "ordinal_of": lambda: cuda.ordinal_of("GPU-0"),
    "can_access_peer": lambda: cuda.can_access_peer(0, 1),
    "enable_peer_access": lambda: cuda.enable_peer_access(0, 1),
    "CopyProgram": lambda: cuda.CopyProgram(0, b"", [], [], [], []),
    "MergeProgram": lambda: cuda.MergeProgram(0, b"", b"", [], [], [], [], 0),
    "digest": lambda: cuda.digest(0, none, none, none, 0),
    "DeviceMemory": lambda: cuda.DeviceMemory(0, 1),
    "SharedDeviceMemory": lambda: cuda.SharedDeviceMemory(0, 1),
    "open_ipc": lambda: cuda.open_ipc(0, bytes(64)),
    "open_fd": lambda: cuda.open_fd(0, 0, 1),
    "register_host": lambda: cuda.register_host(0, one.ctypes.data, 8),
    "Stream": lambda: cuda.Stream(0),
    "Event": lambda: cuda.Event(0),
    "begin_capture": lambda: cuda.begin_capture(0, 0),
    "end_capture": lambda: cuda.end_capture(0, 0),
    "is_capturing": lambda: cuda.is_capturing(0, 0),
    "synchronize": lambda: cuda.synchronize(0, 0),
    "memset": lambda: cuda.memset(0, 0, 0, 0),
    "copy_to_host": lambda: cuda.copy_to_host(0, 0, 0),
    "copy_from_host": lambda: cuda.copy_from_host(0, 0, b""),
}
constructed = {"Device", "Graph", "Mapping", "CudaError"}  # by the calls above, or an exception
offered = {name for name in vars(cuda) if not name.startswith("_")}
assert offered - constructed - {"status", "set_image"} == set(calls), offered
errors = {}
for name, call in calls.items():
    try:
        call()
    except cuda.CudaError as error:
        errors[name] = str(error)
print(json.dumps([cuda.status(), errors, sorted(calls)]))
"""


def test_the_package_is_imported_without_a_driver() -> None:
    script = "import lora_refit\nfrom lora_refit import _C\nprint(_C.cuda.status())"
    output = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout
    assert "no CUDA driver" in output


def broken_driver(folder: Path) -> dict[str, str]:
    """A libcuda.so.1 that has none of the calls."""
    command = ["g++", "-shared", "-x", "c", "/dev/null", "-o", str(folder / stand_in.NAME)]
    subprocess.run(command, check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("none", "no CUDA driver (libcuda.so.1: cannot open shared object file"),
        ("too old", "libcuda.so.1 has no cuInit: update the NVIDIA driver"),
        ("without devices", "cuInit failed: CUDA_ERROR_NO_DEVICE"),
        ("broken", "cuInit failed: CUDA_ERROR_NOT_INITIALIZED"),
    ],
)
def test_every_call_says_what_is_missing(driver: str, said: str, tmp_path: Path) -> None:
    environment = {
        "none": lambda: dict(os.environ),
        "too old": lambda: broken_driver(tmp_path),
        "without devices": lambda: stand_in.environment(FAKECUDA_DEVICES="0"),
        "broken": lambda: stand_in.environment(FAKECUDA_FAIL="cuInit:3"),
    }[driver]()
    status, errors, calls = json.loads(driver_process.run(CALLS, environment=environment))
    print(status)
    assert said in status
    assert sorted(errors) == calls
    assert set(errors.values()) == {status}


KERNELS = """
assert cuda.status() == ""
if len(sys.argv) > 1:
    cuda.set_image(bytes.fromhex(sys.argv[1]))
try:
    cuda.CopyProgram(0, b"", [], [], [], [])
except (cuda.CudaError, ValueError) as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("entries", "sm", "said"),
    [
        (None, 90, "CudaError this build of lora_refit has no CUDA kernels"),
        ([], 90, "CudaError cuModuleLoadData failed on GPU-"),
        ([("elf", 80), ("elf", 100)], 90, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ([("elf", 86)], 80, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ([("ptx", 90)], 80, "CUDA_ERROR_NO_BINARY_FOR_GPU"),
        ([("elf", 80)], 86, ""),
        ([("ptx", 80)], 120, ""),
    ],
)
def test_kernels_must_fit_the_gpu(
    entries: list[tuple[str, int]] | None, sm: int, said: str
) -> None:
    image = [] if entries is None else [stand_in.fatbin(entries).hex()]
    environment = stand_in.environment(FAKECUDA_SM=str(sm))
    said_now = driver_process.run(KERNELS, *image, environment=environment)
    print(said_now.strip())
    assert said in said_now and bool(said) == bool(said_now)


@pytest.mark.parametrize("cut", [0, 3, 15, 16, 100, -1])
def test_an_image_that_is_cut_short_is_refused(cut: int) -> None:
    whole = stand_in.fatbin([("ptx", 80), ("elf", 90)])
    with pytest.raises(ValueError, match="cut short|not a fatbin"):
        _C.cuda.set_image(whole[:cut])


def test_something_else_than_an_image_is_refused() -> None:
    with pytest.raises(ValueError, match="the kernel image is not a fatbin"):
        _C.cuda.set_image(b"\x7fELF" + bytes(200))
