"""The trainer's side: trace once, then pack the local shards into an arena at every publish."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lora_refit.arena import ArenaLayout, ArenaWriter
from lora_refit.collectives import ProcessGroup, all_gather_bytes, same_outcome, world
from lora_refit.devices import common_device, device_of
from lora_refit.errors import LayoutMismatch, TransportUnavailable, UnsupportedAdapter
from lora_refit.kernels import SCALE_ONCE
from lora_refit.messages import ArenaHandle
from lora_refit.packed import PackedView, gather_packed, write_peft_directory
from lora_refit.plan import Block, Buffer, Plan
from lora_refit.sources.base import Source, has_storage, lora_scale
from lora_refit.spec import FORMAT, Layout, Spec, Ticket
from lora_refit.trace.export import Parameter, trace_export

ENGINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

State = list[tuple[int, torch.Size, torch.dtype, bool]]
"""Address, shape, dtype and contiguity of every parameter."""


class Publisher:
    """Publishes versions of one trainer rank's adapter shards. Construction is collective.

    source: the trainer's adapter, for example MegatronSource.
    dtype: of the engine's LoRA slots; parameters are cast to it, round to nearest even.
    exchange: "auto" or "peer": engine workers map every rank's arena, so a refit needs no
        collective. Other exchanges raise TransportUnavailable.
    group: the trainer's process group; None for the default group.
    scale_rounding: "engine" leaves alpha / r to the engine's side, which casts and then
        multiplies, bit-equal to the engine's own loader. "once" multiplies here in fp32 and
        rounds once: up to one unit in the last place nearer to the trainer, and not bit-equal.
    timeout_s: how long `publish` waits for readers of the half that it is about to overwrite.
    memory: where a GPU's arena lies: "auto", "ipc", "vmm" or "host", as for ArenaWriter.

    The adapter must lie on one device; the arena is in its memory, or shared memory on a CPU.

    Raises what `trace_export` raises: NotMovement, CoverageError, UnsupportedAdapter.
    """

    def __init__(
        self,
        source: Source,
        dtype: torch.dtype = torch.bfloat16,
        exchange: str = "auto",
        group: ProcessGroup | None = None,
        *,
        scale_rounding: str = "engine",
        timeout_s: float = 60.0,
        memory: str = "auto",
    ) -> None:
        _check_arguments(dtype, exchange, scale_rounding)
        self._source = source
        self._dtype = dtype
        self._rank, _ = world(group)
        export_map = trace_export(source, group)
        layout = Layout(
            format=FORMAT,
            dtype=str(dtype).removeprefix("torch."),
            scale_folded=scale_rounding == "once",
            peft_config=same_outcome(lambda: _plain_config(source), group),
            export_map=export_map,
        )
        _require_same_layout(layout, group)
        own = tuple(item for item in export_map.parameters if item.rank == self._rank)
        self._plan = pack_plan(own, layout, self._rank)
        self._device = same_outcome(lambda: common_device(source.parameters()), group)
        self._kernel = same_outcome(lambda: self._plan.kernel(self._device), group)
        self._writer = same_outcome(
            lambda: ArenaWriter(
                ArenaLayout(tuple(math.prod(item.shape) * dtype.itemsize for item in own)),
                rank=self._rank,
                layout_digest=layout.digest(),
                timeout_s=timeout_s,
                device=self._device,
                memory=memory,
            ),
            group,
        )
        self._spec = Spec(
            layout=layout,
            layout_digest=layout.digest(),
            arenas=_exchange_handles(self._writer.handle, group),
        )
        self._publisher = self._spec.publisher
        self._parameters = own
        self._state: State | None = None
        self._addresses: npt.NDArray[np.uint64] = np.zeros(len(own), np.uint64)
        self._sequence = 0

    @property
    def spec(self) -> Spec:
        """What an engine needs to attach; the same on every rank."""
        return self._spec

    @property
    def plan(self) -> Plan:
        """The pack plan of this rank: one block a parameter."""
        return self._plan

    @property
    def launches(self) -> int:
        """Pack launches so far: one for each publish."""
        return self._kernel.launches

    def publish(self, version: int, stream: object | None = None) -> Ticket:
        """Pack this rank's parameters as `version`. Local: one launch, no collective.

        Call it on every rank after the optimizer's step. The pack follows what `stream` (of a GPU;
        torch's current one by default) was given before, and has finished when this returns.
        Raises ReaderTimeout if a worker still reads the half to be overwritten, LayoutMismatch if
        the parameters changed since tracing; earlier versions stay as they were.
        """
        started = time.perf_counter()
        version = int(operator.index(version))  # index() alone returns True for True
        # A failed publish uses its sequence up as well, so that all ranks stay in step.
        self._sequence = sequence = self._sequence + 1
        if not -(2**63) <= version < 2**63:
            raise LayoutMismatch(f"version {version} does not fit in 64 bits")
        self._source.settle()
        addresses = self._source_addresses()
        half = self._writer.begin(sequence)
        try:
            digests = self._kernel.run(addresses, self._writer.entry_addresses(half), stream)
            self._writer.publish(sequence, version, digests)
        except BaseException as error:
            self._writer.abandon(sequence)
            if isinstance(error, TransportUnavailable):
                raise TransportUnavailable(f"trainer rank {self._rank}: {error}") from error
            raise
        return Ticket(
            version=version,
            sequence=sequence,
            layout_digest=self._spec.layout_digest,
            publisher=self._publisher,
            rank=self._rank,
            pack_ms=(time.perf_counter() - started) * 1e3,
        )

    def export_packed(self, path: str | Path | None = None) -> PackedView:
        """Gather the last published version of all ranks into one PEFT-layout buffer.

        Local: reads the arenas of all ranks, so every rank must have published the version. With
        `path`, also writes a PEFT directory there. Values are in the publisher's dtype.
        """
        view = gather_packed(self._spec, self._device)
        if path is not None:
            write_peft_directory(view, self._spec.layout, Path(path))
        return view

    def close(self) -> None:
        """Release the arena; see ArenaWriter.close for what becomes of a worker's mapping. Idempotent."""
        self._writer.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _source_addresses(self) -> npt.NDArray[np.uint64]:
        """Where the parameters are now: trainers move them when they offload and reload."""
        tensors = [tensor for _, tensor in self._source.parameters()]
        state = [(t.data_ptr(), t.shape, t.dtype, t.is_contiguous()) for t in tensors]
        if state != self._state:
            _check_unchanged(tensors, self._parameters, self._device)
            self._addresses = np.asarray([address for address, *_ in state], np.uint64)
            self._state = state
        return self._addresses


