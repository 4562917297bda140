"""The trainer's model with its adapter merged, tensor by tensor: for export, and as a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from lora_refit.collectives import ProcessGroup, same_outcome, world
from lora_refit.errors import CoverageError, LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import DTYPE_CODES
from lora_refit.merged.dense import DenseMerger
from lora_refit.merged.shards import NewFolder, ShardWriter
from lora_refit.sources.base import PEFT_PREFIX
from lora_refit.sources.full_model import FullModel

_A, _B = ".lora_A.weight", ".lora_B.weight"
_WEIGHT, _WRAPPED = ".weight", ".base_layer.weight"


@dataclass(frozen=True)
class _Adapter:
    """a [r, in]; b [out, r]; magnitude: DoRA's [out], None for LoRA."""

    a: torch.Tensor
    b: torch.Tensor
    magnitude: torch.Tensor | None


class MergedState:
    """The whole model, adapter merged, as pairs of (Hugging Face name, tensor on the CPU).

    Collective: iterate, or save, on every rank. Rank 0 gets the tensors, the others none. One
    weight is merged at a time from the trainer's live one, which is only read; what comes out are
    copies. When rank 0 fails, or stops early, the other ranks are not left waiting.

    Args:
        model: the trainer's full model.
        factors: PEFT name -> lora_A [r, in] or lora_B [out, r], on the CPU; used on rank 0.
        scale: of B @ A; None for the base alone, whose adapters are left out.
        magnitudes: DoRA: module -> [out], in the order of lora_B's rows; empty for LoRA. Used on
            rank 0.
        dtype: of the floating-point tensors; None for the trainer's.
        group: the trainer's process group; None for the default group.

    Raises, when iterated or saved, on every rank: CoverageError if an adapter meets no weight (as
    that of an output layer tied to the embedding), a wrapped weight no adapter, or a name comes
    twice or never; LayoutMismatch if factors do not fit their weight; UnsupportedAdapter if an
    adapted weight is not fp32, fp16 or bf16.
    """

    def __init__(
        self,
        model: FullModel,
        factors: Mapping[str, torch.Tensor],
        scale: float | None,
        *,
        magnitudes: Mapping[str, torch.Tensor] | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self._model = model
        self._factors = factors
        self._magnitudes = magnitudes or {}
        self._dtype = dtype
        self._group = group
        self._first = world(group)[0] == 0
        self._merger = DenseMerger(scale) if scale is not None else None

    def __iter__(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        stream = self._model.weights()
        failure: Exception | None = None
        try:
            if self._first:
                yield from self._merged(stream)
        except Exception as error:
            failure = error
        finally:
            same_outcome(lambda: _finish(stream, failure), self._group)

    def save(self, path: str | Path, *, shard_bytes: int = 2 << 30) -> None:
        """Write a checkpoint folder that `transformers` loads. Collective; rank 0 writes.

        The folder appears when it is complete. Rank 0 holds one shard and a few tensors at a time.

        shard_bytes: the most for one safetensors file; a larger tensor has a file of its own.

        Raises, besides what iterating raises, RefitError if there is something at `path` already.
        """
        folder = same_outcome(
            lambda: NewFolder(Path(path).absolute()) if self._first else None, self._group
        )
        same_outcome(lambda: self._write(folder, shard_bytes), self._group)

    def _write(self, folder: NewFolder | None, shard_bytes: int) -> None:
        if folder is None:
            for _ in self:
                pass
            return
        try:
            writer = ShardWriter(folder.partial, shard_bytes)
            with closing(self.__iter__()) as tensors:
                for name, tensor in tensors:
                    writer.add(name, tensor)
            writer.finish()
            self._model.write_config(folder.partial)
            _set_dtype(folder.partial / "config.json", writer.dtype)
            folder.complete()
        except BaseException:
            folder.discard()
            raise

    def _merged(
        self, stream: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        adapters = _adapters(self._factors, self._magnitudes)
        met: set[str] = set()
        for exported, tensor in stream:
            module = exported.removesuffix(_WRAPPED)
            wrapped = module != exported
            name = module + _WEIGHT if wrapped else exported
            if name in met:
                raise CoverageError(f"{name}: the trainer exports it twice")
            met.add(name)
            if wrapped:
                yield name, self._merge(module, adapters.get(module), tensor)
            else:
                yield name, tensor.to(self._written_dtype(tensor), copy=True).contiguous()
        _require_complete(met, {module + _WEIGHT for module in adapters}, self._model.names())

    def _merge(self, module: str, adapter: _Adapter | None, base: torch.Tensor) -> torch.Tensor:
        if adapter is None:
            raise CoverageError(
                f"{module}: its weight is under an adapter whose factors were not exported; the "
                "checkpoint would lack its update"
            )
        if base.dtype not in DTYPE_CODES:
            raise UnsupportedAdapter(
                f"{module}: its weight is exported as {base.dtype}; fp32, fp16 and bf16 can be merged"
            )
        rows, cols = adapter.b.shape[0], adapter.a.shape[-1]
        if tuple(base.shape) != (rows, cols) or adapter.b.shape[1] != adapter.a.shape[0]:
            raise LayoutMismatch(
                f"{module}: lora_B {tuple(adapter.b.shape)} and lora_A {tuple(adapter.a.shape)} do "
                f"not fit its weight {tuple(base.shape)}"
            )
        if self._merger is None:
            return base.to(self._written_dtype(base), copy=True).contiguous()
        merged = torch.empty(base.shape, dtype=self._written_dtype(base))
        if adapter.magnitude is None:
            self._merger.merge(base, adapter.b, adapter.a, merged)
        else:
            self._merger.merge_dora(module, base, adapter.b, adapter.a, adapter.magnitude, merged)
        return merged

    def _written_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        return self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype


def _adapters(
    factors: Mapping[str, torch.Tensor], magnitudes: Mapping[str, torch.Tensor]
) -> dict[str, _Adapter]:
    """By module, as the model names it."""
    found = {}
    for name, a in factors.items():
        if name.endswith(_A):
            prefixed = name.removesuffix(_A)
            module = prefixed.removeprefix(PEFT_PREFIX)
            found[module] = _Adapter(a, factors[prefixed + _B], magnitudes.get(module))
    without = [module for module, item in found.items() if item.magnitude is None]
    if magnitudes and (without or magnitudes.keys() - found.keys()):
        odd = (without or sorted(magnitudes.keys() - found.keys()))[0]
        raise CoverageError(
            f"{odd}: has a DoRA magnitude but no lora_A, or a lora_A but no magnitude, unlike the "
            "other modules"
        )
    return found


def _require_complete(met: set[str], adapted: set[str], expected: Iterable[str] | None) -> None:
    if unmerged := sorted(adapted - met):
        raise CoverageError(
            f"{unmerged[0]}: has an adapter, but the trainer exports no such weight (an output "
            "layer that is tied to the embedding?); train without this module, or untie it"
        )
    if missing := sorted(set(expected or ()) - met):
        raise CoverageError(
            f"{missing[0]} and {len(missing) - 1} more: the base checkpoint has them, but the "
            "trainer does not export them; a model loaded without them would be another"
        )


def _set_dtype(config: Path, dtype: torch.dtype | None) -> None:
    """What `transformers` loads by default is the dtype that config.json names."""
    settings = json.loads(config.read_text())
    settings.pop("torch_dtype", None)
    settings["dtype"] = str(dtype or torch.float32).removeprefix("torch.")
    config.write_text(json.dumps(settings, indent=2))


def _finish(stream: Iterator[tuple[str, torch.Tensor]], failure: Exception | None) -> None:
    """Gathering is collective, so it is brought to its end wherever this rank stopped."""
    for _ in stream:
        pass
    if failure is not None:
        raise failure
