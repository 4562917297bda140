"""A Megatron-Core policy with Megatron-Bridge LoRA as the source of a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lora_refit.collectives import world
from lora_refit.devices import common_device, finish_current_work
from lora_refit.errors import LayoutMismatch, UnsupportedAdapter
from lora_refit.sources.base import PEFT_PREFIX, BaseWeight
from lora_refit.sources.forward_proof import AdapterModule, prove_forward
from lora_refit.sources.full_model import BridgeModel, FullModel
from lora_refit.sources.name_proof import Checkpoint, prove_names
from lora_refit.trace.export import ExportMap

_ADAPTER_MARK = ".adapter."
_MAGNITUDE = "weight_magnitude"
"""DoRA's parameter; it belongs to the merged weight, no lora_A or lora_B holds it."""

Exporter = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class MegatronSource:
    """The LoRA adapter of one Megatron rank's model chunks.

    model_chunks: the list that Megatron training uses, LoRA attached, DDP-wrapped or not.
    bridge: the Megatron-Bridge AutoBridge of the model; its `export_adapter_weights` is traced,
        and factor names are proven against the checkpoint that it loaded.
    export: a callable that yields PEFT-named factors on every rank, instead of the bridge's.
    config: the PEFT config that `export` follows; needed without a bridge.

    Raises UnsupportedAdapter for what an adapter cannot carry: trainable parameters outside the
    adapter, modules of different rank or alpha. `parameters` raises LayoutMismatch once a
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
        _refuse_other_trainables(self._chunks)
        self._owners = _adapter_owners(self._chunks)
        self._wrappers = [
            (f"{index}.{name}", wrapper, _ties_output(chunk))
            for index, chunk in enumerate(self._chunks)
            for name, wrapper in chunk.named_modules()
            if hasattr(wrapper, "to_wrap") and getattr(wrapper, "adapter", None) is not None
        ]
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
            "use_dora": any(item.magnitude is not None for item in self.base_weights()),
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
            prove_names(self.base_weights(), checkpoint, export_map, rank)

    def base_weights(self) -> list[BaseWeight]:
        """The base weight of every adapted module, looked up anew: trainers move them."""
        return [base for item in self._wrappers for base in _base_weights_of(*item)]

    def full_model(self) -> FullModel:
        """As the bridge exports it. Raises UnsupportedAdapter without a bridge."""
        if self._bridge is None:
            raise UnsupportedAdapter(
                "exporting the whole model needs the Megatron-Bridge AutoBridge; pass bridge="
            )
        return BridgeModel(self._bridge, self._chunks)

    def _rank_and_alpha(self) -> tuple[int, float]:
        found: dict[tuple[int, float], str] = {}
        for name, _, (rank, alpha) in self._adapters:
            found.setdefault((int(rank), alpha), name)
        if len(found) > 1:
            (first, one), (second, other) = list(found.items())[:2]
            raise UnsupportedAdapter(
                f"{one} has (r, alpha) {first} but {other} has {second}; adapters of different "
                "rank or alpha are not supported; give all modules the same"
            )
        if not found:
            raise UnsupportedAdapter("no Megatron-Bridge LoRA adapter found in these model chunks")
        return next(iter(found))


def _is_parallel_adapter(module: torch.nn.Module) -> bool:
    """Megatron-Bridge's ParallelLinearAdapter, told by what is used of it."""
    needed = ("linear_in", "linear_out", "dim", "alpha", "input_is_parallel")
    return all(hasattr(module, name) for name in needed)


def _base_weights_of(name: str, wrapper: Any, ties_output: bool) -> Iterator[BaseWeight]:
    """The base weights under one wrapper's adapters."""
    adapter = wrapper.adapter
    if not _is_parallel_adapter(adapter):
        for key, part in adapter.named_modules():
            if _is_parallel_adapter(part):
                yield _without_weight(
                    f"{name}.adapter.{key}",
                    "it adapts a part of a fused weight; adapt linear_qkv and linear_fc1 as a whole",
                )
        return
    weight = getattr(wrapper.to_wrap, "weight", None)
    if ties_output and name.endswith("output_layer"):
        reason = "the output layer is tied to the embedding, which must not change with it"
        yield _without_weight(f"{name}.adapter", reason)
    elif weight is None:
        yield _without_weight(f"{name}.adapter", "its module holds no single weight of its own")
    elif (
        hasattr(adapter, _MAGNITUDE)
        and adapter.input_is_parallel
        and world(adapter.tp_group)[1] > 1
    ):
        # What Bridge trains then is no DoRA: each rank divides by the norm of its own columns.
        reason = (
            "Megatron-Bridge takes DoRA's norm over a rank's own columns only, so at tensor parallel "
            "sizes above 1 its forward is another than that of any merged weight"
        )
        yield _without_weight(f"{name}.adapter", reason)
    else:
        rows = int(adapter.linear_out.weight.shape[0])
        sharded = weight.shape[0] == rows
        yield BaseWeight(
            a=f"{name}.adapter.linear_in.weight",
            b=f"{name}.adapter.linear_out.weight",
            weight=weight,
            first_row=0 if sharded else world(adapter.tp_group)[0] * rows,
            magnitude=getattr(adapter, _MAGNITUDE, None),
        )


def _without_weight(adapter: str, reason: str) -> BaseWeight:
    return BaseWeight(
        f"{adapter}.linear_in.weight", f"{adapter}.linear_out.weight", None, refused=reason
    )


def _ties_output(chunk: Any) -> bool:
    """Looks through the wrappers of mixed precision and data parallelism."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return bool(getattr(chunk, "share_embeddings_and_output_weights", False))


def _checkpoint_of(bridge: Any) -> Checkpoint | None:
    """The checkpoint that the bridge loaded the base from; None if it had only a config."""
    state = getattr(getattr(bridge, "hf_pretrained", None), "state", None)
    source = getattr(state, "source", None)
    files = getattr(source, "key_to_filename_map", None)
    return Checkpoint(Path(source.path), files) if source is not None and files else None


def _adapter_owners(
    chunks: Sequence[torch.nn.Module],
) -> list[tuple[str, dict[str, torch.nn.Parameter], str]]:
    """(name, the module's own parameter dictionary, key) of every lora_A and lora_B parameter.

    Looking parameters up where their module keeps them follows a trainer that replaces them, and
    costs no walk over the model at each publish.
    """
    return [
        (f"{index}.{prefix}.{key}", module._parameters, key)
        for index, chunk in enumerate(chunks)
        for prefix, module in chunk.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None and _ADAPTER_MARK in f"{prefix}.{key}" and key != _MAGNITUDE
    ]


def _refuse_other_trainables(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad and _ADAPTER_MARK not in name:
                raise UnsupportedAdapter(
                    f"{name}: trainable, but not part of an adapter; the engine would never see "
                    "its updates. Freeze it"
                )
