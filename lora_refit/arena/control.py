"""The control page: named, ordered access to the words that writer and readers share."""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from lora_refit import _C
from lora_refit.arena.layout import (
    CACHE_LINE_BYTES,
    HALF_HEADERS_OFFSET,
    HALVES,
    IDENTITY_OFFSET,
    LAYOUT_DIGEST_BYTES,
    READER_CAPACITY,
    READER_WORDS_OFFSET,
    TABLES_OFFSET,
    TOKEN_BYTES,
    WORD_BYTES,
    ArenaLayout,
)
from lora_refit.errors import LayoutMismatch, TransportUnavailable

MAGIC = int.from_bytes(b"LORAREFT", "little")
FORMAT_VERSION = 2
_IDENTITY = struct.Struct(f"<QQ{TOKEN_BYTES}s{LAYOUT_DIGEST_BYTES}sQQQQ")
_VERSION = struct.Struct("<q")


class HalfState(IntEnum):
    """What a half holds, for messages and inspection; the sequence word alone decides."""

    EMPTY = 0
    WRITING = 1
    PUBLISHED = 2


@dataclass(frozen=True)
class Identity:
    """The part of the control page that never changes after creation."""

    token: bytes
    layout_digest: bytes
    entry_count: int
    half_bytes: int
    note_words: int
    magic: int = MAGIC
    format_version: int = FORMAT_VERSION
    reader_capacity: int = READER_CAPACITY

    @classmethod
    def of(cls, layout: ArenaLayout, token: bytes, layout_digest: bytes) -> Identity:
        return cls(token, layout_digest, layout.entry_count, layout.half_bytes, layout.note_words)

    def pack(self) -> bytes:
        return _IDENTITY.pack(
            self.magic,
            self.format_version,
            self.token,
            self.layout_digest,
            self.entry_count,
            self.half_bytes,
            self.reader_capacity,
            self.note_words,
        )

    @classmethod
    def unpack(cls, raw: bytes) -> Identity:
        magic, version, token, digest, entries, half_bytes, capacity, notes = _IDENTITY.unpack(raw)
        return cls(token, digest, entries, half_bytes, notes, magic, version, capacity)

    def require(self, expected: Identity, arena: str) -> None:
        """Compare with what the handle says, so that later nothing read from the page is trusted.

        Raises:
            TransportUnavailable: this is another file, another arena or another build's arena.
            LayoutMismatch: the right arena, but packed for another spec.
        """
        if self.magic != expected.magic:
            raise TransportUnavailable(
                f"{arena}: the file is no arena (magic {self.magic:#x}); "
                "the trainer was restarted: attach again with its new spec"
            )
        if self.format_version != expected.format_version:
            raise TransportUnavailable(
                f"{arena}: arena format {self.format_version}, this build reads format "
                f"{expected.format_version}; install the same lora_refit on both sides"
            )
        if self.token != expected.token:
            raise TransportUnavailable(
                f"{arena}: the token differs, so this is another arena under a reused pid or file "
                "descriptor; attach again with the trainer's new spec"
            )
        if self.layout_digest != expected.layout_digest:
            raise LayoutMismatch(
                f"{arena}: layout digest {self.layout_digest.hex()}, expected "
                f"{expected.layout_digest.hex()}; attach again with the trainer's new spec"
            )
        for name in ("entry_count", "half_bytes", "reader_capacity", "note_words"):
            found, wanted = getattr(self, name), getattr(expected, name)
            if found != wanted:
                raise LayoutMismatch(f"{arena}: {name} is {found}, the handle says {wanted}")


