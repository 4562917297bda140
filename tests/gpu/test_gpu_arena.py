"""Arenas in GPU memory: which kind of sharing is chosen, and what is said where none works."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from cpu_as_gpu import GPU, pretend
from stand_in import StandIn

from lora_refit import _C
from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter, creation, device_region
from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.kernels import BLOCK_DTYPE, BufferType, CapturedCopy, CopyKernel
from lora_refit.messages import HostStorage, IpcStorage, VmmStorage

LAYOUT = ArenaLayout((4096, 128))
DIGEST = bytes(range(32))
NOT_SUPPORTED = 801
OUT_OF_MEMORY = 2
OTHER_GPU = torch.device("cuda", 1)


@pytest.fixture
def driver() -> Iterator[StandIn]:
    with pretend() as stand_in:
        before = stand_in.live()
        yield stand_in
        assert stand_in.live() == before, "an arena left something behind"


def writer(memory: str = "auto") -> ArenaWriter:
    return ArenaWriter(LAYOUT, 0, DIGEST, device=GPU, memory=memory)


def read_back(arena: ArenaWriter, device: torch.device = GPU) -> str:
    """Publish bytes written through the writer's mapping, read them through a reader's; returns the
    reader's transport."""
    half = arena.begin(1)
    for address, nbytes in zip(arena.entry_addresses(half), LAYOUT.entry_bytes, strict=True):
        _C.cuda.copy_from_host(0, int(address), bytes([7]) * nbytes)
    arena.publish(1, 5, np.zeros(2, np.uint64))
    with closing(ArenaReader(arena.handle, DIGEST, device=device)) as reader:
        pinned = reader.pin(1, 5)
        addresses = reader.entry_addresses(pinned.half)
        for address, nbytes in zip(addresses, LAYOUT.entry_bytes, strict=True):
            assert (
                _C.cuda.copy_to_host(device.index or 0, int(address), nbytes) == bytes([7]) * nbytes
            )
        return reader.transport


@pytest.mark.parametrize(
    ("memory", "storage", "transport"),
    [
        ("auto", IpcStorage, "CUDA IPC"),
        ("ipc", IpcStorage, "CUDA IPC"),
        ("vmm", VmmStorage, "CUDA VMM file descriptor"),
        ("host", HostStorage, "pinned host memory (memfd)"),
    ],
)
def test_each_kind_of_memory(driver: StandIn, memory: str, storage: type, transport: str) -> None:
    with closing(writer(memory)) as arena:
        assert isinstance(arena.handle.storage, storage)
        in_file = isinstance(arena.handle.storage, HostStorage)
        assert arena.handle.total_bytes == (LAYOUT.total_bytes if in_file else LAYOUT.control_bytes)
        assert read_back(arena) == transport


def test_auto_falls_back_and_says_so(driver: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), driver.failing("cuIpcGetMemHandle", NOT_SUPPORTED):
        with closing(writer()) as arena:
            assert read_back(arena) == "CUDA VMM file descriptor"
        assert "no ipc memory" in caplog.text and "cuIpcGetMemHandle" in caplog.text


def test_without_any_sharing_auto_pins_host_memory(driver: StandIn) -> None:
    with driver.failing("cuIpcGetMemHandle", NOT_SUPPORTED):
        real = _C.cuda.SharedDeviceMemory

        def refuses(device: int, nbytes: int) -> None:
            raise _C.cuda.CudaError("cuMemCreate: CUDA_ERROR_NOT_SUPPORTED")

        _C.cuda.SharedDeviceMemory = refuses
        try:
            with closing(writer()) as arena:
                assert read_back(arena) == "pinned host memory (memfd)"
        finally:
            _C.cuda.SharedDeviceMemory = real


def test_a_full_gpu_is_an_error_and_not_a_fallback(driver: StandIn) -> None:
    with (
        driver.failing("cuMemAlloc", OUT_OF_MEMORY),
        pytest.raises(TransportUnavailable, match="arena of trainer rank 0: cuMemAlloc.*GPU-"),
    ):
        writer()


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
def test_what_was_asked_for_is_not_replaced(driver: StandIn, memory: str) -> None:
    call = {"ipc": "cuIpcGetMemHandle", "vmm": "cuMemExportToShareableHandle"}[memory]
    with driver.failing(call, NOT_SUPPORTED), pytest.raises(TransportUnavailable, match=call):
        writer(memory)


