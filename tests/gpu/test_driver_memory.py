"""Memory of the CUDA backend on the stand-in driver: own, of other processes, of the host, of peers."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import driver_process
import numpy as np
import pytest
import stand_in

from lora_refit import _C

cuda = _C.cuda
MIB = 1 << 20


@pytest.fixture(autouse=True)
def driver() -> Iterator[stand_in.StandIn]:
    with stand_in.nothing_left_over() as driver:
        yield driver


@pytest.mark.parametrize("kind", [cuda.DeviceMemory, cuda.SharedDeviceMemory])
@pytest.mark.parametrize("device", [0, 1])
def test_bytes_go_in_and_out(
    kind: type[_C.cuda.DeviceMemory], device: int, driver: stand_in.StandIn
) -> None:
    memory = kind(device, 3 * MIB)
    assert memory.bytes == 4 * MIB  # whole units of 2 MiB, so that a handle shares nothing else
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    cuda.copy_from_host(device, memory.address + 7, data)
    assert cuda.copy_to_host(device, memory.address + 7, 1000) == data.tobytes()
    cuda.memset(device, memory.address + 8, 998, 0)
    left = cuda.copy_to_host(device, memory.address + 7, 1000)
    assert left == bytes([data[0], *bytes(998), data[-1]])
    assert cuda.copy_to_host(device, memory.address, 0) == b""
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="this object was closed"):
        _ = memory.address


def test_uploads_have_arrived_when_they_return() -> None:
    """A stream that does not wait for the default stream sees them."""
    memory, stream = cuda.DeviceMemory(0, 1), cuda.Stream(0)
    seen = np.zeros(4, np.uint8)
    program = cuda.CopyProgram(0, COPY_4_BYTES.tobytes(), [0], [1], [0], [1])
    cuda.copy_from_host(0, memory.address, b"abcd")
    addresses = np.array([memory.address], np.uint64), np.array([seen.ctypes.data], np.uint64)
    program.run(*addresses, np.zeros(1, np.uint64), stream.handle)
    assert seen.tobytes() == b"abcd"


READER = """
memory = {"ipc": lambda: cuda.open_ipc(int(sys.argv[2]), bytes.fromhex(sys.argv[3])),
          "fd": lambda: cuda.open_fd(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))}
try:
    mapping = memory[sys.argv[1]]()
except cuda.CudaError as error:
    sys.exit(f"refused: {error}")
