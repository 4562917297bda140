"""trace_export: exporters that move are learned, others refused, and parameters come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import DictSource, Factors, Tensors, bits, factor, pair

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


GARBAGE: dict[str, Callable[[Tensors], object]] = {
    "names only": lambda x: list(dict(export(x))),
    "a number for a name": lambda x: enumerate(x.values()),
    "no tensor": lambda x: [(name, None) for name, _ in export(x)],
    "arrays": lambda x: [(name, tensor.numpy()) for name, tensor in export(x)],
    "three things": lambda x: [(name, tensor, 1) for name, tensor in export(x)],
}


@pytest.mark.parametrize("case", GARBAGE)
def test_what_is_no_pair_of_name_and_tensor_is_refused(case: str) -> None:
    source = DictSource(adapter(), GARBAGE[case])  # type: ignore[arg-type]
    with pytest.raises(NotMovement, match="must yield pairs of a PEFT name and a torch.Tensor"):
        trace_export(source)


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

    def settle(self) -> None:
        """Nothing else writes the parameters."""

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
