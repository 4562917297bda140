"""Merged weights of sharded, fused modules against fp64, for every tensor-parallel size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from fused_trainer import MODULES, FusedTrainer
from helpers import addresses, factor

from lora_refit.devices import CPU
from lora_refit.errors import CoverageError, LayoutMismatch, UnsupportedAdapter
from lora_refit.kernels import digest
from lora_refit.merged.bases import BaseShards
from lora_refit.merged.layout import MergedLayout
from lora_refit.merged.merge_plan import even_runs
from lora_refit.merged.merger import BucketMerger, MergeInputs, combined_digest
from lora_refit.merged.pieces import Pieces, adapted_weights, find_pieces
from lora_refit.merged.row_merger import ForwardMerger

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
POISON = float("nan")


class Rank:
    """One rank of a FusedTrainer as a source of base weights."""

    def __init__(self, trainer: FusedTrainer, rank: int) -> None:
        self._trainer, self._rank = trainer, rank

    def base_weights(self) -> list[Any]:
        return self._trainer.held(self._rank)


def layout_of(
    trainer: FusedTrainer, dtype: torch.dtype, bucket_bytes: int
) -> tuple[MergedLayout, Pieces]:
    export_map = trainer.export_map()
    pieces = find_pieces(export_map, trainer.shards())
    assert not pieces.problems
    layout = MergedLayout(
        dtype=str(dtype).removeprefix("torch."),
        bucket_bytes=bucket_bytes,
        weights=tuple(adapted_weights(export_map)),
        pieces=tuple(item.piece for item in pieces.pieces),
    )
    return layout, pieces


def merge_all(
    trainer: FusedTrainer,
    dtype: torch.dtype,
    scale: float,
    bucket_bytes: int,
    merger_type: type = BucketMerger,
) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    """Every rank's buckets, put together to whole weights; and the sums over all weights."""
    layout, pieces = layout_of(trainer, dtype, bucket_bytes)
    whole = {w.name: torch.full(w.shape, POISON, dtype=dtype) for w in layout.weights}
    total = np.zeros(4)
    for rank in range(trainer.tensor_parallel):
        inputs = MergeInputs(
            layout=layout,
            pieces=pieces.pieces,
            parameters=trainer.described(),
            adapter_dtype=trainer.adapter_dtype,
            bases=BaseShards(Rank(trainer, rank), frozenset(range(len(MODULES))), CPU),
            rank=rank,
            scale=scale,
        )
        merger = merger_type(inputs)
        for number, bucket in enumerate(layout.buckets):
            half = torch.full((layout.ring_bytes(rank),), 0xAB, dtype=torch.uint8)
            merged = merger.merge(number, half.data_ptr(), addresses(trainer.parameters()), None)
            chunks = bucket.of_rank(rank)
            views = [half[c.offset : c.offset + layout.nbytes(c)] for c in chunks]
            found = digest(addresses(views), np.asarray([len(v) for v in views], np.uint64), CPU)
            assert merged.digest == combined_digest(found)
            for record in merged.sums:
                total += [record[name] for name in merged.sums.dtype.names]
            for chunk, view in zip(chunks, views, strict=True):
                target = whole[layout.weights[chunk.weight].name]
                target[chunk.row : chunk.row + chunk.rows, chunk.col : chunk.col + chunk.cols] = (
                    view.view(dtype).view(chunk.rows, chunk.cols)
                )
    return whole, total


def exact(trainer: FusedTrainer, scale: float) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """(W + scale * B @ A, |scale| * |B| @ |A|) in fp64, by checkpoint name."""
    factors = {name: t.double() for name, t in trainer.export(trainer.parameters()).items()}
    found = {}
    for name, weight in trainer.base().items():
        module = name.removesuffix(".weight")
        a, b = factors[factor(module, "A")], factors[factor(module, "B")]
        found[name] = weight.double() + scale * b @ a, abs(scale) * b.abs() @ a.abs()
    return found


