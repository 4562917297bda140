"""The publisher: every publish packs what the parameters hold now, or fails and harms nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import DictSource, Factors, Tensors, factor, pair, run_ranks

from lora_refit import errors, publisher
from lora_refit.arena import ArenaReader
from lora_refit.publisher import Publisher
from lora_refit.spec import Spec

A, B = factor("proj", "A"), factor("proj", "B")
CONFIG = {"peft_type": "LORA", "r": 3, "lora_alpha": 7}


def adapter(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "proj.a": torch.nn.Parameter(torch.randn(3, 8, generator=generator).to(dtype)),
        "proj.b": torch.nn.Parameter(torch.randn(8, 3, generator=generator).to(dtype)),
        "square": torch.nn.Parameter(torch.randn(3, 3, generator=generator).to(dtype)),
    }


def export(x: Tensors) -> Factors:
    yield from pair(x["proj.a"], x["proj.b"], "proj")
    yield from pair(x["square"], x["square"], "square")


def adapter_source(**config: object) -> DictSource:
    return DictSource(adapter(), export, CONFIG | config)


@pytest.fixture
def source() -> DictSource:
    return adapter_source()


@pytest.fixture
def live(source: DictSource) -> Iterator[Publisher]:
    with Publisher(source, torch.bfloat16, timeout_s=0.05) as made:
        yield made


def published(made: Publisher) -> Tensors:
    return made.export_packed().tensors()


def assert_published(made: Publisher, source: DictSource) -> None:
    found = published(made)
    for name, tensor in source.export():
        assert torch.equal(found[name], tensor.detach().bfloat16())


def test_every_publish_is_one_launch_of_what_the_parameters_hold(
    live: Publisher, source: DictSource
) -> None:
    for count in range(1, 6):
        with torch.no_grad():
            source.tensors["proj.b"].mul_(count)
        ticket = live.publish(version=10 * count)
        assert (ticket.version, ticket.sequence, ticket.rank) == (10 * count, count, 0)
        assert ticket.layout_digest == live.spec.layout_digest
        assert live.launches == count
        assert live.export_packed().version == 10 * count
        assert_published(live, source)


def test_parameters_that_move_are_followed(live: Publisher, source: DictSource) -> None:
    live.publish(1)
    for number, name in enumerate(source.tensors):
        parameter = source.tensors[name]
        parameter.data = torch.full_like(parameter, 40.0 + number)
        live.publish(2 + number)
        assert_published(live, source)


def test_a_parameter_that_is_offloaded_and_reloaded(live: Publisher, source: DictSource) -> None:
    parameter = source.tensors["proj.b"]
    saved, size = parameter.detach().clone(), parameter.untyped_storage().nbytes()
    for version in (1, 2):
        parameter.untyped_storage().resize_(0)
        with pytest.raises(errors.LayoutMismatch, match="rank 0, proj.b: has no storage"):
            live.publish(version)
        parameter.untyped_storage().resize_(size)
        parameter.data.copy_(saved)
        assert live.publish(version).sequence == 2 * version
        assert_published(live, source)


CHANGES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "reshaped": ("proj.b", lambda x: x.view(3, 8), r"traced as \(8, 3\) float32, now \(3, 8\)"),
    "shortened": ("proj.b", lambda x: x[:7], r"now \(7, 3\)"),
    "transposed": ("square", lambda x: x.t(), "not contiguous"),
    "cast": ("proj.b", lambda x: x.half(), r"now \(8, 3\) float16"),
    "reinterpreted": ("square", lambda x: x.view(torch.int32), r"now \(3, 3\) int32"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_parameters_that_changed_are_named(case: str, live: Publisher, source: DictSource) -> None:
    name, change, message = CHANGES[case]
    live.publish(1)
    before = published(live)
    changed = torch.nn.Parameter(change(source.tensors[name].data), requires_grad=False)
    source.tensors[name] = changed
    for _ in range(2):
        with pytest.raises(errors.LayoutMismatch, match=f"trainer rank 0, {name}: .*{message}"):
            live.publish(2)
    after = published(live)
    assert all(torch.equal(before[key], after[key]) for key in before), "version 1 is intact"


def test_a_parameter_that_went_missing(live: Publisher, source: DictSource) -> None:
    del source.tensors["square"]
    with pytest.raises(errors.LayoutMismatch, match="2 adapter parameters, but 3 were traced"):
        live.publish(1)


def test_a_reader_that_keeps_its_version_times_the_publisher_out(
    live: Publisher, source: DictSource
) -> None:
    reader = ArenaReader(live.spec.arenas[0], live.spec.layout_digest)
    live.publish(1)
    pinned = reader.pin(1, version=1)
    live.publish(2)
    newest = published(live)
    with torch.no_grad():
        source.tensors["proj.a"].fill_(9)
    with pytest.raises(errors.ReaderTimeout, match="reader 0"):
        live.publish(3)
    assert all(torch.equal(newest[key], tensor) for key, tensor in published(live).items())
    assert live.export_packed().version == 2
    reader.release()
    assert np.array_equal(reader.pin(1, version=1).digests, pinned.digests), "1 is intact as well"
    reader.release()
    assert live.publish(3).sequence == 4, "the failed publish used its sequence up"
    assert_published(live, source)
    reader.close()


def test_a_failed_pack_leaves_the_newest_version(live: Publisher, source: DictSource) -> None:
    live.publish(1)
    with pytest.raises(errors.LayoutMismatch, match="does not fit in 64 bits"):
        live.publish(2**63)
    assert live.export_packed().version == 1
    assert live.publish(2).sequence == 3
    assert_published(live, source)


def test_versions_are_integers(live: Publisher) -> None:
    ticket = live.publish(np.int64(-5))
    assert type(ticket.version) is int
    assert live.export_packed().version == ticket.version == -5
    assert type(live.publish(True).version) is int
    with pytest.raises(TypeError):
        live.publish(1.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"r": None}, "lacks a number r or lora_alpha"),
        ({"lora_alpha": "large"}, "lacks a number r or lora_alpha"),
        ({"r": 0}, "a LoRA rank is at least 1"),
        ({"dtype": torch.bfloat16}, "cannot be sent to an engine: .*torch.dtype"),
    ],
)
def test_unusable_configs_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(errors.UnsupportedAdapter, match=message):
        Publisher(adapter_source(**config))


def test_closing_twice_and_publishing_afterwards(source: DictSource) -> None:
    made = Publisher(source)
    made.close()
    made.close()
    with pytest.raises(errors.TransportUnavailable, match="rank 0 is closed"):
        made.publish(1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dtype": torch.float8_e4m3fn}, errors.UnsupportedAdapter, "dtype torch.float8_e4m3fn"),
        ({"dtype": torch.float64}, errors.UnsupportedAdapter, "dtype torch.float64"),
        ({"exchange": "bytes"}, errors.TransportUnavailable, "exchange='bytes'"),
        ({"scale_rounding": "twice"}, errors.UnsupportedAdapter, "scale_rounding='twice'"),
    ],
)
def test_bad_arguments(
    source: DictSource, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Publisher(source, **arguments)  # type: ignore[arg-type]
    assert source.ranks_proved == [], "refused before tracing"


def test_parameters_of_other_dtypes_are_refused() -> None:
    source = DictSource(adapter(dtype=torch.float64), export, CONFIG)
    with pytest.raises(errors.UnsupportedAdapter, match="float64"):
        Publisher(source)


def test_configs_as_peft_keeps_them_survive_the_spec() -> None:
    """LoraConfig.to_dict() holds a set of modules, whose order differs between processes."""
    modules = {f"module{index}" for index in range(50)}
    with Publisher(adapter_source(target_modules=modules)) as made:
        spec = Spec.from_bytes(made.spec.to_bytes())
    assert spec.layout.peft_config["target_modules"] == sorted(modules)
    assert spec.layout_digest == made.spec.layout_digest


# ---- who applies alpha / r


def ulps(x: torch.Tensor) -> torch.Tensor:
    """bf16 values as integers that grow by one from each value to the next."""
    words = x.view(torch.int16).int()
    return torch.where(words < 0, -(words & 0x7FFF), words)


@pytest.mark.parametrize("config", [{}, {"use_rslora": True}, {"lora_alpha": 6}])
def test_scaling_once_rounds_once(config: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(3)
    tensors = {
        "a": torch.randn(3, 50, generator=generator),
        "b": torch.randn(3000, 3, generator=generator),
    }
    source = DictSource(tensors, lambda x: pair(x["a"], x["b"]), CONFIG | config)
    merged = CONFIG | config
    scale = merged["lora_alpha"] / (math.sqrt(3) if "use_rslora" in config else 3)
    with Publisher(source, scale_rounding="once") as once, Publisher(source) as engine:
        assert once.spec.layout.scale_folded
        assert not engine.spec.layout.scale_folded
        assert once.spec.layout_digest != engine.spec.layout_digest
        once.publish(1)
        engine.publish(1)
        scaled, plain = published(once), published(engine)
    assert torch.equal(scaled[A], plain[A])
    assert torch.equal(plain[B], tensors["b"].bfloat16())
    single = torch.tensor(scale, dtype=torch.float32)
    assert torch.equal(scaled[B], (tensors["b"] * single).bfloat16())

    twice = plain[B] * scale
    assert (ulps(scaled[B]) - ulps(twice)).abs().max() <= 1
    exact = tensors["b"].double() * scale
    assert bool(((scaled[B] - exact).abs() <= (twice - exact).abs() * (1 + 1e-6)).all())
    assert torch.equal(scaled[B], twice) == (scale == 2), "powers of two round alike"


def test_scaling_once_needs_one_scale() -> None:
    for pattern in ("rank_pattern", "alpha_pattern"):
        source = adapter_source(**{pattern: {"proj": 5}})
        with pytest.raises(errors.UnsupportedAdapter, match="needs one rank and alpha"):
            Publisher(source, scale_rounding="once")
        Publisher(source).close()


# ---- several ranks, on gloo


def test_replicas_publish_equal_bytes_also_when_scaled() -> None:
    def work(rank: int) -> np.ndarray:
        tensors = {name: tensor for name, tensor in adapter().items() if name != "square"}
        source = DictSource(tensors, lambda x: pair(x["proj.a"], x["proj.b"]), CONFIG)
        with Publisher(source, scale_rounding="once") as made:
            made.publish(1)
            assert made.spec.layout.export_map.replicas == ((0, 2), (1, 3))
            reader = ArenaReader(made.spec.arenas[rank], made.spec.layout_digest)
            return reader.pin(1, version=1).digests

    first, second = run_ranks(2, work)
    assert np.array_equal(first.value, second.value)


def test_ranks_stay_in_step_after_one_failed() -> None:
    def work(rank: int) -> tuple[list[int], str]:
        source = adapter_source()
        made = Publisher(source)
        sequences = [made.publish(1).sequence]
        torch.distributed.barrier()
        whole = source.tensors["square"]
        if rank == 1:
            source.tensors["square"] = torch.nn.Parameter(whole[:2])
            with pytest.raises(errors.LayoutMismatch, match="trainer rank 1, square"):
                made.publish(2)
            source.tensors["square"] = whole
        else:
            sequences.append(made.publish(2).sequence)
        torch.distributed.barrier()
        with pytest.raises(errors.StaleArena, match="different versions") as stale:
            made.export_packed()
        torch.distributed.barrier()
        sequences.append(made.publish(3).sequence)
        torch.distributed.barrier()
        assert made.export_packed().version == 3
        torch.distributed.barrier()
        return sequences, str(stale.value)

    first, second = run_ranks(2, work)
    assert (first.value[0], second.value[0]) == ([1, 2, 3], [1, 3])
    assert "[(2, 2), (1, 1)]" in first.value[1]


def test_ranks_must_be_configured_alike() -> None:
    results = run_ranks(2, lambda rank: Publisher(adapter_source(lora_alpha=8 + rank)))
    for result in results:
        assert type(result.error) is errors.LayoutMismatch
        assert "trainer rank 1" in str(result.error)


def test_a_rank_without_memory_stops_all() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            error = errors.TransportUnavailable("no memory left")
            mock.patch.object(publisher, "ArenaWriter", side_effect=error).start()
        Publisher(adapter_source())

    for result in run_ranks(2, work):
        assert type(result.error) is errors.TransportUnavailable
        assert "no memory left" in str(result.error)
