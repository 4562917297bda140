"""trace_export: exporters that move are learned, others refused, and parameters come back."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from helpers import DictSource, Factors, Tensors, bits, factor, pair, run_ranks

from lora_refit.collectives import all_gather_bytes, world
from lora_refit.errors import (
    CoverageError,
    LayoutMismatch,
    NotMovement,
    RefitError,
    UnsupportedAdapter,
)
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


def assert_replays(export_map: ExportMap, source: DictSource) -> None:
    values = dict(enumerate(source.tensors.values()))
    exported = {name: tensor.detach().double().clone() for name, tensor in source.export()}
    assert [item.name for item in export_map.factors] == list(exported)
    for tensor_map in export_map.factors:
        assert torch.equal(gather(tensor_map, values), exported[tensor_map.name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_moving_exporter_is_learned(dtype: torch.dtype) -> None:
    source = DictSource(adapter(dtype), export)
    export_map = trace_export(source)
    assert_replays(export_map, source)
    assert [item.label for item in export_map.parameters] == [
        "trainer rank 0, proj.a",
        "trainer rank 0, proj.b",
    ]
    assert {item.dtype for item in export_map.parameters} == {str(dtype).removeprefix("torch.")}
    assert export_map.replicas == ()
    assert source.ranks_proved == [0]


def test_reused_buffers_and_live_aliases() -> None:
    buffer = torch.empty(4, 5)

    def reusing(x: Tensors) -> Factors:
        for index, weight in enumerate(x["b"].unbind()):
            yield factor(f"expert{index}", "A"), x["a"]
            yield factor(f"expert{index}", "B"), buffer[:, : weight.shape[1]].copy_(weight)

    tensors = {"a": torch.randn(2, 7), "b": torch.randn(3, 4, 2)}
    source = DictSource(tensors, reusing)
    export_map = trace_export(source)
    for tensor_map, (_, expected) in zip(export_map.factors, source.export(), strict=True):
        assert torch.equal(gather(tensor_map, dict(enumerate(tensors.values()))), expected.double())


def test_one_parameter_in_two_factors_is_stored_once() -> None:
    def shared(x: Tensors) -> Factors:
        yield from pair(x["proj.a"], x["proj.b"], "q")
        yield from pair(x["proj.a"].clone(), x["proj.b"].flip(0), "k")

    source = DictSource(adapter(), shared)
    assert_replays(trace_export(source), source)


def scaled(x: Tensors, scale: float) -> Factors:
    return pair(x["proj.a"], x["proj.b"] * scale)


def through(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Factors]:
    return lambda x: pair(x["proj.a"], function(x["proj.b"]))


def sorted_rows(x: torch.Tensor) -> torch.Tensor:
    return x[torch.argsort(x[:, 1], descending=True)]


COMPUTED = {
    "scaled": (through(lambda x: x * 0.5), "values are not tags"),
    "negated": (through(lambda x: -x), "values are not tags"),
    "neighbours averaged": (through(lambda x: (x + x.roll(1, 1)) / 2), "values are not tags"),
    "one added": (through(lambda x: x + 1), "tags name elements that do not exist"),
    "normalised": (through(lambda x: x / x.norm()), "values are not tags"),
    "int8 quantised": (through(lambda x: x.round()), "random values changed"),
    "fp8 and back": (through(lambda x: x.to(torch.float8_e4m3fn).to(x.dtype)), "random values"),
    "rectified": (through(lambda x: x.relu()), "random values changed"),
    "made positive": (through(lambda x: x.abs()), "random values changed"),
    "sorted by value": (through(sorted_rows), "random values changed"),
    "cast down": (through(lambda x: x.bfloat16()), "random values changed"),
    "padded": (through(lambda x: torch.cat([x, torch.zeros(1, R)])), "ones? into 0.0"),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_computing_exporters_are_refused(case: str) -> None:
    exporter, message = COMPUTED[case]
    with pytest.raises(NotMovement, match=message) as caught:
        trace_export(DictSource(adapter(), exporter))
    assert factor("proj", "B") in str(caught.value)


def test_doubled_values_that_look_like_other_tags_are_caught_by_ones() -> None:
    """Twice the tag of an element of tensor 1 is the tag of an element of tensor 3."""
    tensors = {name: torch.randn(8, 8) for name in ("a0", "b0", "a1", "b1")}
    tensors["a0"], tensors["b0"] = torch.randn(2, 8), torch.randn(3, 2)

    def doubling(x: Tensors) -> Factors:
        yield from pair(x["a0"], x["b0"] * 2, "zero")
        yield from pair(x["a1"], x["b1"], "one")

    with pytest.raises(NotMovement, match=r"zero.*turns parameters of one into 2.0"):
        trace_export(DictSource(tensors, doubling))


def test_averaged_replicas_that_look_like_a_third_are_caught_by_random_values() -> None:
    """The mean of the tags of tensors 0 and 2 is the tag of tensor 1, and ones stay ones."""
    tensors = {name: torch.randn(2, 2) for name in ("a0", "a1", "a2", "b")}

    def averaging(x: Tensors) -> Factors:
        return pair((x["a0"] + x["a2"]) / 2, x["b"])

    with pytest.raises(NotMovement, match="random values changed"):
        trace_export(DictSource(tensors, averaging))


class Passes:
    """An exporter that changes its mind at a given pass; three trace tags, then ones, random."""

    def __init__(self, at: int, change: Callable[[Tensors], Factors]) -> None:
        self.count = 0
        self._at, self._change = at, change

    def __call__(self, x: Tensors) -> Factors:
        self.count += 1
        return self._change(x) if self.count == self._at else export(x)


DIFFERENT: dict[str, Callable[[Tensors], Factors]] = {
    "transposed": lambda x: pair(x["proj.a"], x["proj.b"].t()),
    "renamed": lambda x: pair(x["proj.a"], x["proj.b"], "other"),
    "nothing": lambda x: iter(()),
    "only A": lambda x: list(export(x))[:1],
    "A twice": lambda x: [*export(x), *list(export(x))[:1]],
}


@pytest.mark.parametrize("at", [1, 2, 4, 5])
@pytest.mark.parametrize("case", DIFFERENT)
def test_an_exporter_that_differs_between_passes_is_refused(case: str, at: int) -> None:
    exporter = Passes(at, DIFFERENT[case])
    with pytest.raises((NotMovement, CoverageError), match="base_model.model"):
        trace_export(DictSource(adapter(), exporter))
    assert exporter.count >= at
    control = Passes(at, export)
    trace_export(DictSource(adapter(), control))
    assert control.count == 5


UNCOVERED: dict[str, tuple[Callable[[Tensors], Factors], str]] = {
    "yielded twice": (lambda x: [*export(x), *export(x)], "lora_A.weight: yielded twice"),
    "no lora_B": (
        lambda x: [(factor("q", "A"), x["proj.a"]), (factor("k", "A"), x["proj.b"])],
        "without its partner .*lora_B.weight",
    ),
    "rows left out": (lambda x: pair(x["proj.a"], x["proj.b"][1:]), "proj.b: 2 of its 6 elements"),
    "names without prefix": (
        lambda x: [(name.removeprefix("base_model.model."), t) for name, t in export(x)],
        "proj.lora_.*: not a PEFT factor name; expected base_model.model.<module>.lora_A.weight",
    ),
    "names with a suffix": (
        lambda x: [(name + ".default", tensor) for name, tensor in export(x)],
        "not a PEFT factor name",
    ),
    "embedding names": (
        lambda x: [(name.replace("lora_", "lora_embedding_"), t) for name, t in export(x)],
        "not a PEFT factor name",
    ),
}


@pytest.mark.parametrize("case", UNCOVERED)
def test_incomplete_exports_are_refused(case: str) -> None:
    exporter, message = UNCOVERED[case]
    with pytest.raises(CoverageError, match=message):
        trace_export(DictSource(adapter(), exporter))


def test_no_parameters_at_all() -> None:
    with pytest.raises(CoverageError, match="is LoRA attached"):
        trace_export(DictSource({}, lambda x: []))


def odd_values() -> Tensors:
    """NaN payloads, both zeros, subnormals and infinities, in several dtypes and layouts."""
    words = torch.tensor([0x7FC12345, -0x3EDCBB, -(2**31), 1, 0x7F800000, 0x007FFFFF]).int()
    halves = torch.tensor([0x7FC1, -0x3F, -(2**15), 1, 0x7F80, 0x007F]).short()
    return {
        "a": words.view(torch.float32).reshape(2, 3),
        "b": halves.view(torch.bfloat16).reshape(3, 2).t().clone().t(),
        "c": halves.view(torch.float16).reshape(2, 3),
        "d": torch.tensor(math.nan),
        "e": torch.nn.Parameter(words.view(torch.float32).clone().reshape(3, 2)),
    }


def export_odd(x: Tensors) -> Factors:
    yield from pair(x["a"], x["b"], "one")
    yield from pair(x["c"], x["e"], "two")
    yield from pair(x["d"].reshape(1, 1), x["d"].reshape(1, 1), "scalar")


class Unlucky(DictSource):
    """Raises `error` after `tensors_left` exported tensors, or in its own proof."""

    def __init__(self, tensors_left: int, error: BaseException) -> None:
        super().__init__(odd_values(), self._unlucky)
        self._left, self._error = tensors_left, error

    def _unlucky(self, x: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
        for item in export_odd(x):
            if self._left == 0:
                raise self._error
            self._left -= 1
            yield item

    def prove(self, export_map: object, rank: int) -> None:
        for tensor in self.tensors.values():
            tensor.fill_(3)
        raise self._error


@pytest.mark.parametrize(
    "error", [ValueError("disk"), UnsupportedAdapter("x"), KeyboardInterrupt()]
)
@pytest.mark.parametrize("tensors_left", [0, 4, 21, 26, 10_000])
def test_parameters_come_back_bit_for_bit_from_failures(
    tensors_left: int, error: BaseException
) -> None:
    source = Unlucky(tensors_left, error)
    before = {name: bits(tensor) for name, tensor in source.tensors.items()}
    with pytest.raises(type(error)):
        trace_export(source)
    assert {name: bits(tensor) for name, tensor in source.tensors.items()} == before


def test_parameters_come_back_bit_for_bit_from_success() -> None:
    source = DictSource(odd_values(), export_odd)
    before = {name: (bits(tensor), tensor.data_ptr()) for name, tensor in source.tensors.items()}
    trace_export(source)
    assert {n: (bits(t), t.data_ptr()) for n, t in source.tensors.items()} == before


def offload(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def test_an_offloaded_parameter_is_refused() -> None:
    tensors = adapter()
    offload(tensors["proj.b"])
    with pytest.raises(LayoutMismatch, match="^proj.b: has no storage"):
        trace_export(DictSource(tensors, export))


def test_a_parameter_that_cannot_be_restored_is_named() -> None:
    tensors = adapter()
    values = tensors["proj.a"].clone()

    def offloading(x: Tensors) -> Factors:
        yield from export(x)
        offload(x["proj.b"])

    with pytest.raises(RefitError, match="^proj.b: could not be restored") as caught:
        trace_export(DictSource(tensors, offloading))
    assert isinstance(caught.value.__context__, LayoutMismatch)
    assert torch.equal(tensors["proj.a"], values), "the others are restored all the same"


# ---- several ranks, on gloo


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
        lambda x: scaled(x, 0.5),
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