def half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(values.abs().clamp(min=info.smallest_normal))
    return torch.ldexp(torch.full_like(values, info.eps / 4), exponent)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("base", "adapter", "merged", "rank"),
    [
        (BF16, BF16, BF16, 6),
        (F32, F32, F32, 6),
        (F16, F32, F16, 12),
        (BF16, F32, BF16, 48),
        (F32, BF16, BF16, 240),
        (BF16, BF16, F32, 6),
    ],
    ids=str,
)
def test_merges_equal_fp64(
    size: int, base: torch.dtype, adapter: torch.dtype, merged: torch.dtype, rank: int
) -> None:
    """Half an ulp of the merged dtype, plus the rounding of `rank` fp32 multiply-adds."""
    trainer = FusedTrainer(size, rank, base, adapter, seed=size)
    for scale in (17 / rank, 3 / rank**0.5):
        whole, _ = merge_all(trainer, merged, scale, bucket_bytes=5000)
        for name, (expected, products) in exact(trainer, scale).items():
            bound = 2.0**-24 * (rank + 4) * (products + expected.abs()) + 2.0**-24
            allowed = half_ulp(expected.abs() + bound, merged) + bound
            error = (whole[name].double() - expected).abs()
            assert bool((error <= allowed).all()), f"{name}: {float((error / allowed).max())}"


def test_a_single_bucket_and_many_hold_the_same_bits() -> None:
    trainer = FusedTrainer(3, 6, BF16, F32)
    one, sums = merge_all(trainer, BF16, 1.5, 1 << 30)
    for bucket_bytes in (200, 777, 4096):
        many, others = merge_all(trainer, BF16, 1.5, bucket_bytes)
        assert all(
            torch.equal(one[name].view(torch.int16), many[name].view(torch.int16)) for name in one
        )
        assert others == pytest.approx(sums, rel=1e-9)


def test_shards_of_any_size_merge_to_the_same_bits() -> None:
    """A shard's merge adds up k in the same order as that of the whole weight."""
    trainer = FusedTrainer(3, 6, BF16, F32)
    whole, _ = merge_all(trainer, BF16, 0.7, 1 << 30)
    single = FusedTrainer(1, 6, BF16, F32)
    factors = trainer.export(trainer.parameters())
    base = trainer.base()
    q, k, v = (base[f"{name}.weight"] for name in "qkv")
    single.weights[0] = [
        _fuse_qkv(q, k, v),
        base["o.weight"],
        torch.cat([base["gate.weight"], base["up.weight"]]),
        base["down.weight"],
    ]
    single.a[0] = [factors[factor(name, "A")] for name in ("q", "o", "gate", "down")]
    single.b[0] = [
        _fuse_qkv(*(factors[factor(name, "B")] for name in "qkv")),
        factors[factor("o", "B")],
        torch.cat([factors[factor(name, "B")] for name in ("gate", "up")]),
        factors[factor("down", "B")],
    ]
    alone, _ = merge_all(single, BF16, 0.7, 1 << 30)
    for name, found in alone.items():
        assert torch.equal(found.view(torch.int16), whole[name].view(torch.int16)), name


