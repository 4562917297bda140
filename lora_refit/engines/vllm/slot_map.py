"""Learn where vLLM's loader puts every factor element, and prove it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lora_refit.engines.vllm.loader import Loader
from lora_refit.engines.vllm.slots import SlotBuffer, Slots
from lora_refit.errors import NotMovement
from lora_refit.plan import Buffer, Plan, compose
from lora_refit.trace import tags
from lora_refit.trace.movement import TagReader, TensorMap, identity

Shape = tuple[int, ...]


class SlotMap(msgspec.Struct, frozen=True, array_like=True):
    """Where every element of a slot comes from.

    maps: one for each buffer, whose cells index the factors. scales: factor of each lora_B, by
    factor index. enabled: flag of each fused MoE module of a loaded slot.
    """

    buffers: tuple[SlotBuffer, ...]
    maps: tuple[TensorMap, ...]
    scales: dict[int, float]
    enabled: tuple[int, ...]


def trace_engine(
    loader: Loader,
    slots: Slots,
    factors: Sequence[TensorMap],
    config: dict[str, Any],
    lora_ids: Sequence[int],
) -> SlotMap:
    """Trace the loader with tagged factors, and prove the result in the slot of every given id.

    Loading can evict: call it when as many slots are free. The slots are left released. Raises NotMovement if the loader computes,
    UnsupportedAdapter if vLLM refuses the adapter, CoverageError for names that it cannot read.
    """
    shapes = {factor.name: factor.shape for factor in factors}
    try:
        maps = _trace_tags(loader, slots, shapes, _without_scale(config), lora_ids[0])
        slot_map = _with_scales(loader, slots, shapes, config, lora_ids[0], maps)
        for lora_id in lora_ids:
            _prove_random(loader, slots, shapes, config, lora_id, slot_map)
    finally:
        for lora_id in lora_ids:
            slots.release(lora_id)
    return slot_map


def scatter_plan(
    slot_map: SlotMap,
    middle: Sequence[TensorMap],
    sources: Sequence[Buffer],
    source_shapes: Sequence[Shape],
    worker: int,
    scale_folded: bool,
) -> Plan:
    """The plan from `sources`, through the factors `middle`, into the slot buffers of a worker."""
    scales = {} if scale_folded else slot_map.scales
    return Plan.build(
        sources,
        [Buffer(item.name, worker, item.dtype, item.numel) for item in slot_map.buffers],
        compose(slot_map.maps, middle, source_shapes, scales),
    )


def _without_scale(config: dict[str, Any]) -> dict[str, Any]:
    """The config under which every module's scale is one."""
    return config | {
        "lora_alpha": config["r"],
        "use_rslora": False,
        "alpha_pattern": dict(config.get("rank_pattern") or {}),
    }


def _trace_tags(
    loader: Loader, slots: Slots, shapes: dict[str, Shape], config: dict[str, Any], lora_id: int
) -> tuple[TensorMap, ...]:
    reader = TagReader(list(shapes.values()))
    for plane in reader.planes:
        tensors = {}
        for index, (name, shape) in enumerate(shapes.items()):
            tensors[name] = torch.empty(shape, dtype=loader.dtype)
            tags.fill(tensors[name], index, plane)
        slot, _ = loader.load(lora_id, tensors, config)
        for buffer, view in zip(slots.buffers, slots.views(slot), strict=True):
            reader.read(buffer.name, view, plane)
    return tuple(reader.tensor_map(buffer.name) for buffer in slots.buffers)


def _with_scales(
    loader: Loader,
    slots: Slots,
    shapes: dict[str, Shape],
    config: dict[str, Any],
    lora_id: int,
    maps: tuple[TensorMap, ...],
) -> SlotMap:
    """Read the real config's scales, and check on factors of one that the slots show them."""
    names = list(shapes)
    ones = {name: torch.ones(shape, dtype=loader.dtype) for name, shape in shapes.items()}
    slot, by_name = loader.load(lora_id, ones, config)
    scales = {index: by_name[name] for index, name in enumerate(names) if name in by_name}
    for tensor_map, view in zip(maps, slots.views(slot), strict=True):
        matrices = view.reshape(-1, *tensor_map.slab_shape)
        for cell in tensor_map.cells:
            scale = torch.tensor(scales.get(cell.tensor, 1.0), dtype=loader.dtype)
            found = matrices[
                cell.slab, cell.row : cell.row + cell.rows, cell.col : cell.col + cell.cols
            ]
            if not bool((found == scale.to(found.device)).all()):
                raise NotMovement(
                    f"{tensor_map.name}: {names[cell.tensor]} of ones arrives as "
                    f"{float(found.flatten()[0])!r}, but vLLM's config says {float(scale)!r}"
                )
    return SlotMap(slots.buffers, maps, scales, slots.enabled(slot))


def _prove_random(
    loader: Loader,
    slots: Slots,
    shapes: dict[str, Shape],
    config: dict[str, Any],
    lora_id: int,
    slot_map: SlotMap,
) -> None:
    """Compare what the loader makes of random factors with the copy kernel, bit for bit."""
    factors = _random_factors(shapes, loader.dtype, seed=lora_id)
    spare = {name: factor.clone() for name, factor in factors.items()}
    slot, _ = loader.load(lora_id, spare, config)
    dtype = str(loader.dtype).removeprefix("torch.")
    plan = scatter_plan(
        slot_map,
        [identity(name, shape, index) for index, (name, shape) in enumerate(shapes.items())],
        [Buffer(name, 0, dtype, math.prod(shape)) for name, shape in shapes.items()],
        list(shapes.values()),
        worker=0,
        scale_folded=False,
    )
    views = slots.views(slot)
    scratch = [torch.zeros_like(view) for view in views]
    plan.kernel(loader.device).run(_addresses(list(factors.values())), _addresses(scratch))
    for buffer, expected, found in zip(slots.buffers, views, scratch, strict=True):
        same = expected.contiguous().view(torch.uint8) == found.view(torch.uint8)
        if not bool(same.all()):
            raise NotMovement(
                f"{buffer.name}: {int((~same).sum())} bytes differ between vLLM's loader and the "
                "traced movement on random factors; the loader computes something that tags do "
                "not show"
            )


def _random_factors(
    shapes: dict[str, Shape], dtype: torch.dtype, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def _addresses(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.uint64]:
    return np.asarray([tensor.data_ptr() for tensor in tensors], np.uint64)
