"""The packed view: equal to the exporter's factors, and a PEFT directory that PEFT itself loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import DictSource, Factors, Tensors, pair, run_ranks
from safetensors.torch import load_file

from lora_refit import errors
from lora_refit.packed import ALIGNMENT, gather_packed, packed_plan
from lora_refit.publisher import Publisher
from lora_refit.spec import Spec

R, IN, OUT = 4, 6, 10
CONFIG = {
    "peft_type": "LORA",
    "r": R,
    "lora_alpha": 10,
    "target_modules": ["proj"],
    "lora_dropout": 0.0,
    "bias": "none",
}


def adapter(dtype: torch.dtype, seed: int = 0) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (R, IN), "b": (OUT, R), "experts.b": (3, R, 5)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def export(x: Tensors) -> Factors:
    yield from pair(x["a"], x["b"], "proj")
    for index, weight in enumerate(x["experts.b"].unbind()):
        yield from pair(x["a"].flip(0), weight.t(), f"experts.{index}")


@pytest.mark.parametrize("engine_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_view_holds_the_exported_factors_in_the_engine_dtype(
    dtype: torch.dtype, engine_dtype: torch.dtype
) -> None:
    source = DictSource(adapter(dtype), export, CONFIG)
    with Publisher(source, engine_dtype) as publisher:
        publisher.publish(7)
        view = publisher.export_packed()
    assert (view.version, view.dtype) == (7, engine_dtype)
    assert all(entry.offset % ALIGNMENT == 0 for entry in view.entries)
    found = view.tensors()
    assert list(found) == [name for name, _ in source.export()]
    for name, tensor in source.export():
        assert found[name].data_ptr() - view.buffer.data_ptr() < view.buffer.numel()
        assert torch.equal(found[name], tensor.to(engine_dtype))


def test_equal_versions_have_equal_buffers_gaps_included() -> None:
    with Publisher(DictSource(adapter(torch.float32), export, CONFIG)) as publisher:
        publisher.publish(1)
        first = publisher.export_packed()
        publisher.publish(2)
        assert torch.equal(publisher.export_packed().buffer, first.buffer)


def test_nothing_published_yet() -> None:
    with (
        Publisher(DictSource(adapter(torch.float32), export, CONFIG)) as publisher,
        pytest.raises(errors.StaleArena),
    ):
        publisher.export_packed()


def test_the_spec_alone_is_enough_to_gather() -> None:
    with Publisher(DictSource(adapter(torch.float32), export, CONFIG)) as publisher:
        publisher.publish(3)
        spec = Spec.from_bytes(publisher.spec.to_bytes())
        assert torch.equal(gather_packed(spec).buffer, publisher.export_packed().buffer)
    with pytest.raises(errors.TransportUnavailable, match="rank 0"):
        gather_packed(spec)


def test_few_blocks() -> None:
    with Publisher(DictSource(adapter(torch.float32), export, CONFIG)) as publisher:
        assert len(packed_plan(publisher.spec.layout).blocks) == 2 + 2 * 3
        assert len(publisher.plan.blocks) == 3


def test_the_shards_of_all_ranks_are_gathered() -> None:
    def gather(x: Tensors) -> Factors:
        parts = [torch.empty_like(x["b"]) for _ in range(2)]
        torch.distributed.all_gather(parts, x["b"])
        yield from pair(x["a"], torch.cat(parts), "proj")

    def work(rank: int) -> bool:
        tensors = adapter(torch.float32)
        tensors = {"a": tensors["a"], "b": adapter(torch.float32, seed=rank)["b"]}
        source = DictSource(tensors, gather, CONFIG)
        with Publisher(source) as publisher:
            publisher.publish(1)
            torch.distributed.barrier()
            found = publisher.export_packed().tensors()
            torch.distributed.barrier()
            return all(torch.equal(found[name], x.bfloat16()) for name, x in source.export())

    assert [result.value for result in run_ranks(2, work)] == [True, True]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(IN, OUT, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x)


@pytest.mark.parametrize("scale_rounding", ["engine", "once"])
def test_peft_loads_the_directory(tmp_path: Path, scale_rounding: str) -> None:
    from peft import PeftModel

    tensors = adapter(torch.float32)
    source = DictSource(
        {"a": tensors["a"], "b": tensors["b"]}, lambda x: pair(x["a"], x["b"], "proj"), CONFIG
    )
    with Publisher(source, torch.float32, scale_rounding=scale_rounding) as publisher:
        publisher.publish(1)
        view = publisher.export_packed(tmp_path / "new" / "adapter")
    saved = load_file(tmp_path / "new" / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in view.tensors().items())
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text())
    assert config["lora_alpha"] == (R if scale_rounding == "once" else 10)

    model = Model()
    x = torch.randn(5, IN)
    expected = model(x) + 10 / R * x @ tensors["a"].T @ tensors["b"].T
    adapted = PeftModel.from_pretrained(model, str(tmp_path / "new" / "adapter"))
    assert torch.allclose(adapted(x), expected, atol=1e-5)