def _fuse_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from fused_trainer import KV_HEADS

    parts = [part.reshape(KV_HEADS, -1, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, 1).flatten(0, 1)


def test_the_trainers_rounding_is_that_of_an_eager_merge() -> None:
    trainer = FusedTrainer(2, 6, BF16, BF16)
    whole, _ = merge_all(trainer, BF16, 1.5, 3000, ForwardMerger)
    factors = trainer.export(trainer.parameters())
    differ = total = 0
    for name, weight in trainer.base().items():
        module = name.removesuffix(".weight")
        a, b = factors[factor(module, "A")], factors[factor(module, "B")]
        eager = weight + (b.float() @ a.float()).to(BF16) * 1.5
        differ += int((whole[name] != eager).sum())
        total += eager.numel()
    print(f"eager merge in bf16: {differ} of {total} elements differ")
    assert differ <= total / 1000  # the sum over k has another order


MUTATIONS = ["rows of a head", "columns", "another rank's lora_A", "another k", "scale"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_wrong_pieces_show(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with fp64 catches each way in which a piece could be wrong."""
    import test_merged_pieces as this

    trainer = FusedTrainer(2, 6, F32, F32)
    right = this.layout_of

    def wrong(*arguments: Any) -> tuple[MergedLayout, Pieces]:
        layout, pieces = right(*arguments)
        return layout, replace(pieces, pieces=tuple(_mutated(p, mutation) for p in pieces.pieces))

    monkeypatch.setattr(this, "layout_of", wrong)
    scale = 1.5 if mutation == "scale" else 2.0
    whole, _ = merge_all(trainer, F32, scale, 1 << 30)
    errors = [
        float((whole[n].double() - e).abs().max()) for n, (e, _) in exact(trainer, 2.0).items()
    ]
    assert max(errors) > 1e-3
    monkeypatch.undo()
    whole, _ = merge_all(trainer, F32, 2.0, 1 << 30)
    errors = [
        float((whole[n].double() - e).abs().max()) for n, (e, _) in exact(trainer, 2.0).items()
    ]
    assert max(errors) < 1e-4


def _mutated(piece: Any, mutation: str) -> Any:
    (ks, a), *rest = piece.a
    match mutation:
        case "rows of a head":
            return replace(piece, weight_rows=np.roll(piece.weight_rows, 1))
        case "columns":
            return replace(piece, weight_cols=np.roll(piece.weight_cols, 1))
        case "another rank's lora_A":
            return replace(piece, a=(piece.a[0],) * len(piece.a))
        case "another k":
            return replace(piece, a=((ks, replace(a, rows=a.rows[::-1].copy())), *rest))
    return piece


def test_of_replicas_the_lowest_rank_merges() -> None:
    trainer = FusedTrainer(2, 6, F32, F32)
    export_map = trainer.export_map()
    count = len(export_map.parameters)
    doubled = msgspec.structs.replace(
        export_map,
        parameters=export_map.parameters
        + tuple(msgspec.structs.replace(p, rank=p.rank + 2) for p in export_map.parameters),
        replicas=tuple((i, i + count) for i in range(count)),
    )
    shards = trainer.shards()
    copies = [
        msgspec.structs.replace(s, rank=s.rank + 2, a=s.a + count, b=s.b + count) for s in shards
    ]
    pieces = find_pieces(doubled, shards + copies)
    assert not pieces.problems
    assert {item.piece.rank for item in pieces.pieces} == {0, 1}
    assert {item.piece.rank for item in pieces.replicas} == {2, 3}
    assert [p.piece for p in pieces.pieces] == [
        p.piece for p in find_pieces(export_map, shards).pieces
    ]


def test_what_cannot_be_merged_is_named() -> None:
    trainer = FusedTrainer(2, 6, F32, F32)
    export_map, shards = trainer.export_map(), trainer.shards()
    refused = [
        msgspec.structs.replace(s, refused="it is tied to the embedding") if s.index == 1 else s
        for s in shards
    ]
    problems = find_pieces(export_map, refused).problems
    names = [w.name for w in adapted_weights(export_map)]
    assert {names[index] for index in problems} == {"o.weight"}
    (problem,) = problems.values()
    assert isinstance(problem, UnsupportedAdapter)
    assert "o.weight (trainer rank 0, o.out)" in str(problem)
    assert "tied to the embedding" in str(problem)

    unknown = find_pieces(export_map, shards[:3]).problems  # no shard of rank 1 at all
    assert len(unknown) == len(names)
    assert all(isinstance(item, UnsupportedAdapter) for item in unknown.values())

    short = [
        msgspec.structs.replace(s, first_row=0) if (s.rank, s.index) == (1, 1) else s
        for s in shards
    ]
    assert not find_pieces(
        export_map, short
    ).problems  # the same rows twice: seen by the base guard
    small = [msgspec.structs.replace(s, shape=(3, 3)) if s.index == 3 else s for s in shards]
    (problem,) = find_pieces(export_map, small).problems.values()
    assert isinstance(problem, CoverageError)
    assert "down.weight" in str(problem)


def test_buckets_hold_everything_once_and_no_more_than_they_may() -> None:
    trainer = FusedTrainer(3, 6, F32, F32)
    for bucket_bytes in (200, 1000, 10**6):
        layout, _ = layout_of(trainer, BF16, bucket_bytes)
        seen = {w.name: torch.zeros(w.shape, dtype=torch.int32) for w in layout.weights}
        for bucket in layout.buckets:
            for rank in range(3):
                chunks = bucket.of_rank(rank)
                ends = [0, *(c.offset + layout.nbytes(c) for c in chunks)]
                assert all(c.offset >= end for c, end in zip(chunks, ends, strict=False))
                assert all(c.offset % 64 == 0 for c in chunks)
                assert ends[-1] <= max(bucket_bytes, 64 * len(chunks) + bucket_bytes)
                assert ends[-1] <= layout.ring_bytes(rank)
            for c in bucket.chunks:
                seen[layout.weights[c.weight].name][
                    c.row : c.row + c.rows, c.col : c.col + c.cols
                ] += 1
        assert all(bool((count == 1).all()) for count in seen.values())
        print(f"bucket_bytes {bucket_bytes}: {len(layout.buckets)} buckets")
    assert len(layout.buckets) == 1


def test_a_bucket_that_holds_no_row_is_refused() -> None:
    with pytest.raises(
        LayoutMismatch, match=r"bucket_bytes=20 holds not one row of q\.weight .* 84 bytes"
    ):
        assert layout_of(FusedTrainer(1, 2, F32, F32), BF16, 20)[0].buckets


def test_even_runs_follow_all_arrays() -> None:
    a = np.array([0, 1, 2, 10, 11, 12, 5])
    b = np.array([0, 2, 4, 6, 8, 11, 14])
    runs = even_runs(a, b)
    assert [(r.start, r.count) for r in runs] == [(0, 3), (3, 2), (5, 2)]
    assert sum(r.count for r in runs) == len(a)
    for r in runs:
        for array, step in zip((a, b), r.steps, strict=True):
            assert np.array_equal(
                array[r.start : r.start + r.count], array[r.start] + step * np.arange(r.count)
            )
    assert [(r.start, r.count) for r in even_runs(np.array([4]))] == [(0, 1)]


def test_a_base_that_somebody_merged_into_is_named() -> None:
    trainer = FusedTrainer(1, 2, F32, F32)
    bases = BaseShards(Rank(trainer, 0), frozenset(range(4)), CPU)
    bases.require_pristine(range(4))
    before = trainer.weights[0][2].clone()
    trainer.weights[0][2].add_(1e-3).sub_(1e-3)
    with pytest.raises(LayoutMismatch, match=r"gate_up\.out: its base weight has changed since"):
        bases.require_pristine(range(4))
    trainer.weights[0][2].copy_(before)
    bases.require_pristine(range(4))


def test_offloaded_or_changed_bases_are_named() -> None:
    trainer = FusedTrainer(1, 2, F32, F32)
    bases = BaseShards(Rank(trainer, 0), frozenset({0, 1}), CPU)
    assert math.prod(bases.now()[0].weight.shape) > 0
    before = trainer.weights[0][1]
    trainer.weights[0][1] = before[:-1]
    with pytest.raises(LayoutMismatch, match=r"o\.out: its base weight was .* now"):
        bases.now()
    trainer.weights[0][1] = before.clone()
    trainer.weights[0][1].untyped_storage().resize_(0)
    with pytest.raises(LayoutMismatch, match=r"o\.out: its base weight has no storage"):
        bases.now()
    trainer.weights[0][1] = before.t().contiguous().t()
    with pytest.raises(LayoutMismatch, match=r"o\.out: .* \(not contiguous\)"):
        bases.now()
    trainer.weights[0][1] = before
    bases.now()
    trainer.weights[0][0] = trainer.weights[0][0].to(torch.int8)
    with pytest.raises(
        UnsupportedAdapter, match=r"qkv\.out: its base weight is stored as torch.int8"
    ):
        BaseShards(Rank(trainer, 0), frozenset({0}), CPU)
