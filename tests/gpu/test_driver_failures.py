"""What goes wrong: every driver call that can fail, forked processes, lost contexts, exits."""

from __future__ import annotations

import os
from collections.abc import Callable

import driver_process
import numpy as np
import pytest
import stand_in

from lora_refit import _C
from lora_refit.kernels import BLOCK_DTYPE, MERGE_BLOCK_DTYPE, MERGE_SUMS_DTYPE

cuda = _C.cuda

GIVE_BACK = {
    "cuMemFree",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuMemRelease",
    "cuStreamDestroy",
    "cuEventDestroy",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuCtxPushCurrent",
}
"""Calls that give back, and what comes before them: if they fail the object stays, no more."""

COPY = np.array([(0, 0, 0, 0, (1, 1, 4), (0, 0, 1), (0, 0, 1), 1.0, 0)], BLOCK_DTYPE)
MERGE = np.array([(0, 0, 0, 0, 1, 4, 4, 4, 0, 0, 0, 1.0)], MERGE_BLOCK_DTYPE)
GPU_0 = "GPU-66616b65-6375-6461-0000-000000000000 (device 0)"
OUT_OF_MEMORY = 2
REGISTERED: list[object] = []
"""Host memory that stays registered if unregistering fails, so it must not be used again."""
RESTORE = {"cuCtxPopCurrent", "cuThreadExchangeStreamCaptureMode"}
"""Calls that are not made to fail: see fakecuda/control.h."""


def use_memory() -> None:
    """Each call about memory, at least once."""
    host = np.zeros(16, np.uint8)
    REGISTERED.append(host)
    memory = cuda.DeviceMemory(0, 8)
    memory.ipc_handle()
    cuda.copy_from_host(0, memory.address, b"abcd")
    cuda.copy_to_host(0, memory.address, 4)
    shared = cuda.SharedDeviceMemory(0, 8)
    fd = shared.export_fd()
    try:
        mapped = cuda.open_fd(0, fd, shared.bytes)
    finally:
        os.close(fd)
    pinned = cuda.register_host(0, host.ctypes.data, host.nbytes)
    cuda.can_access_peer(0, 1)
    stream, event = cuda.Stream(0), cuda.Event(0)
    cuda.memset(0, memory.address, 8, stream.handle)
    event.record(stream.handle)
    _ = event.done
    event.synchronize()
    for owner in (pinned, mapped, shared, memory, event, stream):
        owner.close()


def use_programs() -> None:
    """Each call about programs, at least once."""
    source, target = np.zeros((2, 4), np.float32)
    addresses = [np.array([array.ctypes.data], np.uint64) for array in (source, target)]
    digests = np.zeros(1, np.uint64)
    stream = cuda.Stream(0)
    program = cuda.CopyProgram(0, COPY.tobytes(), [0], [4], [0], [4])
    program.run(*addresses, digests, stream.handle)
    program.launch(*addresses, stream.handle)
    program.launch(*addresses, 0)
    program.collect(digests)
    cuda.begin_capture(0, stream.handle)
    program.launch(*addresses, stream.handle)
    graph = cuda.end_capture(0, stream.handle)
    graph.launch(stream.handle)
    cuda.synchronize(0, stream.handle)
    merge = cuda.MergeProgram(0, MERGE.tobytes(), b"", [0], [4], [0], [4], 1)
    merge.run(*addresses, digests, np.zeros(1, MERGE_SUMS_DTYPE), stream.handle)


@pytest.mark.parametrize("use", [use_memory, use_programs])
def test_every_call_may_fail_and_nothing_leaks(use: Callable[[], None]) -> None:
    """The n-th driver call fails, for each n: the error names it, and all objects are given back."""
    driver = stand_in.load()
    use()
    driver.take_calls()
    use()
    every_call = set(driver.take_calls())
    failed: list[str] = []
    while not failed or failed[-1]:
        failed.append(fail_once(driver, use, len(failed) + 1))
    print(f"{len(failed) - 1} calls, {len(set(failed)) - 1} different ones")
    assert set(failed) | RESTORE | {"cuEventQuery=600"} >= every_call
    use()


def fail_once(driver: stand_in.StandIn, use: Callable[[], None], occurrence: int) -> str:
    """The call that failed; empty if there are fewer calls."""
    before = driver.live()
    driver.take_calls()
    message = ""
    with driver.failing("*", OUT_OF_MEMORY, occurrence):
        try:
            use()
        except cuda.CudaError as error:
            message = str(error)
    ending = f"={OUT_OF_MEMORY}"
    failed = next((call for call in driver.take_calls() if call.endswith(ending)), "")
    failed = failed.removesuffix(ending)
    assert driver.context_depth() == 0
    if message == "":
        assert failed in {*GIVE_BACK, ""}
    else:
        assert message.startswith(f"{failed} failed on {GPU_0}: ")
        assert "CUDA_ERROR_OUT_OF_MEMORY (out of memory); free memory" in message
        assert driver.live() == before, f"{failed}, call {occurrence}"
    return failed


