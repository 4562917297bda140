"""The words that only a bucket ring has on its control page: publication, sessions, asks, failure."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from lora_refit import _C
from lora_refit.arena.control import address_of, reader_offset
from lora_refit.arena.layout import (
    CACHE_LINE_BYTES,
    READER_CAPACITY,
    READER_WORDS_OFFSET,
    RING_BYTES,
    RING_OFFSET,
    WORD_BYTES,
    ArenaLayout,
)

MESSAGE_BYTES = RING_BYTES - CACHE_LINE_BYTES

_PUBLICATION = RING_OFFSET
_BUCKETS = RING_OFFSET + WORD_BYTES
_WITHDRAWN = RING_OFFSET + 2 * WORD_BYTES
_FAILED = RING_OFFSET + 3 * WORD_BYTES
_MESSAGE = RING_OFFSET + CACHE_LINE_BYTES

_PIN_WORD, _SESSION_WORD, _ASK_WORD = 0, 2, 3
"""In a reader's line; the process id lies between."""


class Ask(NamedTuple):
    """A bucket that a reader waits for, or wants next."""

    bucket: int
    waits: bool


class ReaderLines(NamedTuple):
    """words: uint64 [readers, words of a cache line]."""

    words: npt.NDArray[np.uint64]

    def with_sessions(self) -> list[int]:
        """Readers whose session word is set."""
        found: list[int] = np.flatnonzero(self.words[:, _SESSION_WORD]).tolist()
        return found

    def pins(self) -> list[int]:
        """Each reader's pin."""
        pins: list[int] = self.words[:, _PIN_WORD].tolist()
        return pins


def ring_layout(bucket_bytes: int, note_words: int) -> ArenaLayout:
    """A ring's half holds one bucket; its table holds digest, publication and the bucket's notes.

    Raises LayoutMismatch if a size is not an integer of at least 0.
    """
    layout = ArenaLayout((bucket_bytes,), note_words)
    return ArenaLayout(layout.entry_bytes, 1 + layout.note_words)


class RingWords:
    """Ordered access to a ring's words. As on the rest of the page, nothing is used as an offset."""

    def __init__(self, control: mmap.mmap) -> None:
        self._memory = control
        self._base = address_of(control)

    # Of the writer

    def publication(self) -> int:
        """The publication whose sessions may be opened, 0 if none."""
        return _C.load_acquire(self._base + _PUBLICATION)

    def hide_publication(self) -> None:
        """Let no session be opened before the sessions are looked at."""
        _C.store_release(self._base + _PUBLICATION, 0)
        _C.fence_seq_cst()

    def show_publication(self, publication: int) -> None:
        _C.store_release(self._base + _PUBLICATION, publication)

    def buckets(self) -> int:
        """Of the newest publication, for messages."""
        return _C.load_acquire(self._base + _BUCKETS)

    def set_buckets(self, buckets: int) -> None:
        _C.store_release(self._base + _BUCKETS, buckets)

    def withdrawn(self) -> int:
        """Publications up to this one are not served any more."""
        return _C.load_acquire(self._base + _WITHDRAWN)

    def withdraw(self, publication: int) -> None:
        _C.store_release(self._base + _WITHDRAWN, publication)

    def failure(self, publication: int) -> str | None:
        """Why the writer gave up this publication, None if it did not."""
        if self._failed() != publication:
            return None
        raw = self._memory[_MESSAGE : _MESSAGE + MESSAGE_BYTES]
        _C.fence_seq_cst()
        if self._failed() != publication:
            return None  # replaced meanwhile
        return raw.split(b"\0", 1)[0].decode(errors="replace")

    def set_failure(self, publication: int, message: str) -> None:
        _C.store_release(self._base + _FAILED, 0)
        _C.fence_seq_cst()
        raw = message.replace("\0", "").encode(errors="replace")[:MESSAGE_BYTES]
        whole = raw.decode(errors="ignore").encode()  # not ending inside a character
        self._memory[_MESSAGE : _MESSAGE + MESSAGE_BYTES] = whole.ljust(MESSAGE_BYTES, b"\0")
        _C.store_release(self._base + _FAILED, publication)

    def _failed(self) -> int:
        return _C.load_acquire(self._base + _FAILED)

    # Per reader

    def session(self, reader: int) -> int:
        """The publication that the reader has a session of, 0 if none."""
        return _C.load_acquire(self._reader_word(reader, _SESSION_WORD))

    def announce_session(self, reader: int, publication: int) -> None:
        """Open a session before the publication word is looked at again."""
        _C.store_release(self._reader_word(reader, _SESSION_WORD), publication)
        _C.fence_seq_cst()

    def close_session(self, reader: int) -> None:
        _C.store_release(self._reader_word(reader, _SESSION_WORD), 0)

    def clear_session(self, reader: int, publication: int) -> None:
        """Close a dead reader's session, unless a new reader has the index and another session."""
        _C.compare_exchange(self._reader_word(reader, _SESSION_WORD), publication, 0)

    def ask_of(self, reader: int) -> Ask | None:
        word = _C.load_acquire(self._reader_word(reader, _ASK_WORD))
        return Ask(word // 2 - 1, bool(word % 2)) if word else None

    def set_ask(self, reader: int, ask: Ask) -> None:
        """Ask before the halves are looked at."""
        word = 2 * (ask.bucket + 1) + ask.waits
        _C.store_release(self._reader_word(reader, _ASK_WORD), word)
        _C.fence_seq_cst()

    def clear_ask(self, reader: int) -> None:
        """Ask for nothing, after a pin that was stored before."""
        _C.store_release(self._reader_word(reader, _ASK_WORD), 0)

    def look(self) -> ReaderLines:
        """A copy of all readers' words at one cheap look; it may miss what was just stored."""
        end = READER_WORDS_OFFSET + READER_CAPACITY * CACHE_LINE_BYTES
        words = np.frombuffer(self._memory[READER_WORDS_OFFSET:end], np.uint64)
        return ReaderLines(words.reshape(READER_CAPACITY, CACHE_LINE_BYTES // WORD_BYTES))

    def _reader_word(self, reader: int, word: int) -> int:
        return self._base + reader_offset(reader) + word * WORD_BYTES
