"""trace_export on several gloo ranks: one map for all, replicas found, errors raised everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from helpers import DictSource, Factors, Tensors, factor, pair, run_ranks

from lora_refit.collectives import all_gather_bytes, world
from lora_refit.errors import CoverageError, NotMovement, RefitError
from lora_refit.trace.export import ExportMap, trace_export
from lora_refit.trace.movement import gather

R, IN, OUT = 2, 5, 3


def adapter(dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "proj.a": torch.randn(R, IN, generator=generator).to(dtype),
        "proj.b": torch.randn(OUT, R, generator=generator).to(dtype),
    }


def export(x: Tensors) -> Factors:
    return pair(x["proj.a"], x["proj.b"])


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts)


def export_tensor_parallel(x: Tensors) -> Factors:
    """lora_A sharded by columns, lora_B by rows; then a module whose lora_A is replicated."""
    a = gathered(x["row.a"].t()).t()
    yield from pair(a, x["row.b"], "row")
    yield from pair(x["column.a"], gathered(x["column.b"]), "column")


def tensor_parallel_adapter() -> Tensors:
    return {
        "row.a": torch.zeros(2, 3),
        "row.b": torch.zeros(5, 2),
        "column.a": torch.zeros(2, 4),
        "column.b": torch.zeros(300, 2),
    }


def test_tensor_parallel_ranks_agree_on_one_map() -> None:
    results = run_ranks(
        3, lambda rank: trace_export(DictSource(tensor_parallel_adapter(), export_tensor_parallel))
    )
    export_map = results[0].value
    assert isinstance(export_map, ExportMap)
    assert [result.value for result in results] == [export_map] * 3
    assert [(item.rank, item.name) for item in export_map.parameters] == [
        (rank, name) for rank in range(3) for name in tensor_parallel_adapter()
    ]
    by_name = {item.name: item for item in export_map.factors}
    values = {i: torch.randn(item.shape) for i, item in enumerate(export_map.parameters)}
    for name, expected in {
        factor("row", "A"): torch.cat([values[0], values[4], values[8]], 1),
        factor("row", "B"): values[1],
        factor("column", "A"): values[2],
        factor("column", "B"): torch.cat([values[3], values[7], values[11]]),
    }.items():
        assert torch.equal(gather(by_name[name], values), expected.double())
    assert export_map.replicas == ((1, 5), (2, 6), (1, 9), (2, 10))


def test_data_parallel_ranks_are_replicas() -> None:
    results = run_ranks(2, lambda rank: trace_export(DictSource(adapter(), export)))
    assert results[1].value.replicas == ((0, 2), (1, 3))
    assert {cell.tensor for item in results[1].value.factors for cell in item.cells} == {0, 1}


def test_pipeline_ranks_without_parameters_take_part() -> None:
    def work(rank: int) -> ExportMap:
        if rank == 0:
            return trace_export(DictSource({}, lambda x: []))
        return trace_export(DictSource(adapter(), export))

    first, second = run_ranks(2, work)
    assert first.value == second.value
    assert [item.rank for item in second.value.parameters] == [1, 1]


FAILING: dict[str, tuple[Callable[[Tensors], Factors], type[Exception], type[Exception], str]] = {
    "computes": (
        lambda x: pair(x["proj.a"], x["proj.b"] * 0.5),
        NotMovement,
        NotMovement,
        r"trainer rank 1: .*lora_B.weight: .* not tags",
    ),
    "yields a scalar": (
        lambda x: [*export(x), (factor("s", "A"), torch.tensor(1.0))],
        NotMovement,
        NotMovement,
        "trainer rank 1: .*shape",
    ),
    "breaks": (lambda x: [x["typo"]], KeyError, RefitError, "trainer rank 1: KeyError: 'typo'"),
}


@pytest.mark.parametrize("case", FAILING)
def test_an_error_on_one_rank_is_raised_on_all(case: str) -> None:
    exporter, own, others, message = FAILING[case]

    def between_collectives(x: Tensors) -> Factors:
        """Both ranks must take part to the end, also when one refuses what it is given."""
        rank, _ = world(None)
        factors = list(exporter(x) if rank == 1 else export(x))
        yield factors[0]
        dist.barrier()
        yield from factors[1:]
        dist.barrier()

    chosen = [export, exporter] if case == "breaks" else [between_collectives] * 2
    first, second = run_ranks(2, lambda rank: trace_export(DictSource(adapter(), chosen[rank])))
    assert type(second.error) is own
    assert type(first.error) is others
    assert re.search(message, str(first.error))


def test_ranks_that_export_the_same_factor_differently_are_refused() -> None:
    def flipped(x: Tensors) -> Factors:
        return pair(x["proj.a"].flip(0), x["proj.b"])

    def joined(x: Tensors) -> Factors:
        return pair(torch.cat([x["proj.a"][:1], x["proj.a"][:1]]), x["proj.b"])

    def of_two(x: Tensors) -> Factors:
        rows = torch.cat([x["proj.a"][:, :3], x["proj.b"][:2, :2]], 1)
        return pair(rows, x["proj.b"])

    for other, message in [
        (flipped, "rank 1 builds it from other elements of trainer rank 1, proj.a"),
        (joined, "rank 1 builds it from other elements"),
        (of_two, "rank 1 exports it from other pieces"),
    ]:
        results = run_ranks(
            2,
            lambda rank: trace_export(DictSource(adapter(), other if rank else export)),  # noqa: B023
        )
        for result in results:
            assert type(result.error) is CoverageError
            assert message in str(result.error)


def test_a_group_of_some_ranks_counts_its_own() -> None:
    def work(rank: int) -> tuple[ExportMap, list[int], list[bytes]] | None:
        group = dist.new_group([1, 2])
        if rank == 0:
            return None
        source = DictSource(adapter(), export)
        export_map = trace_export(source, group)
        return export_map, source.ranks_proved, all_gather_bytes(b"x" * rank, group)

    _, first, second = run_ranks(3, work)
    assert [item.rank for item in first.value[0].parameters] == [0, 0, 1, 1]
    assert (first.value[1], second.value[1]) == ([0], [1])
    assert first.value[2] == second.value[2] == [b"x", b"xx"]


def test_bytes_of_any_length_are_gathered() -> None:
    data = [b"", b"\0" * 5, bytes(range(256)) * 40]
    results = run_ranks(3, lambda rank: all_gather_bytes(data[rank], None))
    assert [result.value for result in results] == [data] * 3
    assert all_gather_bytes(b"alone", None) == [b"alone"]