START = """
def start():
    cuda.set_image(bytes.fromhex(sys.argv[1]))
    cuda.DeviceMemory(0, 8)
    cuda.CopyProgram(0, b"", [], [], [], [])

driver = stand_in()
said = []
for occurrence in range(1, 100):
    driver.fakecuda_fail(b"*:2:%d" % occurrence)
    if os.fork() == 0:
        try:
            start()
        except cuda.CudaError as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(b"=2" in driver.fakecuda_take_log())
    if os.wait()[1] == 0:
        break
"""


def test_every_call_of_a_start_may_fail() -> None:
    """Each child process finds the driver, its devices and the kernels for itself."""
    image = stand_in.fatbin([("ptx", 80)]).hex()
    output = driver_process.run(START, image, environment=stand_in.environment())
    failed = [line.split()[0] for line in output.splitlines()]
    print(failed)
    assert {"cuInit", "cuDeviceGetCount", "cuDeviceGetUuid", "cuDevicePrimaryCtxRetain"} < {*failed}
    assert {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"} < {*failed}
    assert all("CUDA_ERROR_OUT_OF_MEMORY" in line for line in output.splitlines())


def test_a_failed_run_uploads_its_addresses_again() -> None:
    """The half that was enqueued must not be taken for a whole."""
    driver = stand_in.load()
    program = cuda.CopyProgram(0, COPY.tobytes(), [0], [4], [0], [4])
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    addresses = [np.array([array.ctypes.data], np.uint64) for array in (source, target)]
    digests = np.zeros(1, np.uint64)
    with driver.failing("cuMemcpyHtoDAsync", OUT_OF_MEMORY), pytest.raises(cuda.CudaError):
        program.run(*addresses, digests, 0)
    with pytest.raises(ValueError, match="no launch to collect"):
        program.collect(digests)
    with driver.failing("cuEventRecord", OUT_OF_MEMORY), pytest.raises(cuda.CudaError):
        program.run(*addresses, digests, 0)
    assert (target == source).all()  # nothing of it is still under way
    target[:] = 0
    program.run(*addresses, digests, 0)
    assert (target == source).all()


LOST = """
cuda.set_image(bytes.fromhex(sys.argv[1]))
memory, shared = cuda.DeviceMemory(0, 8), cuda.SharedDeviceMemory(0, 8)
program = cuda.CopyProgram(0, bytes.fromhex(sys.argv[2]), [0], [4], [0], [4])
freed = cuda.DeviceMemory(0, 16)
addresses = [np.array([freed.address + i], np.uint64) for i in (0, 16)]
freed.close()
for call in (
    lambda: program.run(*addresses, np.zeros(1, np.uint64), 0),
    lambda: cuda.DeviceMemory(0, 8),
    lambda: cuda.copy_to_host(0, memory.address, 8),
):
    try:
        call()
    except cuda.CudaError as error:
        print(error)
memory.close()
shared.close()
del program
print("the other device", cuda.DeviceMemory(1, 8).bytes)
"""


def test_a_lost_context_says_so_and_can_be_left() -> None:
    image = stand_in.fatbin([("ptx", 80)]).hex()
    output = driver_process.run(
        LOST, image, COPY.tobytes().hex(), environment=stand_in.environment()
    )
    print(output)
    *errors, other = output.splitlines()
    assert [error.split()[0] for error in errors] == ["cuEventSynchronize", "cuMemAlloc", "cuMemcpyDtoH"]  # fmt: skip
    assert all("ILLEGAL_ADDRESS" in error and "restart it" in error for error in errors)
    assert other == "the other device 2097152"


FORKED = """
driver = stand_in()
cuda.set_image(bytes.fromhex(sys.argv[1]))
memory = cuda.DeviceMemory(0, 8)
program = cuda.CopyProgram(0, b"", [], [], [], [])
nothing = np.zeros(0, np.uint64)
parent = os.getpid()
driver.fakecuda_take_log()
if os.fork() == 0:
    for call in (
        lambda: cuda.DeviceMemory(0, 8),
        lambda: cuda.devices(),
        lambda: program.run(nothing, nothing, nothing, 0),
        lambda: cuda.copy_to_host(0, memory.address, 8),
    ):
        try:
            call()
        except cuda.CudaError as error:
            print(str(error).replace(str(os.getpid()), "CHILD").replace(str(parent), "PARENT"))
    print(cuda.status() != "")
    memory.close()
    del program
    print(driver.fakecuda_take_log(), flush=True)
    sys.exit(0)
child = os.wait()[1]
memory.close()
program.run(nothing, nothing, nothing, 0)
print(child, b"cuMemFree" in driver.fakecuda_take_log())
"""


def test_a_forked_process_is_refused() -> None:
    """The child makes no driver call at all, not even for what it inherited, and ends well."""
    image = stand_in.fatbin([("ptx", 80)]).hex()
    output = driver_process.run(FORKED, image, environment=stand_in.environment())
    *errors, status, calls, parent = output.splitlines()
    assert len(errors) == 4
    refusal = "process CHILD was forked from process PARENT, which uses CUDA; start workers with"
    assert all(error.startswith(refusal) for error in errors)
    assert [status, calls, parent] == ["True", "b''", "0 True"]


EXITS = """
driver = stand_in()
cuda.set_image(bytes.fromhex(sys.argv[2]))
kept = [cuda.DeviceMemory(0, 8), cuda.SharedDeviceMemory(0, 8), cuda.Stream(0), cuda.Event(0)]
program = cuda.CopyProgram(0, bytes.fromhex(sys.argv[3]), [0], [4], [0], [4])
values = np.zeros((2, 4), np.float32)
addresses = [np.array([row.ctypes.data], np.uint64) for row in values]
program.launch(*addresses, kept[2].handle)
words = [np.array([value], np.uint64) for value in (values.ctypes.data, 16)]
cuda.digest(0, *words, np.zeros(1, np.uint64), 0)
if sys.argv[1] == "gone":
    driver.fakecuda_shut_down()
    try:
        program.collect(np.zeros(1, np.uint64))
    except cuda.CudaError as error:
        print(error)
    for owner in kept:
        owner.close()
sys.driver_objects = program, kept  # outlive the modules
"""


@pytest.mark.parametrize(("driver", "said"), [("there", ""), ("gone", "CUDA_ERROR_DEINITIALIZED")])
def test_a_process_may_end_while_objects_live(driver: str, said: str) -> None:
    """Also once the driver has shut down before them."""
    image = stand_in.fatbin([("ptx", 80)]).hex()
    output = driver_process.run(
        EXITS, driver, image, COPY.tobytes().hex(), environment=stand_in.environment()
    )
    assert said in output and bool(said) == bool(output)


def test_objects_may_be_closed_in_any_order() -> None:
    with stand_in.nothing_left_over():
        stream, event = cuda.Stream(0), cuda.Event(0)
        event.record(stream.handle)
        stream.close()
        event.synchronize()
        cuda.begin_capture(0, (stream := cuda.Stream(0)).handle)
        graph = cuda.end_capture(0, stream.handle)
        stream.close()
        for owner in (event, graph, stream):
            owner.close()
            owner.close()
        for use in (lambda: event.done, lambda: graph.launch(0), lambda: stream.handle):
            with pytest.raises(ValueError, match="this object was closed"):
                use()


def test_objects_may_be_collected_during_a_capture() -> None:
    """Freeing is refused then, unless the thread says that it knows what it does."""
    with stand_in.nothing_left_over():
        program = cuda.CopyProgram(0, COPY.tobytes(), [0], [4], [0], [4])
        source, target = np.ones((2, 4), np.float32)
        addresses = [np.array([array.ctypes.data], np.uint64) for array in (source, target)]
        stream = cuda.Stream(0)
        program.launch(*addresses, 0)
        cuda.begin_capture(0, stream.handle)
        del program
        assert (target == source).all()
        cuda.end_capture(0, stream.handle).close()
        stream.close()


def test_allocating_during_a_capture_is_refused() -> None:
    stream = cuda.Stream(0)
    cuda.begin_capture(0, stream.handle)
    with pytest.raises(cuda.CudaError, match="CAPTURE_UNSUPPORTED.*run once before capturing"):
        cuda.DeviceMemory(0, 8)
    with pytest.raises(cuda.CudaError, match="CAPTURE_INVALIDATED"):
        cuda.end_capture(0, stream.handle)


def test_work_on_another_device_s_stream_is_refused() -> None:
    stream = cuda.Stream(1)
    with pytest.raises(cuda.CudaError, match="cuStreamSynchronize failed on GPU-.*INVALID_HANDLE"):
        cuda.synchronize(0, stream.handle)


def test_too_much_memory_is_refused() -> None:
    for kind in (cuda.DeviceMemory, cuda.SharedDeviceMemory):
        with pytest.raises(cuda.CudaError, match=r"OUT_OF_MEMORY.*free memory on this GPU"):
            kind(0, 1 << 40)
    with pytest.raises(cuda.CudaError, match=r"OUT_OF_MEMORY"):
        cuda.DeviceMemory(0, (1 << 64) - 1)


def test_the_default_stream_cannot_be_captured() -> None:
    with pytest.raises(cuda.CudaError, match="CAPTURE_UNSUPPORTED.*run once before capturing"):
        cuda.begin_capture(0, 0)
    assert not cuda.is_capturing(0, 0)


def test_images_cannot_be_exchanged_once_loaded() -> None:
    stand_in.load()
    cuda.CopyProgram(0, b"", [], [], [], [])
    cuda.set_image(stand_in.image())
    with pytest.raises(ValueError, match="kernels of another image are loaded already"):
        cuda.set_image(stand_in.fatbin([("elf", 90)]))
