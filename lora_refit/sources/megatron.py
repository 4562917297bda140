"""A Megatron-Core policy with Megatron-Bridge LoRA as the source of a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lora_refit.collectives import world
from lora_refit.devices import common_device, finish_current_work
from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.sources.base import PEFT_PREFIX
from lora_refit.sources.forward_proof import AdapterModule, prove_forward
from lora_refit.sources.name_proof import AdaptedModule, Checkpoint, prove_names
from lora_refit.trace.export import ExportMap

_ADAPTER_MARK = ".adapter."

Exporter = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class MegatronSource:
    """The LoRA adapter of one Megatron rank's model chunks.

    model_chunks: the list that Megatron training uses, LoRA attached, DDP-wrapped or not.
    bridge: the Megatron-Bridge AutoBridge of the model; its `export_adapter_weights` is traced,
        and factor names are proven against the checkpoint that it loaded.
    export: a callable that yields PEFT-named factors on every rank, instead of the bridge's.
    config: the PEFT config that `export` follows; needed without a bridge.

    Raises UnsupportedAdapter for what an adapter cannot carry: DoRA, trainable parameters outside
    the adapter, modules of different rank or alpha. `parameters` raises LayoutMismatch once a
    module's rank or alpha has changed: engines were told at attach.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge: Any = None,
        *,
        export: Exporter | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        if bridge is None and (export is None or config is None):
            raise UnsupportedAdapter(
                "pass bridge=, or export= with config=, the PEFT config of what it yields"
            )
        if isinstance(model_chunks, torch.nn.Module):
            model_chunks = [model_chunks]
        self._chunks = list(model_chunks)
        self._bridge = bridge
        self._export = export
        self._config = config
        self._names: dict[str, None] = {}
        _refuse_dora(self._chunks)
        _refuse_other_trainables(self._chunks)
        self._owners = _adapter_owners(self._chunks)
        self._adapters = [
            (f"{index}.{name}", module, (module.dim, module.alpha))
            for index, chunk in enumerate(self._chunks)
            for name, module in chunk.named_modules()
            if _is_parallel_adapter(module)
        ]

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Adapter parameters in model order, named `<chunk>.<parameter name>`."""
        for name, module, before in self._adapters:
            if (module.dim, module.alpha) != before:
                raise LayoutMismatch(
                    f"{name}: its (r, alpha) was {before}, now {(module.dim, module.alpha)}; build "
                    "a new MegatronSource and Publisher, and attach again"
                )
        return [(name, owner[key]) for name, owner, key in self._owners]

    def settle(self) -> None:
        """Force the parameter gather that Megatron overlaps with the next forward.

        With `overlap_param_gather` the optimizer's step leaves the shards of other data-parallel
        ranks as they were. Collective then, as the gather itself is; otherwise local.
        """
        for chunk in self._chunks:
            ddp: Any = chunk
            config = getattr(ddp, "ddp_config", None)
            if config is not None and config.overlap_param_gather:
                with torch.no_grad():
                    ddp.start_param_sync(force_sync=True)
                # The gather is ordered on torch's stream, the pack perhaps on another.
                finish_current_work(common_device(self.parameters()))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """PEFT-named factors from the bridge or the given callable. Collective."""
        for name, tensor in self._export() if self._export is not None else self._bridge_export():
            self._names[name] = None
            yield name, tensor

    def _bridge_export(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._bridge.export_adapter_weights(
            self._chunks, cpu=True, show_progress=False
        ):
            yield name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name, tensor

    def config(self) -> dict[str, Any]:
        """The PEFT config of what is adapted. Collective if nothing was exported before."""
        if self._config is not None:
            return dict(self._config)
        if not self._names:
            for _ in self.export():
                pass
        rank, alpha = self._rank_and_alpha()
        targets = sorted({name.rsplit(".", 3)[-3] for name in self._names})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "rank_pattern": {},
            "alpha_pattern": {},
            "target_modules": targets,
            "base_model_name_or_path": "",
        }

    def prove(self, export_map: ExportMap, rank: int) -> None:
        """Compare every adapter's own forward with `alpha / r * B @ (A @ x)`, and, where the
        bridge knows the checkpoint, the base weight of every factor's name. Collective."""
        adapters = [AdapterModule(name, module) for name, module, _ in self._adapters]
        prove_forward(adapters, self.export(), self.parameters(), export_map, self.config(), rank)
        checkpoint = _checkpoint_of(self._bridge)
        if checkpoint is not None:
            prove_names(list(self._adapted_modules()), checkpoint, export_map, rank)

    def _adapted_modules(self) -> Iterator[AdaptedModule]:
        """Modules with one adapter for their whole weight; split projections have several."""
        for index, chunk in enumerate(self._chunks):
            for name, wrapper in chunk.named_modules():
                adapter = getattr(wrapper, "adapter", None)
                weight = getattr(getattr(wrapper, "to_wrap", None), "weight", None)
                if weight is None or adapter is None or not _is_parallel_adapter(adapter):
                    continue
                rows = int(adapter.linear_out.weight.shape[0])
                sharded = weight.shape[0] == rows
                first_row = 0 if sharded else world(adapter.tp_group)[0] * rows
                yield AdaptedModule(f"{index}.{name}.adapter", weight, first_row)

    def _rank_and_alpha(self) -> tuple[int, float]:
        found: dict[tuple[int, float], str] = {}
        for name, _, (rank, alpha) in self._adapters:
            found.setdefault((int(rank), alpha), name)
        if len(found) > 1:
            (first, one), (second, other) = list(found.items())[:2]
            raise UnsupportedAdapter(
                f"{one} has (r, alpha) {first} but {other} has {second}; adapters of different "
                "rank or alpha need export= with a config that carries rank and alpha patterns"
            )
        if not found:
            raise UnsupportedAdapter("no Megatron-Bridge LoRA adapter found in these model chunks")
        return next(iter(found))


def _is_parallel_adapter(module: torch.nn.Module) -> bool:
    """Megatron-Bridge's ParallelLinearAdapter, told by what is used of it."""
    needed = ("linear_in", "linear_out", "dim", "alpha", "input_is_parallel")
    return all(hasattr(module, name) for name in needed)


def _checkpoint_of(bridge: Any) -> Checkpoint | None:
    """The checkpoint that the bridge loaded the base from; None if it had only a config."""
    state = getattr(getattr(bridge, "hf_pretrained", None), "state", None)
    source = getattr(state, "source", None)
    files = getattr(source, "key_to_filename_map", None)
    return Checkpoint(Path(source.path), files) if source is not None and files else None


def _adapter_owners(
    chunks: Sequence[torch.nn.Module],
) -> list[tuple[str, dict[str, torch.nn.Parameter], str]]:
    """(name, the module's own parameter dictionary, key) of every adapter parameter.

    Looking parameters up where their module keeps them follows a trainer that replaces them, and
    costs no walk over the model at each publish.
    """
    return [
        (f"{index}.{prefix}.{key}", module._parameters, key)
        for index, chunk in enumerate(chunks)
        for prefix, module in chunk.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and _ADAPTER_MARK in f"{prefix}.{key}"
    ]


def _refuse_dora(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for name, _ in chunk.named_parameters():
            if "magnitude" in name:
                raise UnsupportedAdapter(
                    f"{name}: DoRA rescales the merged weight by a learned magnitude, which a "
                    "LoRA slot cannot hold; train with LoRA"
                )


def _refuse_other_trainables(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and _ADAPTER_MARK not in name:
                raise UnsupportedAdapter(
                    f"{name}: trainable, but not part of an adapter; the engine would never see "
                    "its updates. Freeze it"
                )
