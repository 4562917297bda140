"""What real Megatron ranks merge, against fp64 of what Megatron-Bridge exports; no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import trainer
from rig import MODELS, policy_config

from lora_refit import Spec, Ticket
from lora_refit.merged.collector import BucketCollector, Staged
from lora_refit.testing.megatron import PolicyConfig
from lora_refit.testing.ranks import RankError, TrainerRanks

Tensors = dict[str, torch.Tensor]


@contextmanager
def collecting(ranks: TrainerRanks, dtype: str, **settings: Any) -> Iterator[BucketCollector]:
    spec = Spec.from_bytes(ranks.call(trainer.offer_merged, dtype, settings)[0])
    collector = BucketCollector(spec, timeout_s=20.0)
    yield collector
    collector.close()


def collect(
    collector: BucketCollector, ranks: TrainerRanks, version: int, seed: int | None
) -> tuple[Tensors, Staged]:
    ticket = Ticket.from_bytes(ranks.call(trainer.publish, version, seed)[0])
    collector.begin(ticket.sequence, ticket.version, 20.0)
    staged = collector.verify(slice_s=20.0)
    assert staged is not None
    found = {}
    for bucket in range(collector.buckets):
        found.update(collector.take(bucket))
    collector.end()
    return found, staged


def check(found: Tensors, ranks: TrainerRanks, scale: float, dtype: torch.dtype) -> float:
    """The largest error, in units of what is allowed: half an ulp of the merged dtype, and the
    rounding of the fp32 sums."""
    base = ranks.call(trainer.export_base)[0]
    factors = ranks.call(trainer.export)[0]
    worst = 0.0
    modules = {name.rsplit(".lora_", 1)[0] for name in factors}
    assert found.keys() == {m.removeprefix("base_model.model.") + ".weight" for m in modules}
    for module in modules:
        name = module.removeprefix("base_model.model.") + ".weight"
        a, b = (factors[f"{module}.lora_{x}.weight"].double() for x in "AB")
        expected = base[name].double() + scale * b @ a
        bound = 2.0**-24 * (len(a) + 4) * (abs(scale) * b.abs() @ a.abs() + expected.abs())
        info = torch.finfo(dtype)
        _, exponent = torch.frexp((expected.abs() + bound).clamp(min=info.smallest_normal))
        allowed = torch.ldexp(torch.full_like(expected, info.eps / 4), exponent) + bound
        assert found[name].dtype == dtype
        worst = max(worst, float(((found[name].double() - expected).abs() / allowed).max()))
    return worst


@pytest.mark.parametrize(
    ("size", "model", "base"),
    [
        (1, "llama-gqa", "bfloat16"),
        (2, "llama-gqa", "bfloat16"),
        (3, "llama-gqa", "bfloat16"),
        (2, "qwen3-mqa", "float32"),
    ],
)
def test_merged_weights_equal_fp64(
    policy: Callable[[PolicyConfig], TrainerRanks],
    tiny: Callable[..., Path],
    size: int,
    model: str,
    base: str,
) -> None:
    """Fused qkv and gate/up, row-parallel projections; buckets smaller than the largest weight."""
    ranks = policy(policy_config(tiny(**MODELS[model]), size, dtype=base, lora_alpha=17))
    before = ranks.call(trainer.base_digest)
    for dtype, bucket_bytes in ((torch.bfloat16, 60_000), (torch.float32, 1 << 30)):
        name = str(dtype).removeprefix("torch.")
        with collecting(ranks, name, bucket_bytes=bucket_bytes) as collector:
            for version in (1, 2):
                found, staged = collect(collector, ranks, version, seed=version)
                worst = check(found, ranks, 17 / 6, dtype)
                print(
                    f"TP {size} {base} -> {name}, {collector.buckets} buckets: {worst:.2f} of the bound"
                )
                assert worst <= 1.0
                assert int(staged.sums["elements"].sum()) == sum(t.numel() for t in found.values())
    assert ranks.call(trainer.base_digest) == before


def test_the_base_is_bit_identical_after_a_thousand_publishes(
    policy: Callable[[PolicyConfig], TrainerRanks], tiny: Callable[..., Path]
) -> None:
    ranks = policy(policy_config(tiny(**MODELS["llama-gqa"]), 2, dtype="bfloat16"))
    before = ranks.call(trainer.base_digest)
    with collecting(ranks, "bfloat16", bucket_bytes=1 << 20) as collector:
        ranks.call(trainer.randomize, 1)
        ranks.call(trainer.publish_often, 1, 999)
        found, _ = collect(collector, ranks, 1000, seed=None)
        assert check(found, ranks, 9 / 6, torch.bfloat16) <= 1.0
    assert ranks.call(trainer.base_digest) == before


def dora_config(tiny: Callable[..., Path], size: int, **settings: Any) -> PolicyConfig:
    """Above one rank column-parallel modules only: Bridge trains the others with another norm."""
    targets = ("linear_qkv", "linear_fc1") if size > 1 else PolicyConfig.targets
    return policy_config(
        tiny(**MODELS["llama-gqa"]),
        size,
        **({"dtype": "float32", "dora": True, "targets": targets} | settings),
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dora_rescales_rows_by_their_norms_over_all_ranks(
    policy: Callable[[PolicyConfig], TrainerRanks], tiny: Callable[..., Path], size: int
) -> None:
    """m / ||W + s B A|| * (W + s B A) in fp64, with norms over the whole input dimension."""
    ranks = policy(dora_config(tiny, size))
    for bucket_bytes in (60_000, 1 << 30):
        with collecting(ranks, "float32", bucket_bytes=bucket_bytes) as collector:
            found, staged = collect(collector, ranks, 1, seed=4)
            base = ranks.call(trainer.export_base)[0]
            factors = ranks.call(trainer.export)[0]
            magnitudes = ranks.call(trainer.magnitudes)[0]
            for name, merged in found.items():
                module = "base_model.model." + name.removesuffix(".weight")
                a, b = (factors[f"{module}.lora_{x}.weight"].double() for x in "AB")
                exact = base[name].double() + 9 / 6 * b @ a
                exact *= (magnitudes[name].double() / exact.norm(dim=1))[:, None]
                assert float((merged.double() - exact).abs().max()) < 2e-6 * float(
                    exact.abs().max()
                )
            assert int(staged.sums["elements"].sum()) == sum(t.numel() for t in found.values())


def test_adapter_mode_refuses_dora(
    policy: Callable[[PolicyConfig], TrainerRanks], tiny: Callable[..., Path]
) -> None:
    ranks = policy(dora_config(tiny, 1))
    with pytest.raises(RankError, match=r"UnsupportedAdapter: DoRA .* use mode=\"merged\""):
        ranks.call(trainer.offer, "float32")


def test_dora_that_the_trainer_computes_otherwise_is_refused(
    policy: Callable[[PolicyConfig], TrainerRanks], tiny: Callable[..., Path]
) -> None:
    ranks = policy(dora_config(tiny, 2, targets=("linear_qkv", "linear_proj")))
    with pytest.raises(
        RankError, match=r"o_proj.weight .*: cannot be merged: Megatron-Bridge takes"
    ):
        ranks.call(trainer.offer_merged, "float32", {})
