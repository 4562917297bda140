"""Faults between trainer and worker on a GPU: captures that fail half-way, and handles, arenas and
sockets that are not what they say."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import resources
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
import torch
from cpu_as_gpu import GPU, pretend
from helpers import DictSource, addresses, pair
from stand_in import StandIn

from lora_refit import _C, Publisher, Spec
from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter
from lora_refit.arena import fd_server as fd_server_module
from lora_refit.arena.fd_server import FdServer, receive_fd
from lora_refit.arena_set import ArenaSet
from lora_refit.devices import stream_handle
from lora_refit.errors import LayoutMismatch, TransportUnavailable
from lora_refit.kernels import BLOCK_DTYPE, BufferType, CapturedCopy, CopyKernel
from lora_refit.kernels.cuda import missing
from lora_refit.packed import gather_packed

DIGEST = bytes(range(32))
LAYOUT = ArenaLayout((4096, 128))
KIND = BufferType(torch.float32, 100)
OTHER_GPU = torch.device("cuda", 1)
TOKEN = bytes(16)
UNKNOWN = 999


@pytest.fixture
def driver() -> Iterator[StandIn]:
    with pretend() as stand_in:
        yield stand_in


def one_row() -> np.ndarray:
    blocks = np.zeros(1, BLOCK_DTYPE)
    blocks["size"], blocks["scale"] = (1, 1, KIND.numel), 1.0
    blocks["src_stride"] = blocks["dst_stride"] = (0, 0, 1)
    return blocks


class Copy:
    """A source and a target of the kernel under test."""

    def __init__(self) -> None:
        self.source, self.target = torch.randn(KIND.numel), torch.zeros(KIND.numel)

    @property
    def places(self) -> tuple[np.ndarray, np.ndarray]:
        return addresses([self.source]), addresses([self.target])

    def require_done_by(self, captured: CapturedCopy) -> None:
        self.source.normal_()
        digests = captured.run(*self.places)
        assert torch.equal(self.source, self.target), "the captured copy copied something else"
        on_cpu = CopyKernel(one_row(), [KIND], [KIND])
        assert digests.tolist() == on_cpu.run(*self.places).tolist()


@pytest.fixture
def captured(driver: StandIn) -> Iterator[CapturedCopy]:
    with closing(_C.cuda.Stream(0)) as stream:
        kernel = CopyKernel(one_row(), [KIND], [KIND], GPU)
        with closing(CapturedCopy(kernel, stream.handle)) as copy:
            yield copy


@pytest.mark.parametrize("call", ["cuMemsetD8Async", "cuLaunchKernel", "cuMemcpyDtoHAsync"])
def test_a_capture_that_failed_is_not_replayed(
    driver: StandIn, captured: CapturedCopy, call: str
) -> None:
    first, second = Copy(), Copy()
    first.require_done_by(captured)
    with (
        driver.failing(call, UNKNOWN, occurrence=2),  # the run before the capture is the first
        pytest.raises(TransportUnavailable, match=call),
    ):
        captured.run(*second.places)
    first.require_done_by(captured)
    second.require_done_by(captured)


def test_a_kernel_that_somebody_else_ran_is_captured_again(captured: CapturedCopy) -> None:
    ours, theirs = Copy(), Copy()
    ours.require_done_by(captured)
    captured._kernel.run(*theirs.places)
    ours.require_done_by(captured)
    assert captured.captures == 2


@pytest.mark.parametrize("memory", ["ipc", "vmm"])
@pytest.mark.parametrize("nbytes", [-1, 0, 4096, 2**63, 2**64 - 1])
def test_a_handle_is_not_believed_about_its_size(driver: StandIn, memory: str, nbytes: int) -> None:
    with closing(writer(memory)) as arena:
        storage = msgspec.structs.replace(arena.handle.storage, nbytes=nbytes)
        handle = msgspec.structs.replace(arena.handle, storage=storage)
        with pytest.raises(LayoutMismatch, match=f"trainer rank 0.*says {nbytes} bytes"):
            ArenaReader(handle, DIGEST, device=GPU)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_an_ipc_handle_of_another_length_is_refused(driver: StandIn, length: int) -> None:
    with closing(writer("ipc")) as arena:
        storage = msgspec.structs.replace(arena.handle.storage, handle=bytes(length))
        handle = msgspec.structs.replace(arena.handle, storage=storage)
        with pytest.raises(LayoutMismatch, match=f"trainer rank 0.*has {length} bytes, not 64"):
            ArenaReader(handle, DIGEST, device=GPU)


@pytest.mark.parametrize("read", [lambda spec: ArenaSet(spec, 1.0, GPU), gather_packed])
@pytest.mark.parametrize("entry_bytes", [(4096, 0), (3840, 1), (256,), (256, 256, 0)])
@pytest.mark.parametrize("memory", ["ipc", "vmm", "host"])
def test_entries_that_the_layout_does_not_have_are_refused(
    driver: StandIn, memory: str, entry_bytes: tuple[int, ...], read: Callable[[Spec], object]
) -> None:
    """Of equal number and total size, so that the arena's own identity agrees."""
    tensors = {"A": torch.randn(2, 64), "B": torch.randn(64, 2)}
    source = DictSource(tensors, lambda now: pair(now["A"], now["B"]))
    with Publisher(source, memory=memory) as publisher:
        publisher.publish(1)
        handle = msgspec.structs.replace(publisher.spec.arenas[0], entry_bytes=entry_bytes)
        altered = msgspec.structs.replace(publisher.spec, arenas=(handle,))
        with pytest.raises(LayoutMismatch, match="trainer rank 0: its entries are not those"):
            read(Spec.from_bytes(altered.to_bytes()))


