"""What trainer and engine agree on once (Spec) and what names a published version (Ticket)."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import torch

from lora_refit.base_samples import BaseSample
from lora_refit.errors import LayoutMismatch
from lora_refit.merged.layout import MergedLayout
from lora_refit.messages import ArenaHandle
from lora_refit.trace.export import ExportMap

FORMAT = 2


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that must not change while an engine is attached.

    dtype: of the arenas, and in adapter mode of the engine's LoRA slots, without the `torch.`
        prefix.
    scale_folded: True if the arenas hold lora_B times alpha / r already.
    base: sampled elements of the adapted base weights. base_gaps: a line for each of them that the
        trainer cannot sample, with the reason.
    merged: what merged mode delivers; None in adapter mode.
    """

    format: int
    dtype: str
    scale_folded: bool
    peft_config: dict[str, Any]
    export_map: ExportMap
    base: tuple[BaseSample, ...] = ()
    base_gaps: tuple[str, ...] = ()
    merged: MergedLayout | None = None

    @property
    def mode(self) -> str:
        """ "adapter" or "merged"."""
        return "adapter" if self.merged is None else "merged"

    @property
    def itemsize(self) -> int:
        """Bytes of one element of an arena."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype.itemsize

    def digest(self) -> bytes:
        """blake2b-256 over the encoded layout."""
        encoded = msgspec.msgpack.encode(self, order="sorted")
        return hashlib.blake2b(encoded, digest_size=32).digest()


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A publisher's offer to an engine: the layout and how to reach every rank's arena, and in
    merged mode its bucket ring."""

    layout: Layout
    layout_digest: bytes
    arenas: tuple[ArenaHandle, ...]
    rings: tuple[ArenaHandle, ...] = ()

    @property
    def publisher(self) -> bytes:
        """Tells publishers of equal layout apart: blake2b-128 over their arenas' random tokens."""
        tokens = b"".join(handle.token for handle in self.arenas)
        return hashlib.blake2b(tokens, digest_size=16).digest()

    def require_fitting_arenas(self) -> None:
        """Whoever maps the arenas calls this: the layout's digest does not cover the handles, and
        kernels read as many bytes of an entry as the layout says.

        Raises LayoutMismatch naming the rank whose handle has other entries than the layout.
        """
        entries = [
            (item.rank, math.prod(item.shape) * self.layout.itemsize)
            for item in self.layout.export_map.parameters
        ]
        for rank, handle in enumerate(self.arenas):
            wanted = tuple(size for owner, size in entries if owner == rank)
            if (handle.rank, handle.entry_bytes) != (rank, wanted):
                raise LayoutMismatch(
                    f"arena {rank}, of trainer rank {handle.rank}: its entries are not those that "
                    f"the layout gives to rank {rank}; the spec was altered, take the publisher's"
                )
        if any(owner >= len(self.arenas) for owner, _ in entries):
            raise LayoutMismatch(
                f"the layout has parameters of more than the spec's {len(self.arenas)} arenas; the "
                "spec was altered, take the publisher's"
            )

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def inspect(self, limit: int = 40) -> str:
        """The spec in words: where each factor comes from, at most `limit` factors."""
        export_map = self.layout.export_map
        lines = [
            f"spec {self.layout_digest.hex()[:32]}: {len(export_map.factors)} factors from "
            f"{len(export_map.parameters)} parameters of {len(self.arenas)} trainer ranks, "
            f"{self.layout.dtype}"
        ]
        if self.layout.merged is not None:
            merged = self.layout.merged
            lines.append(
                f"merged: {len(merged.weights)} weights, {merged.total_bytes} bytes of "
                f"{merged.dtype} in {len(merged.pieces)} pieces and {len(merged.buckets)} buckets"
            )
        for factor in export_map.factors[:limit]:
            sources = dict.fromkeys(export_map.parameters[c.tensor].label for c in factor.cells)
            lines.append(f"  {factor.name} {list(factor.shape)} <- {'; '.join(sources)}")
        if len(export_map.factors) > limit:
            lines.append(f"... and {len(export_map.factors) - limit} more factors")
        return "\n".join(lines)

    @staticmethod
    def from_bytes(data: bytes) -> Spec:
        """Raises LayoutMismatch if the bytes are no spec of this format or were altered."""
        try:
            spec = msgspec.msgpack.decode(data, type=Spec)
        except msgspec.MsgspecError as error:
            raise LayoutMismatch(f"not a spec: {error}") from error
        if spec.layout.format != FORMAT:
            raise LayoutMismatch(
                f"spec format {spec.layout.format} cannot be read by this version (format "
                f"{FORMAT}); use the same lora_refit on both sides"
            )
        if spec.layout.digest() != spec.layout_digest:
            raise LayoutMismatch("the spec's layout does not match its digest; it was altered")
        return spec


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """Names one published version. Every trainer rank's ticket of a version will do.

    sequence: counts publishes; tells which arena half holds the version.
    publisher: of the Spec whose arenas hold it; sequences and versions of others may be the same.
    pack_ms: time the issuing rank spent packing, in milliseconds.
    """

    version: int
    sequence: int
    layout_digest: bytes
    publisher: bytes
    rank: int
    pack_ms: float

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @staticmethod
    def from_bytes(data: bytes) -> Ticket:
        """Raises LayoutMismatch if the bytes are no ticket."""
        try:
            return msgspec.msgpack.decode(data, type=Ticket)
        except msgspec.MsgspecError as error:
            raise LayoutMismatch(f"not a ticket: {error}") from error
