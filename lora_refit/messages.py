"""Messages between trainer ranks, the driver and engine workers: msgspec structs, never pickle."""

from __future__ import annotations

import msgspec


class ArenaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How a reader on the same node finds one trainer rank's arena."""

    rank: int
    pid: int
    fd: int
    token: bytes
    """16 random bytes that the arena's header repeats, so that a reused pid is noticed."""
    total_bytes: int
    entry_bytes: tuple[int, ...]