@pytest.mark.parametrize("memory", ["ipc", "vmm", "host"])
def test_the_exporting_process_may_read_from_another_gpu(driver: StandIn, memory: str) -> None:
    copy = Copy()
    with closing(writer(memory)) as arena:
        half = arena.begin(1)
        _C.cuda.copy_from_host(0, int(arena.entry_addresses(half)[0]), copy.source.numpy())
        arena.publish(1, 5, np.zeros(2, np.uint64))
        with closing(ArenaReader(arena.handle, DIGEST, device=OTHER_GPU)) as reader:
            place = reader.entry_addresses(reader.pin(1, 5).half)[:1]
            CopyKernel(one_row(), [KIND], [KIND], OTHER_GPU).run(place, copy.places[1])
    assert torch.equal(copy.source, copy.target)


def test_a_server_outlives_a_process_without_descriptors_to_spare() -> None:
    accept = socket.socket.accept
    refusals = [OSError(errno.EMFILE, "too many open files"), OSError(errno.ECONNABORTED, "gone")]

    def accept_after_refusals(listener: socket.socket) -> object:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    with (
        mock.patch.object(socket.socket, "accept", accept_after_refusals),
        closing(FdServer(os.memfd_create("served"), TOKEN)) as server,
    ):
        os.close(receive_fd(server.name, TOKEN))
    assert not refusals


def test_a_trainer_that_does_not_answer_is_told_from_one_that_refuses() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
        silent.bind("\0lora_refit-silent")
        silent.listen()
        with (
            mock.patch.object(fd_server_module, "RECEIVE_TIMEOUT_S", 0.05),
            pytest.raises(TimeoutError, match="did not answer.*stopped or hangs"),
        ):
            receive_fd("lora_refit-silent", TOKEN)


def test_an_arena_without_a_server_leaves_nothing_behind(driver: StandIn) -> None:
    before, descriptors = driver.live(), len(os.listdir("/proc/self/fd"))
    no_thread = mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("no thread"))
    with no_thread, pytest.raises(RuntimeError, match="no thread"):
        writer("vmm")
    assert driver.live() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_damaged_build_is_told_from_bad_arguments(driver: StandIn, tmp_path: Path) -> None:
    (tmp_path / "kernels.fatbin").write_bytes(b"cut short")
    with mock.patch.object(resources, "files", lambda package: tmp_path):
        assert missing.__wrapped__() == (
            "kernels.fatbin: the kernel image is not a fatbin; rebuild lora_refit"
        )


@pytest.mark.parametrize("handle", [-1, 2**64])
def test_a_number_that_is_no_stream_is_refused(handle: int) -> None:
    with pytest.raises(LayoutMismatch, match=f"{handle} is no CUDA stream"):
        stream_handle(handle, GPU)


def test_a_device_without_a_number_is_the_one_that_torch_uses(driver: StandIn) -> None:
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "current_device", lambda: 7),
        pytest.raises(LayoutMismatch, match="CUDA device 7 does not exist"),
    ):
        CopyKernel(one_row(), [KIND], [KIND], torch.device("cuda"))


def writer(memory: str) -> ArenaWriter:
    return ArenaWriter(LAYOUT, 0, DIGEST, device=GPU, memory=memory)
