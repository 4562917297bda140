"""The semantic proof: a trainer's own LoRA branches against the factors it exports.

An exporter can be wrong and still move data faithfully: experts under another rank's names, rows
of the wrong head. So with random non-zero A and B each adapter module is run on random input, and
its output must equal `alpha / r * B @ (A @ x)` of the exported factors, row by row as the export
map says.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lora_refit.collectives import world
from lora_refit.errors import UnsupportedAdapter
from lora_refit.sources.base import lora_scale
from lora_refit.trace.export import ExportMap
from lora_refit.trace.movement import TensorMap

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_TOKENS_PER_RANK = 2


@dataclass(frozen=True)
class AdapterModule:
    """A tensor-parallel LoRA branch: `linear_in` then `linear_out`, with its name as a prefix."""

    name: str
    module: Any


@dataclass(frozen=True)
class _Factors:
    """One exported pair: values in fp64 and where they come from."""

    a: torch.Tensor
    b: torch.Tensor
    a_map: TensorMap
    b_map: TensorMap


@torch.no_grad()
def prove_forward(
    adapters: Sequence[AdapterModule],
    export: Iterable[tuple[str, torch.Tensor]],
    parameters: Sequence[tuple[str, torch.Tensor]],
    export_map: ExportMap,
    config: dict[str, Any],
    rank: int,
) -> None:
    """Overwrite the parameters with random values, export them, and check every adapter.

    Collective over the trainer's ranks; `rank` is this process's in the export map. Raises
    UnsupportedAdapter naming module and rank, after all adapters have run.
    """
    _randomize(parameters, rank)
    exported = {name: tensor.detach().double().clone() for name, tensor in export}
    owners = {
        (parameter.rank, parameter.name): index
        for index, parameter in enumerate(export_map.parameters)
    }
    canonical = {copy: first for first, copy in export_map.replicas}
    pairs = _pairs(export_map, exported)
    problems: list[UnsupportedAdapter] = []
    for adapter in adapters:
        in_name, out_name = f"{adapter.name}.linear_in.weight", f"{adapter.name}.linear_out.weight"
        own_in, own_out = owners[rank, in_name], owners[rank, out_name]
        try:
            _check(
                adapter,
                [pair for pair in pairs if _reads(pair.b_map, canonical.get(own_out, own_out))],
                canonical.get(own_in, own_in),
                canonical.get(own_out, own_out),
                lora_scale(config),
                rank,
            )
        except UnsupportedAdapter as problem:
            # The other ranks are about to run the next adapter, which is a collective.
            problems.append(problem)
    if problems:
        raise problems[0]


def _randomize(parameters: Sequence[tuple[str, torch.Tensor]], rank: int) -> None:
    generator = torch.Generator().manual_seed(0xF0F + rank)
    for _, tensor in parameters:
        spread = tensor.shape[-1] ** -0.5
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)


def _pairs(export_map: ExportMap, exported: dict[str, torch.Tensor]) -> list[_Factors]:
    maps = {factor.name: factor for factor in export_map.factors}
    pairs = []
    for name, a_map in maps.items():
        if name.endswith(".lora_A.weight"):
            b_name = name.removesuffix(".lora_A.weight") + ".lora_B.weight"
            pairs.append(_Factors(exported[name], exported[b_name], a_map, maps[b_name]))
    return pairs


def _reads(tensor_map: TensorMap, parameter: int) -> bool:
    return any(cell.tensor == parameter for cell in tensor_map.cells)


def _check(
    adapter: AdapterModule,
    pairs: Sequence[_Factors],
    own_in: int,
    own_out: int,
    scale: float,
    rank: int,
) -> None:
    module = adapter.module
    dtype = module.linear_out.weight.dtype
    if not pairs:
        raise UnsupportedAdapter(f"rank {rank}, {adapter.name}: none of its factors is exported")
    group_rank, group_size = _tensor_parallel(module)
    tokens = _TOKENS_PER_RANK * group_size
    generator = torch.Generator().manual_seed(0xF0F)
    full = torch.randn(tokens, 1, pairs[0].a.shape[1], generator=generator).to(dtype)
    local = _local_input(full, pairs[0].a_map, own_in, int(module.linear_in.weight.shape[1]))
    sequence_parallel = not getattr(module, "disable_sequence_parallel_comm", True)
    if sequence_parallel and not module.input_is_parallel:
        local = local.chunk(group_size, dim=0)[group_rank]
    output = module(local.to(module.linear_in.weight.device)).detach().double().cpu()

    seen = full.double()
    if output.shape[0] != tokens:
        seen = seen.chunk(group_size, dim=0)[group_rank]
    rows = int(module.linear_out.weight.shape[0])
    first_row = group_rank * rows if output.shape[-1] != rows else 0
    produced = output[..., first_row : first_row + rows]
    expected = torch.full_like(produced, math.nan)
    for pair in pairs:
        delta = scale * (seen @ pair.a.T) @ pair.b.T
        for cell in pair.b_map.cells:
            if cell.tensor == own_out:
                expected[..., torch.from_numpy(cell.source_rows)] = delta[
                    ..., cell.row : cell.row + cell.rows
                ]
    error = float((produced - expected).norm() / expected.norm())
    if not error <= _TOLERANCE.get(dtype, 1e-4):
        raise UnsupportedAdapter(
            f"rank {rank}, {adapter.name}: its own forward differs from the exported factors by "
            f"{error:.3g} (relative norm); the exporter names or orders this module's factors "
            "wrongly, so refitting would serve another policy than the one trained. Pass a "
            "correct export="
        )


def _local_input(
    full: torch.Tensor, a_map: TensorMap, parameter: int, features: int
) -> torch.Tensor:
    """This rank's columns of the input, in the order in which its `linear_in` multiplies them."""
    local = torch.full((*full.shape[:-1], features), math.nan, dtype=full.dtype)
    for cell in a_map.cells:
        if cell.tensor == parameter:
            columns = torch.from_numpy(cell.col + np.arange(cell.cols))
            local[..., torch.from_numpy(cell.source_cols)] = full[..., columns]
    return local


def _tensor_parallel(module: Any) -> tuple[int, int]:
    return world(module.tp_group)
