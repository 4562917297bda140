"""What a trainer must offer to be refitted: its live adapter parameters and a trusted exporter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from lora_refit.errors import UnsupportedAdapter

if TYPE_CHECKING:
    from lora_refit.sources.full_model import FullModel
    from lora_refit.trace.export import ExportMap

PEFT_PREFIX = "base_model.model."


def lora_scale(config: dict[str, Any]) -> float:
    """The factor on `B @ A` under a PEFT config without rank or alpha patterns.

    Raises UnsupportedAdapter if the config has no usable rank or alpha.
    """
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedAdapter(
            f"the PEFT config lacks a number r or lora_alpha ({error!r}); give both"
        ) from error
    if rank < 1:
        raise UnsupportedAdapter(f"the PEFT config has r = {rank}; a LoRA rank is at least 1")
    if not math.isfinite(alpha) or alpha == 0:
        raise UnsupportedAdapter(
            f"the PEFT config has lora_alpha = {alpha}, with which the adapter changes nothing"
        )
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def has_storage(tensor: torch.Tensor) -> bool:
    """False if a trainer has offloaded the tensor by freeing its storage; using it would crash."""
    return tensor.numel() == 0 or tensor.untyped_storage().nbytes() > 0


@dataclass(frozen=True)
class BaseWeight:
    """The frozen weight under one adapter on this rank.

    a, b: names of the adapter's lora_A and lora_B shards in `parameters()`.
    weight: the live shard [rows, cols]; it is read and never written. None if there is none that
        could be merged.
    first_row: the row of `weight` that row 0 of this rank's b adapts: 0 where b is sharded as the
        weight is, tensor-parallel rank * len(b) where the weight has all rows.
    magnitude: DoRA's learned norm of each row of `weight`, [rows]; None for LoRA.
    refused: why there is no weight; empty if there is one.
    """

    a: str
    b: str
    weight: torch.Tensor | None
    first_row: int = 0
    magnitude: torch.Tensor | None = None
    refused: str = ""


class Source(Protocol):
    """One trainer rank's side of a refit. Every method is called on every rank alike."""

    def parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """This rank's adapter parameters, in a fixed order, as live tensors (not copies).

        Their storage may move between calls; their number, names, shapes and dtypes may not.
        """

    def settle(self) -> None:
        """Finish whatever still writes the parameters, such as an overlapped parameter gather.

        Called on every rank before each publish. Work that is ordered on the stream that publish
        packs on needs no waiting.
        """

    def export(self) -> Iterable[tuple[str, torch.Tensor]]:
        """The trusted exporter: full PEFT-named factors from whatever the parameters hold now.

        Yields (`base_model.model.<module>.lora_A.weight`, [r, in]) and
        (`....lora_B.weight`, [out, r]). May be collective over the trainer's ranks and may yield
        views of live parameters or reused buffers; callers read each tensor before the next.
        """

    def config(self) -> dict[str, Any]:
        """The PEFT config of what is adapted: peft_type, r, lora_alpha, target_modules, ..."""

    def base_weights(self) -> Sequence[BaseWeight]:
        """The base weights under this rank's adapters, as live tensors, in a fixed order.

        Empty where the source does not know them: then merged mode is refused, and an engine's
        base cannot be compared with the trainer's.
        """

    def full_model(self) -> FullModel:
        """The whole model, for export. Raises UnsupportedAdapter where the source cannot export it."""

    def prove(self, export_map: ExportMap, rank: int) -> None:
        """Check that the trainer's own forward agrees with the exported factors.

        rank: this process's among `export_map.parameters`; a rank of the publisher's group.
        Tracing proves equality with the exporter; this proves that the exporter is right. Called
        once, with the parameters free to be overwritten: the caller restores them. Raises
        UnsupportedAdapter, naming the module, where they disagree.
        """
