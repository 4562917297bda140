"""The Megatron source on stand-in modules: what it follows, and what it refuses to follow."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from helpers import factor, pair

from lora_refit import Publisher
from lora_refit.errors import LayoutMismatch
from lora_refit.sources import megatron
from lora_refit.sources.base import BaseWeight
from lora_refit.sources.megatron import MegatronSource


class Adapter(torch.nn.Module):
    """What is used of Megatron-Bridge's ParallelLinearAdapter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_in = torch.nn.Linear(8, 2, bias=False)
        self.linear_out = torch.nn.Linear(2, 8, bias=False)
        self.dim, self.alpha, self.input_is_parallel = 2, 6, False


@pytest.fixture
def chunk() -> torch.nn.Module:
    layer = torch.nn.Module()
    layer.adapter = Adapter()
    chunk = torch.nn.Module()
    chunk.proj = layer
    return chunk


@pytest.fixture
def source(chunk: torch.nn.Module) -> MegatronSource:
    return MegatronSource(chunk, export=lambda: [], config={"r": 2, "lora_alpha": 6})


def test_replaced_and_frozen_parameters_are_followed(
    chunk: torch.nn.Module, source: MegatronSource
) -> None:
    replaced = torch.nn.Parameter(torch.ones(2, 8), requires_grad=False)
    chunk.proj.adapter.linear_in.weight = replaced
    names = [name for name, _ in source.parameters()]
    assert names == [f"0.proj.adapter.linear_{end}.weight" for end in ("in", "out")]
    assert source.parameters()[0][1] is replaced


@pytest.mark.parametrize(("attribute", "value"), [("alpha", 3), ("dim", 4)])
def test_a_scale_that_changes_after_construction_is_named(
    chunk: torch.nn.Module, source: MegatronSource, attribute: str, value: int
) -> None:
    """Engines fold alpha / r as it was at attach; a schedule would go past them unseen."""
    before = getattr(chunk.proj.adapter, attribute)
    setattr(chunk.proj.adapter, attribute, value)
    with pytest.raises(LayoutMismatch, match=r"0\.proj\.adapter: its \(r, alpha\) was \(2, 6\)"):
        source.parameters()
    setattr(chunk.proj.adapter, attribute, before)
    assert len(source.parameters()) == 2


class OverlappedChunk(torch.nn.Module):
    """Megatron's DistributedDataParallel after an optimizer's step, as far as settle() uses it: the
    other ranks' shards are old until the parameter gather is forced."""

    def __init__(self, chunk: torch.nn.Module, overlap: bool) -> None:
        super().__init__()
        self.module = chunk
        self.ddp_config = SimpleNamespace(overlap_param_gather=overlap)
        self.gathers = 0

    def start_param_sync(self, *, force_sync: bool) -> None:
        assert force_sync, "an overlapped gather ends during the next forward"
        self.gathers += 1
        self.module.proj.adapter.linear_in.weight.fill_(self.gathers)


@pytest.mark.parametrize("overlap", [True, False])
def test_publish_forces_the_overlapped_parameter_gather(
    chunk: torch.nn.Module, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And waits for it: the pack may run on another stream than the gather."""
    ddp = OverlappedChunk(chunk, overlap)
    adapter = chunk.proj.adapter

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield from pair(adapter.linear_in.weight.detach(), adapter.linear_out.weight.detach())

    with torch.no_grad():
        adapter.linear_in.weight.fill_(0)
    waited_after: list[int] = []
    monkeypatch.setattr(megatron, "finish_current_work", lambda _: waited_after.append(ddp.gathers))
    source = MegatronSource(ddp, export=export, config={"r": 2, "lora_alpha": 6})
    source.prove = lambda export_map, rank: None  # these modules have no forward
    with Publisher(source, torch.float32) as publisher:
        for version in (1, 2):
            publisher.publish(version)
            factors = publisher.export_packed().tensors()
            assert torch.all(factors[factor("proj", "A")] == (version if overlap else 0))
    assert waited_after == ([1, 2] if overlap else [])


def wrapped(to_wrap: object, adapter: torch.nn.Module, name: str = "proj") -> torch.nn.Module:
    """A chunk with one module as Bridge's AdapterWrapper holds it."""
    wrapper = torch.nn.Module()
    wrapper.to_wrap, wrapper.adapter = to_wrap, adapter
    adapter.tp_group = None
    chunk = torch.nn.Module()
    chunk.add_module(name, wrapper)
    return chunk


def bases_of(chunk: torch.nn.Module) -> list[BaseWeight]:
    return MegatronSource(chunk, export=lambda: [], config={}).base_weights()


def test_base_weights_are_the_live_ones() -> None:
    linear = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    chunk = wrapped(linear, Adapter())
    (base,) = bases_of(chunk)
    assert base.weight is linear.weight
    assert (base.a, base.b) == tuple(f"0.proj.adapter.linear_{end}.weight" for end in ("in", "out"))
    source = MegatronSource(chunk, export=lambda: [], config={})
    linear.weight = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)
    assert source.base_weights()[0].weight is linear.weight


def test_what_has_no_base_weight_of_its_own_says_why() -> None:
    frozen = torch.nn.Linear(8, 8, bias=False).requires_grad_(False)
    tied = wrapped(frozen, Adapter(), "output_layer")
    tied.share_embeddings_and_output_weights = True
    data_parallel = torch.nn.Module()
    data_parallel.module = tied
    parts = torch.nn.Module()
    parts.adapter_q, parts.adapter_k = Adapter(), Adapter()
    for chunk, count, reason in (
        (tied, 1, "tied to the embedding"),
        (data_parallel, 1, "tied to the embedding"),
        (wrapped(torch.nn.Module(), Adapter()), 1, "holds no single weight"),
        (wrapped(frozen, parts), 2, "adapts a part of a fused weight"),
    ):
        bases = bases_of(chunk)
        assert len(bases) == count
        assert all(base.weight is None and reason in base.refused for base in bases)