def test_a_cpu_engine_cannot_read_gpu_memory(driver: StandIn) -> None:
    with (
        closing(writer("ipc")) as arena,
        pytest.raises(TransportUnavailable, match='GPU-.*slots are on the CPU.*memory="host"'),
    ):
        ArenaReader(arena.handle, DIGEST)


def test_a_cpu_engine_reads_pinned_host_memory(driver: StandIn) -> None:
    with closing(writer("host")) as arena:
        assert read_back(arena, torch.device("cpu")) == "shared memory (memfd)"


def test_a_gpu_that_the_reader_does_not_see_is_named(driver: StandIn) -> None:
    with closing(writer("vmm")) as arena:
        storage = msgspec.structs.replace(arena.handle.storage, device="GPU-of-somebody-else")
        handle = msgspec.structs.replace(arena.handle, storage=storage)
        with pytest.raises(
            TransportUnavailable, match="lies on GPU-of-somebody-else.*CUDA_VISIBLE_DEVICES"
        ):
            ArenaReader(handle, DIGEST, device=GPU)


def test_a_peer_that_cannot_be_reached_is_named(
    driver: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(writer("vmm")) as arena:
        assert read_back(arena, OTHER_GPU) == "CUDA VMM file descriptor"
        monkeypatch.setattr(_C.cuda, "can_access_peer", lambda device, other: False)
        with pytest.raises(TransportUnavailable, match='cannot access as a peer.*memory="host"'):
            ArenaReader(arena.handle, DIGEST, device=OTHER_GPU)


def test_an_arena_of_a_trainer_that_closed_is_gone(driver: StandIn) -> None:
    for memory in ("vmm", "host"):
        arena = writer(memory)
        arena.close()
        with pytest.raises(TransportUnavailable, match="arena of trainer rank 0"):
            ArenaReader(arena.handle, DIGEST, device=GPU)


def test_a_reader_in_the_exporting_process_keeps_the_memory(driver: StandIn) -> None:
    arena = writer("ipc")
    reader = ArenaReader(arena.handle, DIGEST, device=GPU)
    address = int(reader.entry_addresses(0)[0])
    arena.close()
    _C.cuda.copy_from_host(0, address, b"still there")
    assert _C.cuda.copy_to_host(0, address, 11) == b"still there"
    reader.close()


def one_row(numel: int) -> np.ndarray:
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, numel), 1.0
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    return blocks


def test_a_captured_copy_replays_and_captures_again_when_buffers_move(driver: StandIn) -> None:
    kind = BufferType(torch.float32, 100)
    kernel = CopyKernel(one_row(100), [kind], [kind], GPU)
    stream = _C.cuda.Stream(0)
    captured = CapturedCopy(kernel, stream.handle)
    buffers = [(torch.randn(100), torch.zeros(100)) for _ in range(2)]
    for turn, (source, target) in enumerate([buffers[0]] * 3 + [buffers[1]] * 2 + [buffers[0]]):
        source.normal_()
        places = [np.asarray([tensor.data_ptr()], np.uint64) for tensor in (source, target)]
        driver.take_calls()
        digests = captured.run(*places)
        assert torch.equal(source, target)
        on_cpu = CopyKernel(one_row(100), [kind], [kind])
        assert digests.tolist() == on_cpu.run(*places).tolist()
        replayed = "cuGraphLaunch" in driver.take_calls()
        assert replayed == (turn in (1, 2, 4))
    assert captured.captures == 3
    captured.close()
    stream.close()


def test_a_kernel_on_the_cpu_cannot_be_captured() -> None:
    kind = BufferType(torch.float32, 4)
    with pytest.raises(TransportUnavailable, match="on cpu cannot be captured"):
        CapturedCopy(CopyKernel(one_row(4), [kind], [kind]), 1)


