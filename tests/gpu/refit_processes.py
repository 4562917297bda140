"""Trainer ranks and an engine worker as processes that refit over shared GPU memory.

Runs on a GPU (tests/device/check_refit.py) as on the stand-in driver (test_refit_processes.py).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from helpers import DictSource, Tensors, pair, run_ranks

from lora_refit import Publisher, Spec, Ticket
from lora_refit.arena_set import ArenaSet
from lora_refit.packed import packed_plan

DEVICE = torch.device("cuda", 0)
RANK = 16


@dataclass(frozen=True)
class Setting:
    """trainers: tensor-parallel trainer ranks; memory: as for Publisher; width: of the module.

    place: brings a CPU tensor to where the kernels run. used: GPU memory in use, in any unit.
    within: a context that each process runs in.
    """

    trainers: int
    memory: str
    refits: int
    width: int
    place: Callable[[torch.Tensor], torch.Tensor]
    used: Callable[[], int]
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Outcome:
    """launches: of the packs of each rank, and of the scatter; used: at several refits."""

    pack_launches: list[int]
    scatter_launches: int
    used: list[int]
    transport: str


def run(setting: Setting) -> Outcome:
    """Raises the error of the process that failed."""
    work = functools.partial(refit, setting=setting)
    results = run_ranks(setting.trainers + 1, work)
    print([repr(result.error) for result in results if result.error], file=sys.stderr)
    *ranks, worker = [result.value for result in results]
    return Outcome(ranks, worker["launches"], worker["used"], worker["transport"])


def refit(rank: int, setting: Setting) -> Any:
    group = dist.new_group(list(range(setting.trainers)))
    with setting.within():
        return train(rank, group, setting) if rank < setting.trainers else serve(setting)


def train(rank: int, group: Any, setting: Setting) -> int:
    part = setting.trainers
    tensors = {
        "A": setting.place(torch.zeros(RANK // part, setting.width)),
        "B": setting.place(torch.zeros(setting.width // part, RANK)),
    }
    source = DictSource(
        tensors,
        functools.partial(export_column_parallel, group=group),
        {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK},
    )
    with Publisher(source, torch.bfloat16, group=group, memory=setting.memory) as publisher:
        dist.broadcast_object_list([publisher.spec.to_bytes() if rank == 0 else None], src=0)
        for version in range(1, setting.refits + 1):
            for name, tensor in tensors.items():
                tensor.copy_(shard(name, rank, version, tensor.shape))
            ticket = publisher.publish(version)
            dist.broadcast_object_list([ticket.to_bytes() if rank == 0 else None], src=0)
            dist.barrier()  # as a driver waits for its refit: an arena holds two versions
        if rank == 0 and part == 1:
            check_packed_view(publisher, setting)
        dist.barrier()
    return publisher.launches


def check_packed_view(publisher: Publisher, setting: Setting) -> None:
    """The process that exports an arena reads it too: CUDA opens no handle there."""
    view = publisher.export_packed()
    for name, tensor in view.tensors().items():
        letter = name.split("lora_")[1][0]
        expected = shard(letter, 0, setting.refits, tuple(tensor.shape))
        assert torch.equal(tensor.cpu(), expected.to(torch.bfloat16))


def export_column_parallel(tensors: Tensors, group: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """lora_A is split along the rank, lora_B along its rows."""
    yield from pair(gather(tensors["A"], group), gather(tensors["B"], group))


def gather(local: torch.Tensor, group: Any) -> torch.Tensor:
    on_cpu = local.cpu()
    parts = [torch.empty_like(on_cpu) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, on_cpu, group=group)
    return torch.cat(parts)


def shard(letter: str, rank: int, version: int, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * version + 10 * rank + (letter == "B"))
    return torch.randn(shape, generator=generator)


def serve(setting: Setting) -> dict[str, Any]:
    spec = Spec.from_bytes(received())
    arenas = ArenaSet(spec, 60.0, DEVICE)
    plan = packed_plan(spec.layout)
    kernel = plan.kernel(DEVICE)
    slot = [
        setting.place(torch.zeros(item.numel, dtype=torch.bfloat16)) for item in plan.destinations
    ]
    addresses = np.asarray([tensor.data_ptr() for tensor in slot], np.uint64)
    used = []
    for version in range(1, setting.refits + 1):
        ticket = Ticket.from_bytes(received())
        arenas.pin_and_verify(ticket.sequence, ticket.version, 60.0)
        kernel.run(arenas.addresses(), addresses)
        arenas.release()
        dist.barrier()
        if version % 50 in (2, 3):
            require_version(slot, version, setting)
            used.append(setting.used())
    transport = arenas.transport
    dist.barrier()
    arenas.close()
    return {"launches": kernel.launches, "used": used, "transport": transport}


def require_version(slot: list[torch.Tensor], version: int, setting: Setting) -> None:
    ranks, width = range(setting.trainers), setting.width
    shapes = {"A": (RANK // setting.trainers, width), "B": (width // setting.trainers, RANK)}
    for tensor, (letter, shape) in zip(slot, shapes.items(), strict=True):
        parts = [shard(letter, rank, version, shape) for rank in ranks]
        assert torch.equal(tensor.cpu(), torch.cat(parts).flatten().to(torch.bfloat16))


def received() -> bytes:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0)
    assert isinstance(box[0], bytes)
    return box[0]
