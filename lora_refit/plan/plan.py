"""The plan: an immutable list of strided copy blocks between named buffers.

Pointers are not in a plan: parameters move when a trainer offloads and reloads, so addresses are
looked up when a plan runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lora_refit.errors import LayoutMismatch
from lora_refit.kernels import BLOCK_DTYPE, BufferType, CopyKernel
from lora_refit.plan.blocks import Block

FORMAT = 1

BlockArray = npt.NDArray[np.void]


class Buffer(msgspec.Struct, frozen=True, array_like=True):
    """A flat buffer that blocks read or write; `rank` is the trainer rank or engine worker."""

    name: str
    rank: int
    dtype: str
    numel: int

    @property
    def type(self) -> BufferType:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return BufferType(dtype, self.numel)


class Plan(msgspec.Struct, frozen=True, array_like=True):
    """Copy blocks from source buffers to destination buffers.

    Offsets, sizes and strides are in elements. Equal plans have equal bytes and digests.
    """

    format: int
    sources: tuple[Buffer, ...]
    destinations: tuple[Buffer, ...]
    packed_blocks: bytes

    @staticmethod
    def build(
        sources: Sequence[Buffer], destinations: Sequence[Buffer], blocks: Sequence[Block]
    ) -> Plan:
        array = np.zeros(len(blocks), BLOCK_DTYPE)
        for row, block in zip(array, blocks, strict=True):
            for field in BLOCK_DTYPE.names or ():
                row[field] = getattr(block, field)
        return Plan(FORMAT, tuple(sources), tuple(destinations), array.tobytes())

    @property
    def blocks(self) -> BlockArray:
        """Read-only structured array of BLOCK_DTYPE."""
        return np.frombuffer(self.packed_blocks, BLOCK_DTYPE)

    @property
    def digest(self) -> str:
        """blake2b-128 of the plan's bytes, in hexadecimal."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    def kernel(self, device: torch.device = torch.device("cpu")) -> CopyKernel:
        """A kernel that executes this plan; give it one address for each buffer, in their order."""
        return CopyKernel(
            self.blocks,
            [buffer.type for buffer in self.sources],
            [buffer.type for buffer in self.destinations],
            device,
        )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Plan:
        """Raises LayoutMismatch if the bytes are not a plan of this format."""
        try:
            plan = msgspec.msgpack.decode(data, type=Plan)
        except msgspec.MsgspecError as error:
            raise LayoutMismatch(f"not a saved plan: {error}") from error
        if plan.format != FORMAT:
            raise LayoutMismatch(
                f"plan format {plan.format} cannot be read by this version (format {FORMAT}); "
                "trace again"
            )
        if len(plan.packed_blocks) % BLOCK_DTYPE.itemsize:
            raise LayoutMismatch("the saved plan ends within a block; trace again")
        return plan

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.to_bytes())

    @staticmethod
    def load(path: str | Path) -> Plan:
        return Plan.from_bytes(Path(path).read_bytes())

    def for_rank(self, rank: int) -> Plan:
        """The blocks that read one trainer rank's buffers, over the same buffer lists."""
        ranks = np.asarray([buffer.rank for buffer in self.sources])
        kept = self.blocks[ranks[self.blocks["src"]] == rank]
        return Plan(self.format, self.sources, self.destinations, kept.tobytes())

    def inverse(self) -> Plan:
        """The plan that brings every element back to where it came from.

        Raises LayoutMismatch where that is not defined: an element that is read or written twice,
        or a scale other than one.
        """
        self._require_one_to_one()
        swapped = self.blocks.copy()
        for name in ("", "_offset", "_stride"):
            swapped[f"src{name}"] = self.blocks[f"dst{name}"]
            swapped[f"dst{name}"] = self.blocks[f"src{name}"]
        return Plan(self.format, self.destinations, self.sources, swapped.tobytes())

    def _require_one_to_one(self) -> None:
        scaled = self.blocks[self.blocks["scale"] != 1]
        if len(scaled):
            name = self.destinations[int(scaled[0]["dst"])].name
            raise LayoutMismatch(f"{name}: scaled by {scaled[0]['scale']}; has no exact inverse")
        for side, verb, buffers in (
            ("src", "reads", self.sources),
            ("dst", "writes", self.destinations),
        ):
            for index, buffer in enumerate(buffers):
                touched = [
                    offsets(block, side) for block in self.blocks[self.blocks[side] == index]
                ]
                if touched and len(np.unique(np.concatenate(touched))) != sum(map(len, touched)):
                    raise LayoutMismatch(
                        f"{buffer.name} (rank {buffer.rank}): the plan {verb} some of its elements "
                        "more than once, so it has no unique inverse"
                    )

    def inspect(self, limit: int = 40) -> str:
        """The plan in words, one line a block, at most `limit` blocks."""
        moved = int(np.prod(self.blocks["size"], axis=1).sum()) if len(self.blocks) else 0
        lines = [
            f"plan {self.digest}: {len(self.blocks)} blocks move {moved} elements from "
            f"{len(self.sources)} buffers to {len(self.destinations)}"
        ]
        lines += [self._describe(block) for block in self.blocks[:limit]]
        if len(self.blocks) > limit:
            lines.append(f"... and {len(self.blocks) - limit} more blocks")
        return "\n".join(lines)

    def _describe(self, block: np.void) -> str:
        source = self.sources[int(block["src"])]
        destination = self.destinations[int(block["dst"])]
        size = " x ".join(str(n) for n in block["size"].tolist())
        scale = "" if block["scale"] == 1 else f"  * {block['scale']:.9g}"
        return (
            f"  {destination.name}[{block['dst_offset']}] strides {block['dst_stride'].tolist()}"
            f" <- rank {source.rank} {source.name}[{block['src_offset']}]"
            f" strides {block['src_stride'].tolist()}  {size}{scale}"
        )


def offsets(block: np.void, side: str) -> npt.NDArray[np.int64]:
    """Every element offset that a block touches on one side ("src" or "dst"), in loop order."""
    grids = np.ix_(*(np.arange(n) for n in block["size"].tolist()))
    steps = block[f"{side}_stride"].tolist()
    total = sum(grid * step for grid, step in zip(grids, steps, strict=True))
    return np.asarray(total + int(block[f"{side}_offset"]), np.int64).reshape(-1)
