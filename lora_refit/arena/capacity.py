"""How much memory may still be allocated.

Shared memory that is charged beyond the machine's or the container's limit wakes the kernel's
out-of-memory killer instead of failing, so the limit is looked up before allocating.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that can still be allocated: the machine's, or less where a cgroup (v2) says so.

    Args:
        root: where `proc` and `sys` lie.
    """
    machine = _table(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, min([machine, *_cgroup_headrooms(root)]))


def _cgroup_headrooms(root: Path) -> Iterator[int]:
    """Headroom of this process's cgroup and each of its ancestors that has a limit."""
    mount = root / "sys/fs/cgroup"
    group = mount / _cgroup_path(root)
    for directory in (group, *group.parents):
        if not directory.is_relative_to(mount):
            return
        try:
            limit = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
            reclaimable = _table(directory / "memory.stat").get("inactive_file", 0)
        except FileNotFoundError:
            continue
        if limit != "max":
            yield int(limit) - used + reclaimable


def _cgroup_path(root: Path) -> str:
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line.removeprefix("0::").lstrip("/")
    return ""


def _table(path: Path) -> dict[str, int]:
    """`name number ...` lines, as the kernel writes its statistics."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
