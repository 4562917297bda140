"""What an arena refuses to attach to or to allocate, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from lora_refit.arena import ArenaLayout, ArenaReader, ArenaWriter
from lora_refit.arena import memory as arena_memory
from lora_refit.arena.capacity import available_bytes
from lora_refit.errors import (
    LayoutMismatch,
    ReaderTimeout,
    StaleArena,
    TransportUnavailable,
    WriterTimeout,
)

LAYOUT = ArenaLayout((1000, 2, 4096))
SPEC = bytes(range(32))
RANK = 3


@pytest.fixture
def writer() -> Iterator[ArenaWriter]:
    with contextlib.closing(ArenaWriter(LAYOUT, RANK, SPEC, timeout_s=0.02)) as writer:
        yield writer


@pytest.fixture
def reader(writer: ArenaWriter) -> Iterator[ArenaReader]:
    with contextlib.closing(ArenaReader(writer.handle, SPEC, timeout_s=0.02)) as reader:
        yield reader


def publish(writer: ArenaWriter, sequence: int) -> None:
    writer.begin(sequence)
    writer.publish(sequence, sequence, np.zeros(LAYOUT.entry_count, np.uint64))


def patch_control_page(writer: ArenaWriter, offset: int, value: bytes) -> None:
    os.pwrite(writer.handle.fd, value, offset)


def open_descriptors_and_mappings() -> tuple[int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return len(os.listdir("/proc/self/fd")), maps.count("memfd:lora_refit")


# Attaching to something else


def test_layout_digest_is_compared(writer: ArenaWriter) -> None:
    with pytest.raises(LayoutMismatch, match=f"rank {RANK} .*layout digest {SPEC.hex()}"):
        ArenaReader(writer.handle, bytes(32))
    with pytest.raises(LayoutMismatch, match="has 32 bytes, not 4"):
        ArenaWriter(LAYOUT, RANK, b"long")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"token": bytes(16)}, TransportUnavailable, "token differs"),
        ({"fd": 10_000}, TransportUnavailable, "No such file"),
        ({"fd": -1}, TransportUnavailable, "No such file"),
        ({"pid": 2**22 + 1}, TransportUnavailable, f"rank {RANK} .*No such file"),
        ({"total_bytes": 12_288}, LayoutMismatch, "says 12288 bytes, its entries need"),
        ({"entry_bytes": (1000, -2)}, LayoutMismatch, "entry 1 has size -2"),
        ({"entry_bytes": (1000, 2)}, LayoutMismatch, "its entries need"),
        ({"entry_bytes": (1002, 2, 4096)}, None, ""),
    ],
)
def test_a_handle_that_does_not_fit(
    writer: ArenaWriter, change: dict[str, object], error: type[Exception] | None, message: str
) -> None:
    handle = msgspec.structs.replace(writer.handle, **change)
    if error is None:
        # Padding hides the two bytes; the layout digest is what tells such specs apart.
        ArenaReader(handle, SPEC).close()
        return
    with pytest.raises(error, match=message):
        ArenaReader(handle, SPEC)


def test_a_handle_of_a_dead_process(writer: ArenaWriter) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    handle = msgspec.structs.replace(writer.handle, pid=child.pid)
    with pytest.raises(TransportUnavailable, match=rf"rank {RANK} \(pid {child.pid}\).*same user"):
        ArenaReader(handle, SPEC)


def unsealed_memfd() -> int:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.truncate(fd, LAYOUT.total_bytes)
    return fd


def plain_file(directory: Path) -> int:
    fd = os.open(directory / "plain", os.O_RDWR | os.O_CREAT)
    os.truncate(fd, LAYOUT.total_bytes)
    return fd


def test_a_descriptor_of_something_else(writer: ArenaWriter, tmp_path: Path) -> None:
    pipe_out, pipe_in = os.pipe()
    others = {
        pipe_out: "not a shared memory file",
        plain_file(tmp_path): "not a memfd",
        unsealed_memfd(): "not sealed",
        os.open(tmp_path, os.O_RDONLY): "Is a directory",
    }
    for fd, reason in others.items():
        with pytest.raises(TransportUnavailable, match=reason):
            ArenaReader(msgspec.structs.replace(writer.handle, fd=fd), SPEC)
        os.close(fd)
    os.close(pipe_in)


def test_a_shorter_file(writer: ArenaWriter) -> None:
    with contextlib.closing(ArenaWriter(ArenaLayout(()), RANK, SPEC)) as small:
        handle = msgspec.structs.replace(writer.handle, fd=small.handle.fd)
        with pytest.raises(TransportUnavailable, match=r"\d+ bytes long, the handle says"):
            ArenaReader(handle, SPEC)


HEADER_FIELDS = [
    pytest.param(0, 8, TransportUnavailable, "is no arena", id="magic"),
    pytest.param(8, 8, TransportUnavailable, "arena format", id="format version"),
    pytest.param(16, 16, TransportUnavailable, "token differs", id="token"),
    pytest.param(32, 32, LayoutMismatch, "layout digest", id="layout digest"),
    pytest.param(64, 8, LayoutMismatch, "entry_count is", id="entry count"),
    pytest.param(72, 8, LayoutMismatch, "half_bytes is", id="half bytes"),
    pytest.param(80, 8, LayoutMismatch, "reader_capacity is", id="reader capacity"),
]


@pytest.mark.parametrize("poison", [b"\x00", b"\xff"])
@pytest.mark.parametrize(("offset", "size", "error", "message"), HEADER_FIELDS)
def test_a_corrupted_header(
    writer: ArenaWriter,
    offset: int,
    size: int,
    error: type[Exception],
    message: str,
    poison: bytes,
) -> None:
    patch_control_page(writer, offset, poison * size)
    with pytest.raises(error, match=message):
        ArenaReader(writer.handle, SPEC)


def test_corrupted_words_move_no_access(writer: ArenaWriter, reader: ArenaReader) -> None:
    """Sequence, version, state and pins of all ones end in typed errors, not in wild accesses."""
    publish(writer, 1)
    patch_control_page(writer, 128, b"\xff" * 128)
    with pytest.raises(StaleArena, match=f"newest published is {2**64 - 1}"):
        reader.pin(1, 1)
    assert reader.latest() == (2**64 - 1, -1)
    patch_control_page(writer, 128, b"\x00" * 128)
    patch_control_page(writer, 128 + 16, struct.pack("<Q", 99))
    with pytest.raises(WriterTimeout, match="in unknown state 99"):
        reader.pin(2**62, 1)
    patch_control_page(writer, 256, b"\xff" * 64 * 64)
    writer.begin(2)
    writer.abandon(2)
    with pytest.raises(ReaderTimeout, match=f"keeps sequence {2**64 - 1}"):
        writer.begin(3)


def test_the_65th_reader_is_refused_by_name(writer: ArenaWriter) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(contextlib.closing(ArenaReader(writer.handle, SPEC)))
        message = rf"rank {RANK} .*all 64 reader places are taken, by processes \[{os.getpid()}\]"
        with pytest.raises(TransportUnavailable, match=message):
            ArenaReader(writer.handle, SPEC)
    ArenaReader(writer.handle, SPEC).close()


# Memory and limits


def test_memory_is_private_sealed_and_allocated(writer: ArenaWriter) -> None:
    status = os.fstat(writer.handle.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= writer.handle.total_bytes == status.st_size
    assert not os.get_inheritable(writer.handle.fd)
    for size in (0, 2 * writer.handle.total_bytes):
        with pytest.raises(PermissionError):
            os.truncate(writer.handle.fd, size)


def test_readers_cannot_write_the_data(reader: ArenaReader) -> None:
    address = int(reader.entry_addresses(0)[0])
    maps = Path("/proc/self/maps").read_text()
    (line,) = [row for row in maps.splitlines() if row.startswith(f"{address:x}-")]
    assert re.search(r" r--s ", line)


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(TransportUnavailable, match=rf"rank {RANK}: .* bytes of shared memory are"):
        ArenaWriter(ArenaLayout((2**45,)), RANK, SPEC)


def address_space_left_for(nbytes: int) -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize() + nbytes


LIMITS = [
    pytest.param(resource.RLIMIT_FSIZE, lambda: 1 << 20, "File too large", id="file size"),
    pytest.param(
        resource.RLIMIT_AS, lambda: address_space_left_for(8 << 20), "Cannot alloc", id="memory"
    ),
    pytest.param(resource.RLIMIT_NOFILE, lambda: 0, "Too many open files", id="descriptors"),
]


@pytest.mark.parametrize(("limit", "value", "message"), LIMITS)
def test_a_resource_limit_is_a_typed_error_and_leaks_nothing(
    limit: int, value: Callable[[], int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_memory, "available_bytes", lambda: 2**40)
    before = open_descriptors_and_mappings()
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value(), hard))
    try:
        with pytest.raises(TransportUnavailable, match=f"rank {RANK}: .*{message}"):
            ArenaWriter(ArenaLayout((8 << 20,)), RANK, SPEC)
    finally:
        resource.setrlimit(limit, (soft, hard))
    assert open_descriptors_and_mappings() == before


def test_a_container_limit_counts(tmp_path: Path) -> None:
    group = tmp_path / "sys/fs/cgroup/pod/trainer"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:  50 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/old\n0::/pod/trainer\n")
    assert available_bytes(tmp_path) == 50 * 1024

    def limit(directory: Path, maximum: str, current: int, inactive: int) -> None:
        (directory / "memory.max").write_text(f"{maximum}\n")
        (directory / "memory.current").write_text(f"{current}\n")
        (directory / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")

    limit(group, "max", 70, 0)
    assert available_bytes(tmp_path) == 50 * 1024
    limit(group.parent, "1000", 700, 50)
    assert available_bytes(tmp_path) == 350
    limit(group.parent, "1000", 1700, 50)
    assert available_bytes(tmp_path) == 0


# Nothing is left behind


def test_dropped_arenas_close_themselves() -> None:
    before = open_descriptors_and_mappings()
    writer = ArenaWriter(LAYOUT, RANK, SPEC)
    reader = ArenaReader(writer.handle, SPEC)
    publish(writer, 1)
    reader.pin(1, 1)
    addresses = reader.entry_addresses(1)
    del writer, reader
    assert open_descriptors_and_mappings() == before
    assert addresses.shape == (3,)


def shared_files_mapped() -> set[str]:
    """What this process maps from /dev/shm; other processes come and go there."""
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[-1].strip() for line in maps if "/dev/shm/" in line}


def test_cycles_leave_nothing_behind() -> None:
    shared = shared_files_mapped()
    before = open_descriptors_and_mappings()
    for _ in range(200):
        writer = ArenaWriter(LAYOUT, RANK, SPEC)
        reader = ArenaReader(writer.handle, SPEC)
        publish(writer, 1)
        reader.pin(1, 1)
        assert shared_files_mapped() == shared, "an arena has no name there"
        reader.close()
        writer.close()
    assert open_descriptors_and_mappings() == before


def test_failed_attaches_leave_nothing_behind(writer: ArenaWriter) -> None:
    before = open_descriptors_and_mappings()
    for _ in range(20):
        with pytest.raises(LayoutMismatch):
            ArenaReader(writer.handle, bytes(32))
    assert open_descriptors_and_mappings() == before
