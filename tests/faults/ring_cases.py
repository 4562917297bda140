"""A bucket ring with random contents, what serves it, and what reads it in a child process."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np

from lora_refit.arena import RingReader, RingWriter, Taken
from lora_refit.kernels import digest
from lora_refit.messages import ArenaHandle

BUCKET_BYTES = 1 << 16
BUCKETS = 7
NOTES = 2
SPEC = bytes(32)
RANK = 5
SHORT_S = 0.05


def new_writer(timeout_s: float = SHORT_S) -> RingWriter:
    return RingWriter(BUCKET_BYTES, NOTES, RANK, SPEC, timeout_s)


def attach(handle: ArenaHandle, timeout_s: float = SHORT_S) -> RingReader:
    return RingReader(handle, SPEC, BUCKET_BYTES, NOTES, timeout_s)


def content(publication: int, bucket: int) -> bytes:
    return np.random.default_rng([publication, bucket]).bytes(BUCKET_BYTES)


def digest_at(address: int) -> int:
    return int(digest(np.array([address], np.uint64), np.array([BUCKET_BYTES], np.uint64))[0])


def make(writer: RingWriter, publication: int, bucket: int) -> bool:
    """Fill the bucket if there is a half for it."""
    half = writer.begin(bucket)
    if half is None:
        return False
    address = writer.address(half)
    ctypes.memmove(address, content(publication, bucket), BUCKET_BYTES)
    notes = np.array([publication, bucket], np.float64)
    writer.publish(bucket, half, digest_at(address), notes)
    return True


def is_whole(taken: Taken, publication: int, bucket: int) -> bool:
    return (
        ctypes.string_at(taken.address, BUCKET_BYTES) == content(publication, bucket)
        and digest_at(taken.address) == taken.digest
        and taken.notes.view(np.float64).tolist() == [publication, bucket]
    )


@contextlib.contextmanager
def serving(writer: RingWriter, publication: int) -> Iterator[list[int]]:
    """A thread that makes what is wanted, as a trainer's; yields the buckets that it has made."""
    made: list[int] = []
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            made.extend(b for b in writer.wait_wanted(SHORT_S) if make(writer, publication, b))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield made
    finally:
        ended.set()
        thread.join()


def read_passes(
    connection: Connection, handle: ArenaHandle, publication: int, first: int, ahead: bool
) -> None:
    """Two passes from the bucket `first` on, each bucket checked; sends how many were whole."""
    reader = attach(handle, 30.0)
    connection.send("attached")
    connection.recv()
    reader.open(publication)
    whole = 0
    for step in range(2 * BUCKETS):
        bucket = (first + step) % BUCKETS
        taken = reader.take(bucket)
        if ahead:
            reader.ask((bucket + 1) % BUCKETS)
        whole += is_whole(taken, publication, bucket)
        time.sleep(0)
        whole -= not is_whole(taken, publication, bucket)
        reader.release()
    reader.end()
    connection.send(whole)
    reader.close()
