"""Bucket rings in GPU memory: each kind of sharing, and memory that a reader still uses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from cpu_as_gpu import GPU, pretend
from stand_in import StandIn

from lora_refit import _C
from lora_refit.arena import RingReader, RingWriter, creation, device_region
from lora_refit.errors import LayoutMismatch
from lora_refit.messages import HostStorage

BUCKET_BYTES = 4096
NOTES = 2
DIGEST = bytes(range(32))


@pytest.fixture
def driver() -> Iterator[StandIn]:
    with pretend() as stand_in:
        before = stand_in.live()
        yield stand_in
        assert stand_in.live() == before, "a ring left something behind"


def make(ring: RingWriter, bucket: int) -> None:
    half = ring.begin(bucket)
    assert half is not None
    _C.cuda.copy_from_host(0, ring.address(half), bytes([bucket]) * BUCKET_BYTES)
    ring.publish(bucket, half, bucket, np.full(NOTES, bucket, np.uint64))


@pytest.mark.parametrize(
    ("memory", "transport"),
    [
        ("auto", "CUDA IPC"),
        ("ipc", "CUDA IPC"),
        ("vmm", "CUDA VMM file descriptor"),
        ("host", "pinned host memory (memfd)"),
    ],
)
def test_each_kind_of_memory(driver: StandIn, memory: str, transport: str) -> None:
    with closing(RingWriter(BUCKET_BYTES, NOTES, 0, DIGEST, device=GPU, memory=memory)) as ring:
        assert isinstance(ring.handle.storage, HostStorage) == (memory == "host")
        with closing(RingReader(ring.handle, DIGEST, BUCKET_BYTES, NOTES, device=GPU)) as reader:
            assert reader.transport == transport
            ring.offer(1, 3)
            reader.open(1)
            for bucket in range(3):
                reader.ask(bucket)
                make(ring, bucket)
                taken = reader.take(bucket)
                content = _C.cuda.copy_to_host(0, taken.address, BUCKET_BYTES)
                assert content == bytes([bucket]) * BUCKET_BYTES
                assert (taken.digest, taken.notes.tolist()) == (bucket, [bucket] * NOTES)
                reader.release()


def test_a_ring_of_other_sizes(driver: StandIn) -> None:
    """Its file has no halves, so only the words on the page tell."""
    with closing(RingWriter(BUCKET_BYTES, NOTES, 0, DIGEST, device=GPU, memory="vmm")) as ring:
        for bucket_bytes, note_words in ((BUCKET_BYTES - 1, 3), (4 * BUCKET_BYTES, NOTES)):
            with pytest.raises(LayoutMismatch, match="handle says"):
                RingReader(ring.handle, DIGEST, bucket_bytes, note_words, device=GPU)


def test_ipc_memory_is_not_freed_under_a_reader(
    driver: StandIn, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned bucket keeps the memory alive beyond close; a session alone does not."""
    monkeypatch.setattr(creation, "TAKE_BACK_TIMEOUT_S", 0.2)
    for pinned in (True, False):
        ring = RingWriter(BUCKET_BYTES, NOTES, 0, DIGEST, device=GPU, memory="ipc")
        reader = RingReader(ring.handle, DIGEST, BUCKET_BYTES, NOTES, device=GPU)
        ring.offer(1, 1)
        make(ring, 0)
        reader.open(1)
        reader.take(0)
        if not pinned:
            reader.release()
        driver.take_calls()
        with caplog.at_level(logging.WARNING):
            ring.close()
        reader.close()
        assert ("cuMemFree" in driver.take_calls()) is not pinned
        assert ("keeps its pin" in caplog.text) is pinned
        caplog.clear()
    device_region._abandoned.pop()()
