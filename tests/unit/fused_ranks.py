"""FusedTrainer as a source on real processes: each rank holds its shards and exports by gathering."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fused_trainer import MODULES, FusedTrainer
from helpers import factor

from lora_refit import Publisher, Spec, Ticket
from lora_refit.collectives import all_gather_bytes
from lora_refit.devices import CPU
from lora_refit.errors import UnsupportedAdapter
from lora_refit.merged.collector import BucketCollector
from lora_refit.sources.base import BaseWeight


class FusedRank:
    """One rank of a FusedTrainer. dora: with magnitudes, the same for every split of the ranks.
    group: of the trainer's ranks."""

    def __init__(
        self, trainer: FusedTrainer, rank: int, dora: bool = False, group: Any = None
    ) -> None:
        self.trainer = trainer
        self._rank = rank
        self._dora = dora
        self._group = group

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        a, b = self.trainer.a[self._rank], self.trainer.b[self._rank]
        return [
            (f"{module.name}.{part}", tensor)
            for module, pair in zip(MODULES, zip(a, b, strict=True), strict=True)
            for part, tensor in zip(("in", "out"), pair, strict=True)
        ]

    def settle(self) -> None:
        """Nothing else writes the parameters."""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        own = [tensor for _, tensor in self.parameters()]
        size = self.trainer.tensor_parallel
        gathered = [[torch.empty_like(tensor) for _ in range(size)] for tensor in own]
        for parts, tensor in zip(gathered, own, strict=True):
            dist.all_gather(parts, tensor.contiguous(), group=self._group)
        every = [parts[rank] for rank in range(size) for parts in gathered]
        yield from self.trainer.export(every).items()

    def config(self) -> dict[str, Any]:
        rank = self.trainer.rank
        return {"peft_type": "LORA", "r": rank, "lora_alpha": 1.5 * rank, "use_dora": self._dora}

    def base_weights(self) -> list[BaseWeight]:
        return self.trainer.held(self._rank, dora=self._dora)

    def full_model(self) -> Any:
        raise UnsupportedAdapter("four weights are no model")

    def prove(self, export_map: object, rank: int) -> None:
        """There is no forward."""


SCALE = 1.5
"""alpha / r in `config`."""
VERSIONS = (1, 2, 3)


def exact(trainer: FusedTrainer, dora: bool) -> dict[str, torch.Tensor]:
    """fp64, by checkpoint name."""
    factors = {name: t.double() for name, t in trainer.export(trainer.parameters()).items()}
    found = {}
    for name, weight in trainer.base().items():
        module = name.removesuffix(".weight")
        merged = (
            weight.double() + SCALE * factors[factor(module, "B")] @ factors[factor(module, "A")]
        )
        if dora:
            merged *= (trainer.magnitude(module) / merged.norm(dim=1))[:, None]
        found[name] = merged
    return found


def trained(trainer: FusedTrainer, version: int) -> None:
    """What training does to the adapter, the same on all ranks of all processes."""
    for tensor in trainer.parameters():
        tensor.mul_(1 + version / 8)


@dataclass(frozen=True)
class Case:
    """A trainer of `size` ranks. device: where everything lies; within: what each process runs in."""

    size: int
    dora: bool
    bucket_bytes: int
    memory: str = "auto"
    device: torch.device = CPU
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


def refit(rank: int, case: Case) -> float:
    """Ranks below case.size train and publish, the last process is the engine's worker.

    The worker returns the largest error of any weight in any version, relative to its largest
    element; 0 comes from the others.
    """
    with case.within():
        return _refit(rank, case)


def _refit(rank: int, case: Case) -> float:
    size, dora = case.size, case.dora
    trainer = FusedTrainer(size, 6, torch.float32, torch.float32, seed=3)
    group = dist.new_group(list(range(size)))
    if rank < size:
        source = FusedRank(trainer, rank, dora, group)
        publisher = Publisher(
            source,
            torch.float32,
            group=group,
            mode="merged",
            memory=case.memory,
            bucket_bytes=case.bucket_bytes,
            timeout_s=20,
        )
        before = [base.weight.clone() for base in source.base_weights() if base.weight is not None]
        all_gather_bytes(publisher.spec.to_bytes(), None)
        for version in VERSIONS:
            trained(trainer, version)
            all_gather_bytes(publisher.publish(version).to_bytes(), None)
            all_gather_bytes(b"", None)  # the worker has it
        after = [base.weight for base in source.base_weights() if base.weight is not None]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        publisher.close()
        return 0.0
    collector = BucketCollector(
        Spec.from_bytes(all_gather_bytes(b"", None)[0]), timeout_s=20, device=case.device
    )
    worst = 0.0
    for version in VERSIONS:
        trained(trainer, version)
        ticket = Ticket.from_bytes(all_gather_bytes(b"", None)[0])
        collector.begin(ticket.sequence, ticket.version, 20)
        while collector.verify(slice_s=0.0) is None:
            """A bucket at a time."""
        found: dict[str, torch.Tensor] = {}
        for bucket in range(collector.buckets):
            found.update(collector.take(bucket))
        collector.end()
        all_gather_bytes(b"", None)
        expected = exact(trainer, dora)
        assert found.keys() == expected.keys()
        worst = max(
            worst,
            *(
                float((found[n].double() - e).abs().max() / e.abs().max())
                for n, e in expected.items()
            ),
        )
    collector.close()
    return worst