def pack_plan(parameters: Sequence[Parameter], layout: Layout, rank: int) -> Plan:
    """One block a parameter: cast into the arena entry of the same number."""
    scales = folded_scales(layout) if layout.scale_folded else {}
    numels = [math.prod(item.shape) for item in parameters]
    first = next((i for i, item in enumerate(layout.export_map.parameters) if item.rank == rank), 0)
    blocks = [
        Block(
            src=index,
            dst=index,
            src_offset=0,
            dst_offset=0,
            size=(1, 1, numel),
            src_stride=(0, 0, 1),
            dst_stride=(0, 0, 1),
            scale=scales.get(first + index, 1.0),
            flags=SCALE_ONCE if layout.scale_folded else 0,
        )
        for index, numel in enumerate(numels)
    ]
    return Plan.build(
        [
            Buffer(item.name, rank, item.dtype, numel)
            for item, numel in zip(parameters, numels, strict=True)
        ],
        [
            Buffer(f"arena/{item.name}", rank, layout.dtype, numel)
            for item, numel in zip(parameters, numels, strict=True)
        ],
        blocks,
    )


def folded_scales(layout: Layout) -> dict[int, float]:
    """alpha / r of every parameter that feeds a lora_B, and of its replicas, by global index."""
    config = layout.peft_config
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise UnsupportedAdapter(
            'scale_rounding="once" needs one rank and alpha for all modules; use "engine"'
        )
    scale = lora_scale(config)
    scales = {
        cell.tensor: scale
        for factor in layout.export_map.factors
        if factor.name.endswith(".lora_B.weight")
        for cell in factor.cells
    }
    copies = {copy: scale for first, copy in layout.export_map.replicas if first in scales}
    return scales | copies


def _plain_config(source: Source) -> dict[str, Any]:
    """PEFT's own to_dict() holds sets and enums, which have no fixed order or encoding."""
    config = source.config()
    lora_scale(config)
    try:
        plain: dict[str, Any] = msgspec.to_builtins(config, order="sorted")
    except TypeError as error:
        raise UnsupportedAdapter(
            f"the PEFT config cannot be sent to an engine: {error}; use numbers, strings and lists"
        ) from error
    return plain


def _check_arguments(dtype: torch.dtype, exchange: str, scale_rounding: str) -> None:
    if dtype not in ENGINE_DTYPES:
        raise UnsupportedAdapter(f"dtype {dtype}: engines hold LoRA slots in {ENGINE_DTYPES}")
    if exchange not in ("auto", "peer"):
        raise TransportUnavailable(
            f'exchange={exchange!r} is not available in this version; use "auto" or "peer", which '
            "need engine and trainer on one node"
        )
    if scale_rounding not in ("engine", "once"):
        raise UnsupportedAdapter(f'scale_rounding={scale_rounding!r}: use "engine" or "once"')


def _require_same_layout(layout: Layout, group: ProcessGroup | None) -> None:
    digests = all_gather_bytes(layout.digest(), group)
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise LayoutMismatch(
                f"trainer rank {rank}: its PEFT config or Publisher arguments differ from rank "
                "0's; construct the Publisher alike on every rank"
            )


def _exchange_handles(handle: ArenaHandle, group: ProcessGroup | None) -> tuple[ArenaHandle, ...]:
    return tuple(
        msgspec.msgpack.decode(data, type=ArenaHandle)
        for data in all_gather_bytes(msgspec.msgpack.encode(handle), group)
    )


def _check_unchanged(
    tensors: Sequence[torch.Tensor], traced: Sequence[Parameter], device: torch.device
) -> None:
    if len(tensors) != len(traced):
        raise LayoutMismatch(
            f"{len(tensors)} adapter parameters, but {len(traced)} were traced; build a new "
            "Publisher after changing the adapter"
        )
    for tensor, before in zip(tensors, traced, strict=True):
        now: tuple[Any, ...] = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if now != (before.shape, before.dtype):
            raise LayoutMismatch(
                f"{before.label}: traced as {before.shape} {before.dtype}, now {now[0]} {now[1]}; "
                "build a new Publisher after changing the adapter"
            )
        if not tensor.is_contiguous():
            raise LayoutMismatch(f"{before.label}: is not contiguous; call .contiguous() on it")
        if not has_storage(tensor):
            raise LayoutMismatch(f"{before.label}: has no storage (offloaded?); reload it first")
        if device_of(tensor) != device:
            raise LayoutMismatch(
                f"{before.label}: on {device_of(tensor)}, the publisher was built on {device}; "
                "bring it back, or build a new Publisher"
            )
