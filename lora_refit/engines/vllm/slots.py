"""vLLM's preallocated LoRA slots: finding their buffers, owning a slot, keeping it ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.lora.lora_model import LoRAModel

from lora_refit.devices import common_device
from lora_refit.errors import CommitFailed, EngineAsleep, LayoutMismatch


class SlotBuffer(msgspec.Struct, frozen=True, array_like=True):
    """One stacked LoRA buffer of a wrapped module; `shape` and `numel` are of a single slot."""

    module: str
    attribute: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    numel: int

    @property
    def name(self) -> str:
        return f"{self.module}.{self.attribute}[{self.index}]"


class GuardAdapter(LoRAModel):
    """Stands for a refitted slot in vLLM's registry.

    It holds no weights, so once its slot is filled vLLM must not activate it again: that would
    serve the base model under the adapter's name. Being asked for weights then is an error.
    """

    def __init__(self, lora_id: int, rank: int) -> None:
        super().__init__(lora_id, rank, {})
        self.sealed = False

    def get_lora(self, module_name: str) -> Any:
        if self.sealed:
            raise CommitFailed(
                f"vLLM evicted refitted adapter {self.id} and tries to load it again; its weights "
                "live in its slot only. Refit again, and keep other adapters within max_loras"
            )
        return None


class Slots:
    """The LoRA slots of one worker. Buffers are enumerated once; vLLM never reallocates them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._tensors: list[torch.Tensor] = []
        self.buffers: tuple[SlotBuffer, ...] = self._enumerate()
        self._bases = np.asarray([tensor.data_ptr() for tensor in self._tensors], np.uint64)
        self._nbytes = np.asarray([tensor[0].nbytes for tensor in self._tensors], np.uint64)
        self._enabled_flags = [
            module.adapter_enabled
            for module in manager.modules.values()
            if hasattr(module, "adapter_enabled")
        ]

    @property
    def device(self) -> torch.device:
        """Where the slots lie; a worker has one device."""
        return common_device(
            [(b.name, t) for b, t in zip(self.buffers, self._tensors, strict=True)]
        )

    @property
    def count(self) -> int:
        return int(self._manager.lora_slots)

    @property
    def free(self) -> int:
        """Adapters that can be added without evicting one: vLLM keeps each on the CPU as well."""
        manager = self._manager
        slots = sum(lora_id is None for lora_id in manager.lora_index_to_id)
        return max(0, min(slots, int(manager.capacity) - len(manager)))

    def views(self, slot: int) -> list[torch.Tensor]:
        """The slot's part of every buffer, in the order of `buffers`."""
        return [tensor[slot] for tensor in self._tensors]

    def addresses(self, slot: int) -> npt.NDArray[np.uint64]:
        """Address of the slot's part of every buffer, uint64 [buffers]."""
        return self._bases + np.uint64(slot) * self._nbytes

    def nbytes(self) -> npt.NDArray[np.uint64]:
        """Bytes of one slot in every buffer."""
        return self._nbytes

    def reserve(self, lora_id: int, rank: int) -> int:
        """Take a zeroed slot for an adapter id, pinned, and return its index.

        Raises LayoutMismatch if that would evict somebody else's adapter.
        """
        manager = self._manager
        manager.remove_adapter(lora_id)
        if self.free == 0:
            raise LayoutMismatch(
                f"all {self.count} LoRA slots (or all {manager.capacity} CPU places) hold other "
                "adapters; raise max_loras and max_cpu_loras, or remove an adapter"
            )
        guard = GuardAdapter(lora_id, rank)
        # Not add_adapter: it wants to pack weights, and there are none.
        manager._registered_adapters[lora_id] = guard
        manager.activate_adapter(lora_id)
        manager.pin_adapter(lora_id)
        guard.sealed = True
        slot = self._slot_of(lora_id)
        self.clear(slot)
        return slot

    def rename(self, old_id: int, new_id: int) -> None:
        """Hand an adapter's slot, as it is, to another id; vLLM no longer knows the old one."""
        manager = self._manager
        slot = self._slot_of(old_id)
        guard = manager.list_adapters()[old_id]
        manager.remove_adapter(old_id)
        guard.id = new_id
        manager._registered_adapters[new_id] = guard
        manager._active_adapters[new_id] = None
        manager.lora_index_to_id[slot] = new_id
        manager.pin_adapter(new_id)

    def release(self, lora_id: int) -> None:
        """Give the slot of an adapter id back, zeroed."""
        if lora_id in self._manager.lora_index_to_id:
            self.clear(self._slot_of(lora_id))
        self._manager.remove_adapter(lora_id)

    def clear(self, slot: int) -> None:
        """Zero the slot, padding included."""
        for view in self.views(slot):
            view.zero_()

    def problem(self, lora_id: int, slot: int) -> str | None:
        """Why the slot is no longer the adapter's, or None if it is registered and pinned."""
        manager = self._manager
        if manager.lora_index_to_id[slot] != lora_id:
            return f"slot {slot} belongs to adapter {manager.lora_index_to_id[slot]}"
        guard = manager.list_adapters().get(lora_id)
        if not isinstance(guard, GuardAdapter):
            return f"adapter {lora_id} was replaced in vLLM's registry"
        for cache in (manager._registered_adapters, manager._active_adapters):
            if lora_id not in cache.pinned_items:
                return f"adapter {lora_id} was unpinned (add_lora with load_inplace does that)"
        return None

    def enable(self, slot: int, flags: Sequence[int]) -> None:
        """Set the per-module flags without which fused MoE layers ignore a slot."""
        for tensor, flag in zip(self._enabled_flags, flags, strict=True):
            tensor[slot] = flag

    def enabled(self, slot: int) -> tuple[int, ...]:
        return tuple(int(tensor[slot]) for tensor in self._enabled_flags)

    def _slot_of(self, lora_id: int) -> int:
        try:
            return int(self._manager.lora_index_to_id.index(lora_id))
        except ValueError:
            raise EngineAsleep(f"adapter {lora_id} holds no LoRA slot any more") from None

    def _enumerate(self) -> tuple[SlotBuffer, ...]:
        """Every stacked buffer once: some modules expose the same storage under two attributes."""
        buffers = []
        seen: set[tuple[int, int]] = set()
        for name, module in self._manager.modules.items():
            for attribute in sorted(vars(module)):
                if not attribute.endswith("_stacked"):
                    continue
                value = vars(module)[attribute]
                stacked = value if isinstance(value, (tuple, list)) else (value,)
                for index, tensor in enumerate(stacked):
                    key = _storage_key(tensor)
                    if not self._is_slot_buffer(tensor) or key in seen:
                        continue
                    seen.add(key)
                    self._tensors.append(tensor)
                    buffers.append(_describe(name, attribute, index, tensor))
        return tuple(buffers)

    def _is_slot_buffer(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.dim() >= 3 and len(tensor) == self.count


def _storage_key(tensor: Any) -> tuple[int, int]:
    if not isinstance(tensor, torch.Tensor):
        return (0, 0)
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())


def _describe(module: str, attribute: str, index: int, tensor: torch.Tensor) -> SlotBuffer:
    if not tensor.is_contiguous():
        raise LayoutMismatch(f"{module}.{attribute}[{index}]: its slots are not contiguous")
    view = tensor[0]
    return SlotBuffer(
        module=module,
        attribute=attribute,
        index=index,
        shape=tuple(view.shape),
        dtype=str(view.dtype).removeprefix("torch."),
        numel=view.numel(),
    )