class ControlPage:
    """Reads and writes the control page of one mapped arena.

    Every offset comes from `layout` and every index from the caller: nothing found on the page is
    used as a length, an offset or a count.
    """

    def __init__(self, memory: mmap.mmap, layout: ArenaLayout) -> None:
        self._memory = memory
        self._base = address_of(memory)
        self._table_bytes = layout.table_words * WORD_BYTES

    def write_identity(self, identity: Identity) -> None:
        self._memory[IDENTITY_OFFSET : IDENTITY_OFFSET + _IDENTITY.size] = identity.pack()

    def identity(self) -> Identity:
        return Identity.unpack(self._memory[IDENTITY_OFFSET : IDENTITY_OFFSET + _IDENTITY.size])

    # Per half

    def sequence(self, half: int) -> int:
        """The published sequence, 0 if none; what was written before it is visible afterwards."""
        return _C.load_acquire(self._base + _half_offset(half))

    def show(self, half: int, sequence: int) -> None:
        """Publish `sequence`, or nothing when it is 0, after all that was written before."""
        self._set_state(half, HalfState.PUBLISHED if sequence else HalfState.EMPTY)
        _C.store_release(self._base + _half_offset(half), sequence)

    def hide(self, half: int) -> None:
        """Make the half unreadable before the pins are looked at (W1, W2 of the protocol)."""
        _C.store_release(self._base + _half_offset(half), 0)
        _C.fence_seq_cst()
        self._set_state(half, HalfState.WRITING)

    def state(self, half: int) -> str:
        value = _C.load_acquire(self._base + _half_offset(half) + 2 * WORD_BYTES)
        names = {int(state): state.name for state in HalfState}
        return names.get(value, f"in unknown state {value}")

    def _set_state(self, half: int, state: HalfState) -> None:
        _C.store_release(self._base + _half_offset(half) + 2 * WORD_BYTES, state)

    def version(self, half: int) -> int:
        (version,) = _VERSION.unpack_from(self._memory, _half_offset(half) + WORD_BYTES)
        return int(version)

    def table(self, half: int) -> npt.NDArray[np.uint64]:
        """A copy of the digests and notes, uint64 [table words]."""
        start = self._table_offset(half)
        return np.frombuffer(bytearray(self._memory[start : start + self._table_bytes]), np.uint64)

    def write_contents(self, half: int, version: int, table: npt.NDArray[np.uint64]) -> None:
        _VERSION.pack_into(self._memory, _half_offset(half) + WORD_BYTES, version)
        start = self._table_offset(half)
        self._memory[start : start + self._table_bytes] = table.tobytes()

    def newest(self) -> tuple[int, int]:
        """(sequence, version) of the newest published half, (0, -1) when nothing is published.

        Takes no pin: the version is believed only if no sequence word changed around its read, and
        every further round means that the writer moved on.
        """
        while True:
            sequences = [self.sequence(half) for half in range(HALVES)]
            newest = max(sequences)
            version = self.version(sequences.index(newest))
            _C.fence_seq_cst()
            if sequences == [self.sequence(half) for half in range(HALVES)]:
                return (newest, version) if newest else (0, -1)

    def _table_offset(self, half: int) -> int:
        return TABLES_OFFSET + half * self._table_bytes

    # Per reader

    def pin(self, reader: int) -> int:
        """The sequence that the reader pins, 0 if none; its earlier reads are over afterwards."""
        return _C.load_acquire(self._base + reader_offset(reader))

    def announce_pin(self, reader: int, sequence: int) -> None:
        """Pin `sequence` before the sequence word is looked at again (R2, R3 of the protocol)."""
        _C.store_release(self._base + reader_offset(reader), sequence)
        _C.fence_seq_cst()

    def release_pin(self, reader: int) -> None:
        """Release the pin after all earlier reads."""
        _C.store_release(self._base + reader_offset(reader), 0)

    def clear_pin(self, reader: int, sequence: int) -> None:
        """Release a dead reader's pin, unless a new reader has the index and a pin of its own."""
        _C.compare_exchange(self._base + reader_offset(reader), sequence, 0)

    def vacate(self, reader: int) -> None:
        """Release the pin after all earlier reads, then clear the rest of the reader's line."""
        for offset in range(0, CACHE_LINE_BYTES, WORD_BYTES):
            _C.store_release(self._base + reader_offset(reader) + offset, 0)

    def reader_pid(self, reader: int) -> int:
        return _C.load_acquire(self._base + reader_offset(reader) + WORD_BYTES)

    def set_reader_pid(self, reader: int, pid: int) -> None:
        _C.store_release(self._base + reader_offset(reader) + WORD_BYTES, pid)


def address_of(memory: mmap.mmap) -> int:
    """Start of the mapping; no view stays alive, so the mapping can still be closed."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _half_offset(half: int) -> int:
    if not 0 <= half < HALVES:
        raise IndexError(f"an arena has halves 0 and 1, not {half}")
    return HALF_HEADERS_OFFSET + half * CACHE_LINE_BYTES


def reader_offset(reader: int) -> int:
    """Of the reader's cache line: pin, process id, and in a ring its session and what it asks for."""
    if not 0 <= reader < READER_CAPACITY:
        raise IndexError(f"reader index {reader} is not below {READER_CAPACITY}")
    return READER_WORDS_OFFSET + reader * CACHE_LINE_BYTES
