"""A Megatron-Core policy with Megatron-Bridge LoRA as the source of a refit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from lora_refit.errors import UnsupportedAdapter
from lora_refit.sources.base import PEFT_PREFIX
from lora_refit.sources.forward_proof import AdapterModule, prove_forward
from lora_refit.trace.export import ExportMap

_ADAPTER_MARK = ".adapter."

Exporter = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class MegatronSource:
    """The LoRA adapter of one Megatron rank's model chunks.

    model_chunks: the list that Megatron training uses, LoRA attached, DDP-wrapped or not.
    bridge: the Megatron-Bridge AutoBridge of the model; its `export_adapter_weights` is traced.
    export, config: instead of a bridge, a callable that yields PEFT-named factors on every rank
        and the PEFT config they follow.

    Raises UnsupportedAdapter for what an adapter cannot carry: DoRA, trainable parameters outside
    the adapter, modules of different rank or alpha.
    """

    def __init__(
        self,
        model_chunks: Sequence[torch.nn.Module] | torch.nn.Module,
        bridge: Any = None,
        *,
        export: Exporter | None = None,
        config: dict[str, Any] | None = None,
    ) -> None:
        if (bridge is None) == (export is None):
            raise UnsupportedAdapter("pass either bridge= or export= with config=, not both")
        if export is not None and config is None:
            raise UnsupportedAdapter("export= needs config=, the PEFT config of what it yields")
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

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Adapter parameters in model order, named `<chunk>.<parameter name>`."""
        return [(name, owner[key]) for name, owner, key in self._owners]

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """PEFT-named factors from the bridge or the given callable. Collective."""
        if self._export is not None:
            yield from self._export()
            return
        for name, tensor in self._bridge.export_adapter_weights(
            self._chunks, cpu=True, show_progress=False
        ):
            full = name if name.startswith(PEFT_PREFIX) else PEFT_PREFIX + name
            self._names[full] = None
            yield full, tensor

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
        """Compare every adapter's own forward with `alpha / r * B @ (A @ x)`. Collective."""
        adapters = [
            AdapterModule(f"{index}.{name}", module)
            for index, chunk in enumerate(self._chunks)
            for name, module in chunk.named_modules()
            if _is_parallel_adapter(module)
        ]
        prove_forward(adapters, self.export(), self.parameters(), export_map, self.config(), rank)

    def _rank_and_alpha(self) -> tuple[int, float]:
        found: dict[tuple[int, float], str] = {}
        for chunk in self._chunks:
            for name, module in chunk.named_modules():
                if _is_parallel_adapter(module):
                    found.setdefault((int(module.dim), module.alpha), name)
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
