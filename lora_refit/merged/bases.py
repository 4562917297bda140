"""A rank's base weights: described once, checked and looked up anew at every merge."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lora_refit.devices import device_of
from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import DTYPE_CODES, BufferType
from lora_refit.sources.base import BaseWeight, Source, has_storage

_ELEMENTS = 64
"""Of each weight that every merge of it looks at."""
_NOTHING = torch.zeros(0, dtype=torch.uint8)


class BaseShards:
    """The base weights under a rank's adapters, as MergeKernel sources.

    used: which of `source.base_weights()` are merged; the others are left alone.
    Raises UnsupportedAdapter, naming the module, for a base that is stored in anything but floats,
    and what `now` raises.
    """

    def __init__(self, source: Source, used: frozenset[int], device: torch.device) -> None:
        self._source = source
        self._used = used
        self.device = device
        held = source.base_weights()
        for index in sorted(used):
            _require_floats(held[index])
        self._traced = [_facts(base) for base in held]
        self.buffers = tuple(
            BufferType(weight.dtype, weight.numel())
            if index in used and (weight := base.weight) is not None
            else BufferType(torch.float32, 0)
            for index, base in enumerate(held)
        )
        self.widths = tuple(0 if base.weight is None else base.weight.shape[-1] for base in held)
        held = self.now()
        self._samples = {index: _bits_of([held[index]]) for index in sorted(used)}

    def require_pristine(self, indices: Collection[int]) -> None:
        """Compare elements of these weights with what they were at first.

        Raises LayoutMismatch, naming the module, if somebody has written to one: an adapter that is
        merged in place, and taken out again, does not leave the base as it was.
        """
        held = self.now()
        found = _bits_of([held[index] for index in indices])
        wanted = torch.cat([_NOTHING, *(self._samples[index] for index in indices)])
        if torch.equal(found, wanted):
            return
        changed = next(i for i in indices if not torch.equal(_bits_of([held[i]]), self._samples[i]))
        raise LayoutMismatch(
            f"{held[changed].b}: its base weight has changed since the Publisher was built; keep "
            "adapters out of the base in the trainer, load the base again and build a new Publisher"
        )

    def held(self) -> Sequence[BaseWeight]:
        """All base weights of the source, unchecked."""
        return self._source.base_weights()

    def now(self) -> Sequence[BaseWeight]:
        """The live base weights.

        Raises LayoutMismatch, naming the module, if a used one has changed its shape or dtype, has
        moved to another device, is not contiguous or was offloaded.
        """
        held = self._source.base_weights()
        if len(held) != len(self._traced):
            raise LayoutMismatch(
                f"{len(held)} base weights, but {len(self._traced)} when the Publisher was built; "
                "build a new one after changing the model"
            )
        for index in self._used:
            self._require_in_place(held[index], self._traced[index])
        return held

    def _require_in_place(self, base: BaseWeight, traced: object) -> None:
        weight = base.weight
        if weight is None or _facts(base) != traced:
            raise LayoutMismatch(
                f"{base.b}: its base weight was {traced}, now {_facts(base)}; build a new Publisher "
                "after changing the model"
            )
        if not has_storage(weight):
            raise LayoutMismatch(
                f"{base.b}: its base weight has no storage (offloaded?); keep the base in place "
                "until the refit is done, or reload it first"
            )
        if device_of(weight) != self.device or not weight.is_contiguous():
            raise LayoutMismatch(
                f"{base.b}: its base weight lies on {device_of(weight)} "
                f"({'' if weight.is_contiguous() else 'not '}contiguous), the adapter on "
                f"{self.device}; bring it there"
            )


def _bits_of(bases: Sequence[BaseWeight]) -> torch.Tensor:
    """Bits of elements all over the weights, uint8 on the CPU; brought there at once."""
    parts = []
    for base in bases:
        assert base.weight is not None
        flat = base.weight.detach().view(-1)
        places = torch.linspace(0, len(flat) - 1, _ELEMENTS, dtype=torch.float64).long()
        parts.append(flat[places.to(flat.device)].view(torch.uint8))
    return torch.cat(parts).cpu() if parts else _NOTHING


def addresses_of(weights: Sequence[BaseWeight]) -> npt.NDArray[np.uint64]:
    """uint64 [weights]; 0 where there is no weight."""
    return np.asarray(
        [0 if base.weight is None else base.weight.data_ptr() for base in weights], np.uint64
    )


def _require_floats(base: BaseWeight) -> None:
    if base.weight is not None and base.weight.dtype not in DTYPE_CODES:
        raise UnsupportedAdapter(
            f"{base.b}: its base weight is stored as {base.weight.dtype}; merging into quantised "
            "storage would need its scales and new ones. Train with a bf16, fp16 or fp32 base, or "
            "use adapter mode"
        )


def _facts(base: BaseWeight) -> tuple[tuple[int, ...], str]:
    if base.weight is None:
        return (), "absent"
    return tuple(base.weight.shape), str(base.weight.dtype)
