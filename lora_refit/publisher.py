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
from lora_refit.merged.build import (
    DeliveryParts,
    make_delivery,
    make_ring,
    merged_layout,
    survey_bases,
)
from lora_refit.merged.checkpoint import MergedState
from lora_refit.merged.delivery import Delivery
from lora_refit.merged.magnitudes import gather_magnitudes
from lora_refit.merged.pieces import adapted_weights
from lora_refit.messages import ArenaHandle
from lora_refit.pack import adapter_dtype, pack_plan
from lora_refit.packed import PackedView, gather_packed, write_peft_directory
from lora_refit.plan import Plan
from lora_refit.sources.base import Source, has_storage, lora_scale
from lora_refit.spec import FORMAT, Layout, Spec, Ticket
from lora_refit.trace.export import Parameter, trace_export

ENGINE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)

State = list[tuple[int, torch.Size, torch.dtype, bool]]
"""Address, shape, dtype and contiguity of every parameter."""


class Publisher:
    """Publishes versions of one trainer rank's adapter shards. Construction is collective.

    source: the trainer's adapter, for example MegatronSource.
    dtype: of the engine's LoRA slots, or of its merged weights; rounds to nearest even.
    mode: "adapter" fills LoRA slots. "merged" sends W' = W + alpha / r * B @ A of every adapted
        weight, from the trainer's own base, which is read and never written.
    exchange: "auto" or "peer": engine workers map every rank's arena, so a refit needs no
        collective. Other exchanges raise TransportUnavailable.
    group: the trainer's process group; None for the default group.
    scale_rounding: "engine" leaves alpha / r to the engine's side, which casts and then
        multiplies, bit-equal to the engine's own loader. "once" multiplies here in fp32 and
        rounds once: up to one unit in the last place nearer to the trainer, and not bit-equal.
    timeout_s: how long `publish` waits for readers of the half that it is about to overwrite, and in
        merged mode for the other ranks.
    memory: where a GPU's arena lies: "auto", "ipc", "vmm" or "host", as for ArenaWriter.
    bucket_bytes: merged mode only: the most that a rank holds of the merged weights in each of two
        buffers, which is all the memory that it takes for them. Where both hold everything, a
        version is merged when it is published, otherwise while an engine takes it.
    merge_rounding: merged mode only: "once" adds in fp32 and rounds once. "forward" rounds B @ A, its
        multiple and the sum to the base's dtype, as an eager merge in that dtype does: nearer to a
        trainer whose forward rounds likewise, and several times slower.

    The adapter must lie on one device; the arena is in its memory, or shared memory on a CPU.

    Raises what `trace_export` raises: NotMovement, CoverageError, UnsupportedAdapter. In merged mode
    UnsupportedAdapter also for a module whose base weight cannot be merged.
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
        mode: str = "adapter",
        bucket_bytes: int = 256 << 20,
        merge_rounding: str = "once",
    ) -> None:
        _check_arguments(dtype, exchange, scale_rounding, mode, merge_rounding)
        bucket_bytes = _checked_bucket_bytes(bucket_bytes)
        self._source = source
        self._group = group
        self._rank, _ = world(group)
        export_map = trace_export(source, group)
        bases = survey_bases(source, export_map, self._rank, group)
        self._pieces = bases.pieces
        config = same_outcome(lambda: _plain_config(source), group)

        def make_layout() -> Layout:
            if mode == "adapter":
                _refuse_dora(config)
            merging = mode == "merged"
            packed = adapter_dtype(export_map.parameters) if merging else dtype
            return Layout(
                format=FORMAT,
                dtype=str(packed).removeprefix("torch."),
                scale_folded=scale_rounding == "once",
                peft_config=config,
                export_map=export_map,
                base=bases.samples,
                base_gaps=bases.gaps,
                merged=merged_layout(export_map, bases.pieces, config, dtype, bucket_bytes)
                if merging
                else None,
            )

        layout = same_outcome(make_layout, group)
        _require_same_layout(layout, group)
        own = tuple(item for item in export_map.parameters if item.rank == self._rank)
        self._plan = pack_plan(own, layout, self._rank)
        self._device = same_outcome(lambda: common_device(source.parameters()), group)
        self._kernel = same_outcome(lambda: self._plan.kernel(self._device), group)
        self._writer = same_outcome(
            lambda: ArenaWriter(
                ArenaLayout(tuple(math.prod(item.shape) * layout.itemsize for item in own)),
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
        self._delivery: Delivery | None = None
        if layout.merged is not None:
            self._set_up_delivery(timeout_s, memory, merge_rounding)
        self._publisher = self._spec.publisher
        self._parameters = own
        self._last_state: State | None = None
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
        """Pack this rank's parameters as `version`. One launch, no collective.

        Call it on every rank after the optimizer's step. The pack follows what `stream` (of a GPU;
        torch's current one by default) was given before, and has finished when this returns.
        Raises ReaderTimeout if a worker still reads the half to be overwritten, LayoutMismatch if
        the parameters changed since tracing; earlier versions stay as they were.

        In adapter mode this is local. In merged mode it waits, for timeout_s, until every rank has
        published the version, and then takes back the one before, so refit before you publish again: ReaderTimeout
        if a refit to that is under way, WriterTimeout if a rank does not publish.
        """
        started = time.perf_counter()
        version = int(operator.index(version))  # index() alone returns True for True
        # A failed publish uses its sequence up as well, so that all ranks stay in step.
        self._sequence = sequence = self._sequence + 1
        if not -(2**63) <= version < 2**63:
            raise LayoutMismatch(f"version {version} does not fit in 64 bits")
        self._source.settle()
        addresses = self._source_addresses()
        if self._delivery is not None:
            self._delivery.make_room(sequence)
        half = self._writer.begin(sequence)
        try:
            digests = self._kernel.run(addresses, self._writer.entry_addresses(half), stream)
            self._writer.publish(sequence, version, digests)
        except BaseException as error:
            self._writer.abandon(sequence)
            if isinstance(error, TransportUnavailable):
                raise TransportUnavailable(f"trainer rank {self._rank}: {error}") from error
            raise
        if self._delivery is not None:
            self._delivery.start(sequence, version, stream)
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

    def merged_state(
        self, path: str | Path | None = None, *, dtype: torch.dtype | None = None
    ) -> MergedState:
        """The whole model as it is now, adapter merged: (Hugging Face name, tensor) pairs.

        Collective, also when it is iterated; see MergedState. With `path`, also writes a checkpoint
        folder there that `transformers` and engines load, a shard at a time. dtype: of its
        floating-point tensors; None for the trainer's. Works in both modes.
        """
        return self._state(path, dtype, lora_scale(self._spec.layout.peft_config))

    def base_state(
        self, path: str | Path | None = None, *, dtype: torch.dtype | None = None
    ) -> MergedState:
        """`merged_state` without the adapter: for `RefitEngine.load_base`."""
        return self._state(path, dtype, None)

    def close(self) -> None:
        """Release the arena; see ArenaWriter.close for what becomes of a worker's mapping. Idempotent."""
        if self._delivery is not None:
            self._delivery.close()
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

    def _state(
        self, path: str | Path | None, dtype: torch.dtype | None, scale: float | None
    ) -> MergedState:
        if dtype is not None and dtype not in ENGINE_DTYPES:
            raise UnsupportedAdapter(f"dtype {dtype!r}: checkpoints are written in {ENGINE_DTYPES}")
        factors = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in self._source.export()
            if self._rank == 0
        }
        weights = adapted_weights(self._spec.layout.export_map)
        held = self._source.base_weights()
        state = MergedState(
            same_outcome(self._source.full_model, self._group),
            factors,
            scale,
            magnitudes=gather_magnitudes(
                self._pieces.pieces, held, weights, self._rank, self._group
            ),
            dtype=dtype,
            group=self._group,
        )
        if path is not None:
            state.save(path)
        return state

    def _set_up_delivery(self, timeout_s: float, memory: str, rounding: str) -> None:
        layout, rank, device, group = self._spec.layout, self._rank, self._device, self._group
        ring = same_outcome(lambda: make_ring(layout, rank, timeout_s, device, memory), group)
        self._spec = msgspec.structs.replace(
            self._spec, rings=_exchange_handles(ring.handle, group)
        )
        parts = DeliveryParts(
            self._source, self._pieces, ring, rank, timeout_s, device, rounding, group
        )
        self._delivery = same_outcome(lambda: make_delivery(self._spec, parts), group)

    def _source_addresses(self) -> npt.NDArray[np.uint64]:
        """Where the parameters are now: trainers move them when they offload and reload."""
        tensors = [tensor for _, tensor in self._source.parameters()]
        state = [(t.data_ptr(), t.shape, t.dtype, t.is_contiguous()) for t in tensors]
        if state != self._last_state:
            _check_unchanged(tensors, self._parameters, self._device)
            self._addresses = np.asarray([address for address, *_ in state], np.uint64)
            self._last_state = state
        return self._addresses


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


