"""The few collectives that construction needs; a refit itself uses none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from lora_refit import errors

T = TypeVar("T")

ProcessGroup = Any
"""torch.distributed.ProcessGroup, or None for the default group."""


def world(group: ProcessGroup | None) -> tuple[int, int]:
    """(rank, size) in the group; (0, 1) when torch.distributed is not initialised."""
    if not dist.is_available() or not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gather_bytes(data: bytes, group: ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, in rank order. Collective over the group."""
    _, size = world(group)
    if size == 1:
        return [data]
    device = _collective_device(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.zeros_like(length) for _ in range(size)]
    dist.all_gather(lengths, length, group=group)
    sizes = [int(item) for item in lengths]
    padded = torch.zeros(max(max(sizes), 1), dtype=torch.uint8, device=device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    gathered = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(gathered, padded, group=group)
    return [
        item[:count].cpu().numpy().tobytes() for item, count in zip(gathered, sizes, strict=True)
    ]


class _Outcome(msgspec.Struct, array_like=True):
    """How a step went on one rank; `error` is empty when it went well."""

    error: str = ""
    message: str = ""


def same_outcome(work: Callable[[], T], group: ProcessGroup | None) -> T:
    """Run a step and fail on every rank if it failed on one, so that no rank waits for another.

    A RefitError of another rank is raised with its own type, anything else as RefitError; both
    name the rank. Collective over the group.
    """
    failure: Exception | None = None
    outcome = _Outcome()
    try:
        result = work()
    except Exception as error:
        failure = error
        outcome = _Outcome(type(error).__name__, str(error))
    gathered = all_gather_bytes(msgspec.msgpack.encode(outcome), group)
    if failure is not None:
        raise failure
    for rank, data in enumerate(gathered):
        other = msgspec.msgpack.decode(data, type=_Outcome)
        if other.error in errors.__all__:
            raise getattr(errors, other.error)(f"trainer rank {rank}: {other.message}")
        if other.error:
            raise errors.RefitError(f"trainer rank {rank}: {other.error}: {other.message}")
    return result


def _collective_device(group: ProcessGroup | None) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
