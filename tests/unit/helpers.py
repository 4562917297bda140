"""Small stand-ins for unit tests: a trainer that is a dictionary, and forked gloo ranks."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from lora_refit.errors import UnsupportedAdapter
from lora_refit.plan import Plan
from lora_refit.trace import tags
from lora_refit.trace.movement import TagReader, TensorMap

Tensors = dict[str, torch.Tensor]
Factors = Iterable[tuple[str, torch.Tensor]]
Move = Callable[[list[torch.Tensor]], list[torch.Tensor]]


def factor(module: str, letter: str) -> str:
    return f"base_model.model.{module}.lora_{letter}.weight"


def pair(a: torch.Tensor, b: torch.Tensor, module: str = "proj") -> Iterator[Any]:
    """What an exporter yields for one module."""
    yield factor(module, "A"), a
    yield factor(module, "B"), b


class DictSource:
    """A trainer rank whose adapter is a dictionary of tensors, with any exporter."""

    def __init__(
        self,
        tensors: Tensors,
        export: Callable[[Tensors], Factors],
        config: dict[str, Any] | None = None,
    ) -> None:
        self.tensors = tensors
        self.ranks_proved: list[int] = []
        self._export = export
        self._config = config or {"peft_type": "LORA", "r": 2, "lora_alpha": 6}

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.tensors.items())

    def export(self) -> Factors:
        return self._export(self.tensors)

    def config(self) -> dict[str, Any]:
        return self._config

    def settle(self) -> None:
        """Nothing else writes the parameters."""

    def base_weights(self) -> list[Any]:
        return []

    def full_model(self) -> Any:
        raise UnsupportedAdapter("a dictionary has no whole model")

    def prove(self, export_map: object, rank: int) -> None:
        self.ranks_proved.append(rank)


def learn(move: Move, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> list[TensorMap]:
    """The traced maps of what `move` makes of tensors of these shapes."""
    reader = TagReader(shapes)
    for plane in reader.planes:
        sources = [torch.empty(shape, dtype=dtype) for shape in shapes]
        for index, source in enumerate(sources):
            tags.fill(source, index, plane)
        for index, tensor in enumerate(move(sources)):
            reader.read(f"out{index}", tensor, plane)
    return [reader.tensor_map(name) for name in reader.names]


def run_plan(plan: Plan, sources: list[torch.Tensor], poison: float = 0.0) -> list[torch.Tensor]:
    """Execute a plan into new flat destination buffers, filled with `poison` before."""
    outputs = [
        torch.full((item.numel,), poison, dtype=item.type.dtype) for item in plan.destinations
    ]
    plan.kernel().run(addresses(sources), addresses(outputs))
    return outputs


def addresses(tensors: list[torch.Tensor]) -> np.ndarray:
    return np.asarray([tensor.data_ptr() for tensor in tensors], np.uint64)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass(frozen=True)
class RankResult:
    """What a rank returned, or the error that it raised."""

    returned: Any = None
    error: Exception | None = None

    @property
    def value(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.returned


def run_ranks(world_size: int, function: Callable[[int], Any]) -> list[RankResult]:
    """Run `function(rank)` in forked processes that share a gloo group; results in rank order."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(theirs, rank, world_size, Path(folder), function)
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return [_result(connection) for _, connection in ranks]
        finally:
            for process, connection in ranks:
                connection.close()
                process.join(5)
                process.kill()


def _result(connection: Connection) -> RankResult:
    assert connection.poll(60), "a rank did not answer: it waits for a collective of another"
    result = connection.recv()
    assert isinstance(result, RankResult)
    return result


def _rank_main(
    connection: Connection, rank: int, world_size: int, folder: Path, function: Callable[[int], Any]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=30),
    )
    try:
        result = RankResult(returned=function(rank))
    except Exception as error:
        result = RankResult(error=error)
    connection.send(result)
    dist.destroy_process_group()