def _refuse_dora(config: dict[str, Any]) -> None:
    if config.get("use_dora"):
        raise UnsupportedAdapter(
            "DoRA rescales the merged weight by a learned magnitude (weight_magnitude), which a "
            'LoRA slot cannot hold; use mode="merged", or train with LoRA'
        )


def _check_arguments(
    dtype: torch.dtype, exchange: str, scale_rounding: str, mode: str, merge_rounding: str
) -> None:
    if mode not in ("adapter", "merged"):
        raise UnsupportedAdapter(f'mode={mode!r}: use "adapter" or "merged"')
    if mode == "merged" and scale_rounding != "engine":
        raise UnsupportedAdapter(
            f"scale_rounding={scale_rounding!r} is of adapter mode; a merged weight is rounded once"
        )
    if merge_rounding not in ("once", "forward"):
        raise UnsupportedAdapter(f'merge_rounding={merge_rounding!r}: use "once" or "forward"')
    if dtype not in ENGINE_DTYPES:
        raise UnsupportedAdapter(f"dtype {dtype}: engines hold LoRA slots in {ENGINE_DTYPES}")
    if exchange not in ("auto", "peer"):
        raise TransportUnavailable(
            f'exchange={exchange!r} is not available in this version; use "auto" or "peer", which '
            "need engine and trainer on one node"
        )
    if scale_rounding not in ("engine", "once"):
        raise UnsupportedAdapter(f'scale_rounding={scale_rounding!r}: use "engine" or "once"')


def _checked_bucket_bytes(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**63:
        raise LayoutMismatch(f"bucket_bytes={value!r}: give a number of bytes, at least 1")
    return value


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