device = int(sys.argv[2])
cuda.set_image(bytes.fromhex(sys.argv[-1]))
seen = cuda.copy_to_host(device, mapping.address, 8)
block = np.frombuffer(bytes.fromhex(input()), np.uint8)
program = cuda.CopyProgram(device, block, [0], [1], [0], [1])
source, target = (np.array([a], np.uint64) for a in (mapping.address, mapping.address + 4))
program.run(source, target, np.zeros(1, np.uint64), 0)
mapping.close()
mapping.close()
print(seen.decode())
"""
COPY_4_BYTES = np.array(
    [(0, 0, 0, 0, (1, 1, 1), (0, 0, 1), (0, 0, 1), 1.0, 0)],
    np.dtype("i4,i4,i8,i8,3i8,3i8,3i8,f4,u4"),
)


def read_elsewhere(*arguments: str, environment: dict[str, str] | None = None) -> str:
    """What another process sees of the memory's first 8 bytes; it copies its first 4 to the next.

    Raises AssertionError with the reason if it is refused.
    """
    image = stand_in.fatbin([("ptx", 80)]).hex()
    process = driver_process.start(
        READER, *arguments, image, environment=environment or stand_in.environment()
    )
    output, errors = process.communicate(COPY_4_BYTES.tobytes().hex() + "\n", timeout=120)
    assert process.returncode == 0, errors
    return output.strip()


@pytest.mark.parametrize("reader", [0, 1])
def test_an_ipc_handle_is_opened_in_another_process(reader: int) -> None:
    """On the same GPU, and on a peer, to which access is enabled by opening."""
    memory = cuda.DeviceMemory(0, 64)
    cuda.copy_from_host(0, memory.address, b"abcdefgh")
    assert read_elsewhere("ipc", str(reader), memory.ipc_handle().hex()) == "abcdefgh"
    assert cuda.copy_to_host(0, memory.address, 8) == b"abcdabcd"


def test_bad_ipc_handles_are_refused(driver: stand_in.StandIn) -> None:
    memory = cuda.DeviceMemory(0, 64)
    handle = memory.ipc_handle()
    with pytest.raises(ValueError, match="an IPC handle has 64 bytes, not 63"):
        cuda.open_ipc(0, handle[:-1])
    with pytest.raises(cuda.CudaError, match="CUDA_ERROR_INVALID_CONTEXT.*exported it"):
        cuda.open_ipc(0, handle)
    memory.close()
    with pytest.raises(AssertionError, match="cuIpcOpenMemHandle.*MAP_FAILED.*must be alive"):
        read_elsewhere("ipc", "0", handle.hex())
    driver.take_calls()


def test_peers_that_cannot_reach_each_other_refuse_a_handle() -> None:
    memory = cuda.DeviceMemory(0, 64)
    alone = stand_in.environment(FAKECUDA_PEERS="0")
    with pytest.raises(AssertionError, match="PEER_ACCESS_UNSUPPORTED.*host shared memory"):
        read_elsewhere("ipc", "1", memory.ipc_handle().hex(), environment=alone)


SERVER = """
import socket
server = socket.socket(fileno=int(sys.argv[1]))
memory = cuda.SharedDeviceMemory(0, 10)
cuda.copy_from_host(0, memory.address, b"abcdefgh")
fd = memory.export_fd()
socket.send_fds(server, [str(memory.bytes).encode()], [fd])
os.close(fd)
server.recv(1)  # the reader is done
print(cuda.copy_to_host(0, memory.address, 8).decode())
"""


@pytest.mark.parametrize("reader", [0, 1])
def test_a_descriptor_is_opened_in_another_process(reader: int) -> None:
    """It travels over a socket, and the memory outlives it."""
    ours, theirs = socket.socketpair()
    os.set_inheritable(theirs.fileno(), True)
    server = driver_process.start(
        SERVER, str(theirs.fileno()), environment=stand_in.environment(), inherit=[theirs.fileno()]
    )
    theirs.close()
    message, (fd,), _, _ = socket.recv_fds(ours, 100, 1)
    mapping = cuda.open_fd(reader, fd, int(message))
    os.close(fd)
    assert cuda.copy_to_host(reader, mapping.address, 8) == b"abcdefgh"
    cuda.copy_from_host(reader, mapping.address, b"ABCD")
    mapping.close()
    ours.send(b"x")
    output, errors = server.communicate(timeout=60)
    ours.close()
    assert output.strip() == "ABCDefgh", errors


def test_bad_descriptors_are_refused(driver: stand_in.StandIn, tmp_path: Path) -> None:
    memory = cuda.SharedDeviceMemory(0, 10)
    fd = memory.export_fd()
    with pytest.raises(cuda.CudaError, match="cuMemMap failed on GPU-.*INVALID_VALUE"):
        cuda.open_fd(0, fd, memory.bytes + 2 * MIB)
    os.close(fd)
    other = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(cuda.CudaError, match="cuMemImportFromShareableHandle failed on GPU-"):
        cuda.open_fd(0, other, memory.bytes)
    os.close(other)
    driver.take_calls()


def test_host_memory_is_registered_for_all_devices(driver: stand_in.StandIn) -> None:
    host = np.zeros(4096, np.uint8)
    mapping = cuda.register_host(0, host.ctypes.data, host.nbytes)
    assert cuda.copy_to_host(1, mapping.address, 4) == bytes(4)
    with pytest.raises(cuda.CudaError, match="ALREADY_REGISTERED.*close the other mapping"):
        cuda.register_host(0, host.ctypes.data + 100, 10)
    mapping.close()
    cuda.register_host(0, host.ctypes.data + 100, 10).close()
    driver.take_calls()


PEERS = """
cuda.set_image(bytes.fromhex(sys.argv[2]))
memory = cuda.DeviceMemory(1, 8)
cuda.copy_from_host(1, memory.address, b"abcdefgh")
program = cuda.CopyProgram(0, bytes.fromhex(sys.argv[3]), [0], [1], [0], [1])
target = np.zeros(1, np.float32)
addresses = [np.array([a], np.uint64) for a in (memory.address, target.ctypes.data)]
try:
    for _ in range(int(sys.argv[1])):
        cuda.enable_peer_access(0, 1)
    program.run(*addresses, np.zeros(1, np.uint64), 0)
except cuda.CudaError as error:
    print(error)
try:
    program.run(*addresses, np.zeros(1, np.uint64), 0)
except cuda.CudaError as error:
    print(error)
print(cuda.can_access_peer(0, 1), cuda.can_access_peer(0, 0), target.tobytes())
"""


@pytest.mark.parametrize(
    ("enabled", "peers", "said"),
    [
        (0, "1", "cuEventSynchronize failed on GPU-.*ILLEGAL_ADDRESS.*without peer access"),
        (1, "1", r"^True False b'abcd'$"),
        (2, "1", r"^True False b'abcd'$"),
        (1, "0", "cuCtxEnablePeerAccess failed on GPU-.*PEER_ACCESS_UNSUPPORTED"),
    ],
)
def test_a_peer_s_memory_needs_peer_access(enabled: int, peers: str, said: str) -> None:
    """Enabling twice is harmless. A kernel that fails takes its context with it."""
    image = stand_in.fatbin([("ptx", 80)]).hex()
    output = driver_process.run(
        PEERS,
        str(enabled),
        image,
        COPY_4_BYTES.tobytes().hex(),
        environment=stand_in.environment(FAKECUDA_PEERS=peers),
    )
    print(output)
    lines = output.splitlines()
    assert len(lines) == (1 if enabled and peers == "1" else 3)
    assert re.search(said, lines[0])


def test_devices_are_found_by_uuid() -> None:
    first, second = cuda.devices()
    assert first.uuid != second.uuid
    assert [device.ordinal for device in (first, second)] == [0, 1]
    assert cuda.ordinal_of(second.uuid) == 1
    assert cuda.ordinal_of("GPU-00000000-0000-0000-0000-000000000000") is None
    assert (first.compute_capability, first.multiprocessors) == ((9, 0), 2)
    assert first.memory_bytes == 8 << 30 and first.name == "Stand-in GPU"
