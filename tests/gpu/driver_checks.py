"""What mutants of csrc/driver break: small checks, each run in a process of its own.

Usage: driver_checks.py EXTENSION CHECK IMAGE, with the image as hexadecimal text.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable

import numpy as np
from mutated_extension import cuda, stand_in

BLOCK = np.dtype("i4,i4,i8,i8,3i8,3i8,3i8,f4,u4")
MERGE_BLOCK = np.dtype("i4,i4,i8,i8,i8,i8,i8,i8,i4,i4,i4,f4")
COPY = np.array([(0, 0, 0, 0, (1, 1, 4), (0, 0, 1), (0, 0, 1), 1.0, 0)], BLOCK)
MERGE = np.array([(0, 0, 0, 0, 1, 4, 4, 4, 0, 0, 0, 1.0)], MERGE_BLOCK)


def addresses(*arrays: np.ndarray) -> list[np.ndarray]:
    return [np.array([array.ctypes.data], np.uint64) for array in arrays]


class Copy:
    """Four numbers from one place to another."""

    def __init__(self, device: int = 0) -> None:
        self.program = cuda.CopyProgram(device, COPY.tobytes(), [0], [4], [0], [4])
        self.digests = np.zeros(1, np.uint64)

    def run(self, source: np.ndarray, target: np.ndarray) -> int:
        self.program.run(*addresses(source, target), self.digests, 0)
        return int(self.digests[0])

    def launch(self, source: np.ndarray, target: np.ndarray, stream: int) -> None:
        self.program.launch(*addresses(source, target), stream)


def numbers(first: float) -> np.ndarray:
    return np.arange(4, dtype=np.float32) + np.float32(first)


def digests_are_those_of_the_run() -> None:
    copy, target = Copy(), np.zeros(4, np.float32)
    first, second = copy.run(numbers(1), target), copy.run(numbers(5), target)
    assert 0 != first != second != 0
    assert copy.run(numbers(1), target) == first


def addresses_follow_the_buffers() -> None:
    copy, targets = Copy(), np.zeros((2, 4), np.float32)
    for i in range(2):
        copy.run(numbers(i + 1), targets[i])
        assert (targets[i] == numbers(i + 1)).all()


def launches_keep_their_order() -> None:
    copy, source, target = Copy(), numbers(1), np.zeros(4, np.float32)
    first, second = cuda.Stream(0), cuda.Stream(0)
    copy.run(source, target)
    target[:] = 0
    copy.launch(source, target, first.handle)
    copy.launch(source, target, second.handle)
    cuda.synchronize(0, second.handle)
    assert (target == source).all()
    target[:] = 0
    cuda.synchronize(0, first.handle)
    assert not target.any()  # the first had come before


def uploads_wait_for_the_launch_before() -> None:
    copy, targets = Copy(), np.zeros((2, 4), np.float32)
    sources = numbers(1), numbers(5)
    streams = cuda.Stream(0), cuda.Stream(0)
    for i in range(2):
        copy.launch(sources[i], targets[i], streams[i].handle)
    for stream in streams:
        cuda.synchronize(0, stream.handle)
    assert (targets[0] == sources[0]).all() and (targets[1] == sources[1]).all()


def failed_runs_are_forgotten() -> None:
    copy, source, target = Copy(), numbers(1), np.zeros(4, np.float32)
    driver = stand_in()
    driver.fakecuda_fail(b"cuMemsetD8Async:2")
    with contextlib.suppress(cuda.CudaError):
        copy.run(source, target)
    driver.fakecuda_fail(b"")
    driver.fakecuda_take_log()
    copy.run(source, target)
    assert b"cuMemcpyHtoDAsync" in driver.fakecuda_take_log()


def uploads_have_arrived() -> None:
    memory, stream = cuda.DeviceMemory(0, 16), cuda.Stream(0)
    copy, seen = Copy(), np.zeros(4, np.float32)
    cuda.copy_from_host(0, memory.address, numbers(1))
    words = [np.array([address], np.uint64) for address in (memory.address, seen.ctypes.data)]
    copy.program.run(*words, copy.digests, stream.handle)
    assert (seen == numbers(1)).all()


def shared_memory_can_be_used() -> None:
    memory = cuda.SharedDeviceMemory(0, 16)
    cuda.copy_from_host(0, memory.address, b"abcd")
    assert cuda.copy_to_host(0, memory.address, 4) == b"abcd"


def merges_get_their_shared_memory() -> None:
    program = cuda.MergeProgram(0, MERGE.tobytes(), b"", [0], [4], [0], [4], 1)
    source, target = numbers(1), np.zeros(4, np.float32)
    digests, sums = np.zeros(1, np.uint64), np.zeros(4, np.uint64)
    program.run(*addresses(source, target), digests, sums, 0)
    assert (target == source).all()


def contexts_are_popped() -> None:
    cuda.synchronize(0, 0)
    assert stand_in().fakecuda_context_depth() == 0


def forked_processes_are_told() -> None:
    cuda.DeviceMemory(0, 8)
    if os.fork() == 0:
        try:
            cuda.DeviceMemory(0, 8)
        except cuda.CudaError as error:
            os._exit("was forked from" not in str(error))
        os._exit(1)
    assert os.wait()[1] == 0


def everything_is_given_back_once() -> None:
    driver, host = stand_in(), np.zeros(16, np.uint8)
    memory, shared = cuda.DeviceMemory(0, 8), cuda.SharedDeviceMemory(0, 8)
    fd = shared.export_fd()
    owners = [memory, shared, cuda.open_fd(0, fd, shared.bytes), cuda.Stream(0), cuda.Event(0)]
    os.close(fd)
    owners.append(cuda.register_host(0, host.ctypes.data, host.nbytes))
    stream = cuda.Stream(0)
    copy = Copy()
    copy.run(numbers(1), numbers(2))
    cuda.begin_capture(0, stream.handle)
    del copy
    owners += [cuda.end_capture(0, stream.handle), stream]
    for owner in owners:
        owner.close()
        owner.close()
    assert driver.fakecuda_live() == b"", driver.fakecuda_live()
    calls = driver.fakecuda_take_log().decode().split()
    assert [call for call in calls if "=" in call] == []


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        digests_are_those_of_the_run,
        addresses_follow_the_buffers,
        launches_keep_their_order,
        uploads_wait_for_the_launch_before,
        failed_runs_are_forgotten,
        uploads_have_arrived,
        shared_memory_can_be_used,
        merges_get_their_shared_memory,
        contexts_are_popped,
        forked_processes_are_told,
        everything_is_given_back_once,
    )
}

if __name__ == "__main__":
    _, name, image = sys.argv
    cuda.set_image(bytes.fromhex(image))
    CHECKS[name]()
