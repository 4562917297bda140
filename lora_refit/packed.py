"""The packed view: full PEFT-named factors in one contiguous buffer, for disk and other loaders."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lora_refit.arena import ArenaReader
from lora_refit.devices import CPU, zeroed_bytes
from lora_refit.errors import StaleArena
from lora_refit.plan import Buffer, Plan, compose
from lora_refit.spec import Layout, Spec
from lora_refit.trace.movement import identity

ALIGNMENT = 256


@dataclass(frozen=True)
class PackedEntry:
    """Where one factor lies in the packed buffer; `offset` in bytes, 256-byte aligned."""

    name: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class PackedView:
    """One version of the adapter. buffer: uint8 [bytes]; entries: its manifest."""

    version: int
    dtype: torch.dtype
    buffer: torch.Tensor
    entries: tuple[PackedEntry, ...]

    def tensors(self) -> dict[str, torch.Tensor]:
        """PEFT name -> view of the buffer, lora_A [r, in] and lora_B [out, r]."""
        return {
            entry.name: self.buffer[
                entry.offset : entry.offset + math.prod(entry.shape) * self.dtype.itemsize
            ]
            .view(self.dtype)
            .view(entry.shape)
            for entry in self.entries
        }


def gather_packed(spec: Spec, device: torch.device = CPU) -> PackedView:
    """Gather the newest version that all arenas hold into one new buffer on the device.

    Raises StaleArena if the ranks' newest versions differ, TransportUnavailable if an arena cannot
    be mapped.
    """
    spec.require_fitting_arenas()
    layout = spec.layout
    dtype: torch.dtype = getattr(torch, layout.dtype)
    entries, total = _manifest(layout, dtype)
    plan = packed_plan(layout)
    buffer = zeroed_bytes(total, device)
    with ExitStack() as stack:
        readers = [
            stack.enter_context(closing(ArenaReader(handle, spec.layout_digest, device=device)))
            for handle in spec.arenas
        ]
        newest = [reader.latest() for reader in readers]
        if len(set(newest)) != 1:
            raise StaleArena(
                f"trainer ranks hold different versions {newest} as (sequence, version); publish "
                "the same version on every rank before exporting"
            )
        sequence, version = newest[0]
        halves = [reader.pin(sequence, version).half for reader in readers]
        sources = [
            reader.entry_addresses(half) for reader, half in zip(readers, halves, strict=True)
        ]
        offsets = np.asarray([entry.offset for entry in entries], np.uint64)
        plan.kernel(device).run(np.concatenate(sources), offsets + np.uint64(buffer.data_ptr()))
    return PackedView(version, dtype, buffer, entries)


def packed_plan(layout: Layout) -> Plan:
    """Blocks from all ranks' arena entries to the factors, PEFT layout."""
    export_map = layout.export_map
    shapes = [parameter.shape for parameter in export_map.parameters]
    blocks = compose(
        [identity(f.name, f.shape, i) for i, f in enumerate(export_map.factors)],
        export_map.factors,
        shapes,
        {},
    )
    return Plan.build(
        [
            Buffer(item.name, item.rank, layout.dtype, math.prod(item.shape))
            for item in export_map.parameters
        ],
        [
            Buffer(factor.name, 0, layout.dtype, math.prod(factor.shape))
            for factor in export_map.factors
        ],
        blocks,
    )


def write_peft_directory(view: PackedView, layout: Layout, path: Path) -> None:
    """Write adapter_config.json and adapter_model.safetensors, loadable by PEFT and vLLM."""
    config = dict(layout.peft_config)
    if layout.scale_folded:
        config |= {"lora_alpha": config["r"], "use_rslora": False}
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    save_file(view.tensors(), str(path / "adapter_model.safetensors"))
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _manifest(layout: Layout, dtype: torch.dtype) -> tuple[tuple[PackedEntry, ...], int]:
    entries = []
    offset = 0
    for factor in layout.export_map.factors:
        entries.append(PackedEntry(factor.name, factor.shape, offset))
        size = math.prod(factor.shape) * dtype.itemsize
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(entries), offset