def test_the_arena_of_a_parent_is_not_its_childs(driver: StandIn) -> None:
    """A forked child may close what it inherited, and nothing happens to the parent's memory."""
    with closing(writer("ipc")) as arena:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                arena.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert read_back(arena) == "CUDA IPC"


def test_ipc_memory_is_not_freed_under_a_reader(
    driver: StandIn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned reader keeps the memory alive beyond close; one that lets go in time does not."""
    monkeypatch.setattr(creation, "TAKE_BACK_TIMEOUT_S", 0.2)
    for pinned in (True, False):
        arena = writer("ipc")
        reader = ArenaReader(arena.handle, DIGEST, device=GPU)
        arena.begin(1)
        arena.publish(1, 5, np.zeros(2, np.uint64))
        reader.pin(1, 5)
        if not pinned:
            reader.release()
        driver.take_calls()
        with caplog.at_level(logging.WARNING):
            arena.close()
        reader.close()
        assert ("cuMemFree" in driver.take_calls()) is not pinned
        assert ("keeps its pin" in caplog.text) is pinned
        caplog.clear()
    device_region._abandoned.pop()()


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
def test_gpu_memory_for_a_cpu_adapter_is_refused(memory: str) -> None:
    with pytest.raises(TransportUnavailable, match=f'memory="{memory}" is GPU memory'):
        ArenaWriter(LAYOUT, 0, DIGEST, memory=memory)
    with pytest.raises(TransportUnavailable, match="memory='elsewhere': use one of"):
        ArenaWriter(LAYOUT, 0, DIGEST, memory="elsewhere")


class ForeignArray:
    def __init__(self, tensor: torch.Tensor, stream: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "stream": stream,
        }


def test_the_stream_that_fills_a_foreign_array_is_waited_for(driver: StandIn) -> None:
    kind = BufferType(torch.float32, 100)
    kernel = CopyKernel(one_row(100), [kind], [kind], GPU)
    source, target = torch.randn(100), torch.zeros(100)
    stream = _C.cuda.Stream(0)
    driver.take_calls()
    kernel.copy([ForeignArray(source, stream.handle)], [target])
    calls = driver.take_calls()
    assert calls.index("cuStreamSynchronize") < calls.index("cuLaunchKernel")
    assert torch.equal(source, target)
    stream.close()


def test_a_destination_on_another_gpu_is_refused(driver: StandIn) -> None:
    kind = BufferType(torch.float32, 100)
    kernel = CopyKernel(one_row(100), [kind], [kind], OTHER_GPU)
    with pytest.raises(LayoutMismatch, match="destination array 0 lies on cuda:0, .* on cuda:1"):
        kernel.copy([torch.zeros(100)], [torch.zeros(100)])


def test_a_source_on_a_peer_is_made_readable(driver: StandIn) -> None:
    """The source's memory is GPU 0's, the kernel and its destination are GPU 1's."""
    kind = BufferType(torch.float32, 100)
    kernel = CopyKernel(one_row(100), [kind], [kind], OTHER_GPU)
    source, target = _C.cuda.DeviceMemory(0, 400), _C.cuda.DeviceMemory(1, 400)
    values = np.arange(100, dtype=np.float32)
    _C.cuda.copy_from_host(0, source.address, values)
    with mock.patch("lora_refit.kernels.arrays.device_of", lambda tensor: tensor.gpu):
        kernel.copy([PlacedTensor(source.address, GPU)], [PlacedTensor(target.address, OTHER_GPU)])
    assert _C.cuda.copy_to_host(1, target.address, 400) == values.tobytes()
    source.close()
    target.close()


class PlacedTensor(torch.Tensor):
    """A tensor that says to lie at some address of some GPU."""

    def __new__(cls, address: int, gpu: torch.device) -> PlacedTensor:
        return torch.Tensor._make_subclass(cls, torch.zeros(100))

    def __init__(self, address: int, gpu: torch.device) -> None:
        super().__init__()
        self.address, self.gpu = address, gpu

    def data_ptr(self) -> int:
        return self.address
