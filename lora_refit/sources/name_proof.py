"""The proof of names and places: each factor adapts the base weight that its name says.

Tags and the forward proof cannot see two modules that exchanged names, or rows that moved in step:
both stay right with themselves. But row i of lora_B adapts row i of its module's base weight, and
column j of lora_A column j. So what the checkpoint stores under the factor's name at (i, j) must be
what the trainer's module holds where the export map points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.sources.base import PEFT_PREFIX, BaseWeight, has_storage
from lora_refit.trace.axis import IntArray
from lora_refit.trace.export import ExportMap
from lora_refit.trace.movement import Cell, TensorMap

_A, _B = ".lora_A.weight", ".lora_B.weight"
_SAMPLES = 8
_ALIKE = 0.95
"""Cosine above which two weight vectors count as one: quantised or lightly tuned bases pass, the
vectors of other rows, columns or layers are far from it."""


class StoredWeights(Protocol):
    """The checkpoint that the engine serves."""

    def __contains__(self, name: str) -> bool: ...

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """[len(rows), in] of a weight [out, in]."""


class Checkpoint:
    """Safetensors files of a Hugging Face checkpoint, read in slices."""

    def __init__(self, folder: Path, file_of: Mapping[str, str]) -> None:
        self._folder = folder
        self._file_of = file_of

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(str(self._folder / self._file_of[name]), framework="pt") as file:
            weight = file.get_slice(name)
            return torch.cat([weight[row : row + 1] for row in rows])


def prove_names(
    held: Sequence[BaseWeight], base: StoredWeights, export_map: ExportMap, rank: int
) -> None:
    """Compare sampled rows of every adapted module, over the columns that its lora_A names.

    Local. Factors whose module the checkpoint stores under no name of its own, such as packed
    experts, are left out. Raises UnsupportedAdapter naming module, rank and factor.
    """
    canonical = {copy: first for first, copy in export_map.replicas}
    owners = {
        parameter.name: canonical.get(index, index)
        for index, parameter in enumerate(export_map.parameters)
        if parameter.rank == rank
    }
    factors = {factor.name: factor for factor in export_map.factors}
    readers: dict[int, list[TensorMap]] = {}
    for factor in export_map.factors:
        for parameter in {cell.tensor for cell in factor.cells}:
            readers.setdefault(parameter, []).append(factor)
    for module in held:
        if module.weight is None:
            continue
        if not has_storage(module.weight):
            raise LayoutMismatch(
                f"{module.b}: its base weight has no storage (offloaded?); reload it first"
            )
        own_in, own_out = owners[module.a], owners[module.b]
        for lora_b in readers.get(own_out, []):
            target = lora_b.name.removesuffix(_B)
            weight_name = target.removeprefix(PEFT_PREFIX) + ".weight"
            if weight_name in base:
                columns = _columns(factors[target + _A], own_in)
                for cell in lora_b.cells:
                    if cell.tensor == own_out:
                        _compare(module, module.weight, weight_name, base, cell, columns, rank)


def _columns(lora_a: TensorMap, parameter: int) -> tuple[IntArray, IntArray]:
    """(columns of the factor, columns of this rank's `linear_in`) that correspond."""
    cells = [cell for cell in lora_a.cells if cell.tensor == parameter]
    stored = [cell.col + np.arange(cell.cols) for cell in cells]
    held = [cell.source_cols for cell in cells]
    return np.concatenate(stored), np.concatenate(held)


def _compare(
    module: BaseWeight,
    weight: torch.Tensor,
    weight_name: str,
    base: StoredWeights,
    cell: Cell,
    columns: tuple[IntArray, IntArray],
    rank: int,
) -> None:
    chosen = _samples(cell.rows)
    stored_rows = (cell.row + chosen).tolist()
    held_rows = torch.from_numpy(module.first_row + cell.source_rows[chosen])
    stored = base.rows(weight_name, stored_rows)[:, torch.from_numpy(columns[0])]
    held = weight[held_rows][:, torch.from_numpy(columns[1])]
    alike = torch.cosine_similarity(stored.double(), held.detach().cpu().double(), dim=-1)
    worst = int(alike.argmin())
    if not float(alike[worst]) >= _ALIKE:
        raise UnsupportedAdapter(
            f"rank {rank}, {module.b}: exported as {weight_name.removesuffix('.weight')}, but "
            f"row {stored_rows[worst]} of that weight in the checkpoint is not row "
            f"{int(held_rows[worst])} of the trainer's module (cosine {float(alike[worst]):.3f}); "
            "the exporter gives factors the names or the order of other modules, or the trainer's "
            "base is not the checkpoint's"
        )


def _samples(count: int) -> IntArray:
    """Indices spread over `count` positions, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, _SAMPLES).round().astype(np.int64))
