"""The two data halves of an arena as one process addresses them, and where they can lie."""

from __future__ import annotations

import mmap
from typing import Protocol

from lora_refit.arena.control import address_of
from lora_refit.arena.layout import HALVES, ArenaLayout


class Region(Protocol):
    """Mapped data halves; `address` is valid for the kernels that pack or read them."""

    @property
    def address(self) -> int: ...

    @property
    def transport(self) -> str:
        """How the bytes travel, for reports."""

    def close(self) -> None:
        """Unmap; may be called again."""


class HostRegion:
    """Data halves behind the control page of the shared memory file.

    Raises OSError if there is no address space left.
    """

    transport = "shared memory (memfd)"

    def __init__(self, memory_fd: int, layout: ArenaLayout, *, writable: bool) -> None:
        # Populated, so that no refit pays for page faults.
        self._memory = mmap.mmap(
            memory_fd,
            HALVES * layout.half_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            offset=layout.control_bytes,
        )
        self.address = address_of(self._memory)

    def close(self) -> None:
        self._memory.close()
