"""Where everything lies inside an arena: a function of the entry sizes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from lora_refit.errors import LayoutMismatch
from lora_refit.messages import HostStorage, Storage

PAGE_BYTES = 4096
ENTRY_ALIGNMENT = 256
HALVES = 2
READER_CAPACITY = 64

TOKEN_BYTES = 16
LAYOUT_DIGEST_BYTES = 32
WORD_BYTES = 8

IDENTITY_OFFSET = 0
HALF_HEADERS_OFFSET = 128
READER_WORDS_OFFSET = 256
CACHE_LINE_BYTES = 64
"""Each half's header and each reader's words fill a cache line of their own: no false sharing."""
RING_OFFSET = READER_WORDS_OFFSET + READER_CAPACITY * CACHE_LINE_BYTES
RING_BYTES = 1024
"""Words and message of a bucket ring; nothing in an arena."""
TABLES_OFFSET = RING_OFFSET + RING_BYTES


def align(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes and offsets of an arena, all in bytes.

    Args:
        entry_bytes: size of each entry (one packed tensor of the trainer rank), in arena order.
        note_words: 64-bit words that each half has on the control page beside its digests.

    Raises:
        LayoutMismatch: a size or the number of words is not an integer of at least 0.
    """

    entry_bytes: tuple[int, ...]
    note_words: int = 0

    def __post_init__(self) -> None:
        for index, size in enumerate(self.entry_bytes):
            if type(size) is not int or size < 0:
                raise LayoutMismatch(
                    f"arena entry {index} has size {size!r}; give each entry its bytes, 0 or more"
                )
        if type(self.note_words) is not int or self.note_words < 0:
            raise LayoutMismatch(f"an arena has {self.note_words!r} note words; give 0 or more")

    @property
    def entry_count(self) -> int:
        return len(self.entry_bytes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Offset of each entry within a half, aligned for 256-byte vector accesses."""
        sizes = (align(size, ENTRY_ALIGNMENT) for size in self.entry_bytes[:-1])
        return tuple(accumulate(sizes, initial=0))[: self.entry_count]

    @cached_property
    def half_bytes(self) -> int:
        """One half; never empty, so that a rank without shards takes part like any other."""
        used = self.offsets[-1] + self.entry_bytes[-1] if self.entry_bytes else 0
        return max(PAGE_BYTES, align(used, PAGE_BYTES))

    @property
    def table_words(self) -> int:
        """64-bit words that are published with a half: a digest for each entry, then the notes."""
        return self.entry_count + self.note_words

    @property
    def control_bytes(self) -> int:
        return align(TABLES_OFFSET + HALVES * self.table_words * WORD_BYTES, PAGE_BYTES)

    @property
    def total_bytes(self) -> int:
        """With both halves; the shared memory file of an arena in GPU memory has only the page."""
        return self.control_bytes + HALVES * self.half_bytes

    def file_bytes(self, storage: Storage) -> int:
        """Size of the shared memory file, given where the data halves lie."""
        return self.total_bytes if isinstance(storage, HostStorage) else self.control_bytes
