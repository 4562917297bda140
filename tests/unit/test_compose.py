"""Composition: blocks from sources to destinations equal doing one movement after the other."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import Move, learn, run_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.kernels import SCALE_ONCE
from lora_refit.plan import Block, Buffer, Plan, compose
from lora_refit.plan.blocks import batch, joint_runs

Shapes = list[tuple[int, ...]]


@dataclass(frozen=True)
class Chain:
    """destinations <- outer <- middle <- inner <- sources, with a scale for each middle tensor."""

    inner: Move
    outer: Move
    shapes: Shapes
    scales: dict[int, float] = dataclasses.field(default_factory=dict)

    def blocks(self) -> list[Block]:
        middle = learn(self.inner, self.shapes, torch.float32)
        outer = learn(self.outer, [item.shape for item in middle], torch.float32)
        return compose(outer, middle, self.shapes, self.scales)

    def values(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(11)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def expected(self) -> list[torch.Tensor]:
        middle = self.inner(self.values())
        scaled = [x * self.scales.get(index, 1.0) for index, x in enumerate(middle)]
        return [x.contiguous().reshape(-1) for x in self.outer(scaled)]

    def replayed(self, blocks: list[Block]) -> list[torch.Tensor]:
        """What the copy kernel makes of the blocks; padding is zero because nothing writes it."""
        plan = Plan.build(
            [Buffer(f"s{i}", 0, "float32", math.prod(s)) for i, s in enumerate(self.shapes)],
            [Buffer(f"d{i}", 0, "float32", x.numel()) for i, x in enumerate(self.expected())],
            blocks,
        )
        return run_plan(plan, self.values())

    def is_replayed_by(self, blocks: list[Block]) -> bool:
        pairs = zip(self.replayed(blocks), self.expected(), strict=True)
        return all(torch.equal(found, expected) for found, expected in pairs)


HEAD, RANK, MAX_RANK = 8, 4, 16
GROUPS, QUERIES = 4, 3


def qkv_factors(x: list[torch.Tensor]) -> list[torch.Tensor]:
    """Two trainer ranks' shards of A (by rank) and of B (by group) to A and B of q, k and v."""
    a = torch.cat(x[:2])
    b = torch.cat(x[2:]).reshape(GROUPS, QUERIES + 2, HEAD, RANK)
    query, key, value = b[:, :QUERIES], b[:, QUERIES], b[:, QUERIES + 1]
    return [a, a.clone(), a.clone(), *(part.reshape(-1, RANK) for part in (query, key, value))]


def padded_slots(x: list[torch.Tensor]) -> list[torch.Tensor]:
    """lora_A [MAX_RANK, in] and lora_B [out, MAX_RANK] slots."""
    a = [F.pad(item, (0, 0, 0, MAX_RANK - RANK)) for item in x[:3]]
    return a + [F.pad(item, (0, MAX_RANK - RANK)) for item in x[3:]]


EXPERTS = 128


def expert_factors(x: list[torch.Tensor]) -> list[torch.Tensor]:
    """Stacked experts and a shared A to one pair each."""
    return [*x[0].expand(EXPERTS, -1, -1), *x[1].unbind()]


def expert_slots(x: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(x[:EXPERTS]), F.pad(torch.stack(x[EXPERTS:]), (0, 3))]


QKV = Chain(
    qkv_factors,
    padded_slots,
    [(2, 32), (2, 32), (GROUPS // 2 * 5 * HEAD, RANK), (GROUPS // 2 * 5 * HEAD, RANK)],
    {3: 2.0, 4: 0.3, 5: -1.7},
)
MOE = Chain(expert_factors, expert_slots, [(1, 2, 6), (EXPERTS, 5, 2)])


@pytest.mark.parametrize(("chain", "count"), [(QKV, 12), (MOE, 2)], ids=["qkv", "experts"])
def test_regular_layers_need_few_blocks(chain: Chain, count: int) -> None:
    blocks = chain.blocks()
    assert chain.is_replayed_by(blocks)
    assert len(blocks) == count


def random_move(seed: int, outputs: int) -> Move:
    """Cuts, joins, permutes, transposes and pads two-dimensional tensors in a random manner."""

    def move(sources: list[torch.Tensor]) -> list[torch.Tensor]:
        random = np.random.default_rng(seed)
        made = []
        for _ in range(outputs):
            x = sources[random.integers(len(sources))]
            if random.random() < 0.5:
                other = sources[random.integers(len(sources))]
                other = other[:, : x.shape[1]]
                x = torch.cat([F.pad(other, (0, x.shape[1] - other.shape[1])), x])
            if random.random() < 0.4:
                x = x.t()
            if random.random() < 0.4:
                x = x[torch.from_numpy(random.permutation(x.shape[0]))]
            if random.random() < 0.4:
                x = x[:, random.integers(x.shape[1]) :: random.integers(1, 3)]
            if random.random() < 0.3:
                x = F.pad(x, (1, 0, 0, 2))
            if random.random() < 0.3 and x.shape[0] % 2 == 0:
                x = x.reshape(2, -1, x.shape[1]).transpose(0, random.integers(2))
                x = x if random.random() < 0.5 else x.flatten(0, 1)
            made.append(x)
        return made

    return move


def on_matrices(move: Move) -> Move:
    """The same of sources with any number of dimensions."""
    return lambda sources: move([x.reshape(-1, x.shape[-1]) for x in sources])


def random_chain(seed: int) -> Chain:
    random = np.random.default_rng(seed)
    shapes = [tuple(random.integers(1, 7, 2).tolist()) for _ in range(3)]
    scales = {index: float(np.float32(random.normal())) for index in range(2)}
    return Chain(random_move(seed, 4), on_matrices(random_move(seed + 1, 5)), shapes, scales)


@given(st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_random_movements_compose(seed: int) -> None:
    chain = random_chain(seed)
    assert chain.is_replayed_by(chain.blocks())


Mutant = Callable[[list[Block]], list[Block]]


def change(blocks: list[Block], index: int, **changes: object) -> list[Block]:
    block = dataclasses.replace(blocks[index], **changes)  # type: ignore[arg-type]
    return [*blocks[:index], block, *blocks[index + 1 :]]


def swap_sources(blocks: list[Block]) -> list[Block]:
    """Exchange what the first two blocks of one shape and source read."""
    for (i, one), (j, other) in itertools.combinations(enumerate(blocks), 2):
        alike = (one.src, one.size) == (other.src, other.size)
        if alike and one.src_offset != other.src_offset:
            blocks = change(blocks, i, src_offset=other.src_offset)
            return change(blocks, j, src_offset=one.src_offset)
    raise AssertionError("no two blocks can be swapped")


def rescale(blocks: list[Block]) -> list[Block]:
    last = len(blocks) - 1
    return change(blocks, last, scale=float(np.nextafter(np.float32(blocks[last].scale), 0)))


def shift(side: str) -> Mutant:
    """Shift the block that fills the q factor: k and v follow it, so it stays in its buffers."""

    def mutate(blocks: list[Block]) -> list[Block]:
        index = next(i for i, block in enumerate(blocks) if block.dst == 3)
        return change(blocks, index, **{side: getattr(blocks[index], side) + 1})

    return mutate


MUTANTS: dict[str, Mutant] = {
    "a block dropped": lambda blocks: blocks[:-1],
    "two blocks swapped": swap_sources,
    "a block rescaled by one unit in the last place": rescale,
    "a source offset shifted": shift("src_offset"),
    "a destination offset shifted": shift("dst_offset"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_catches_mutants(name: str) -> None:
    blocks = QKV.blocks()
    assert QKV.is_replayed_by(blocks), "control"
    assert not QKV.is_replayed_by(MUTANTS[name](blocks))


offset_pairs = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=30, unique=True
)


@given(offset_pairs)
def test_joint_runs_cover_every_pair_once(pairs: list[tuple[int, int]]) -> None:
    dst, src = (np.asarray(side, np.int64) for side in zip(*pairs, strict=True))
    runs = joint_runs(dst, src)
    found = [
        (run.dst + i * run.dst_step, run.src + i * run.src_step)
        for run in runs
        for i in range(run.count)
    ]
    assert sorted(found) == sorted(pairs)
    assert len(runs) <= len(pairs)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(-9, 9), st.integers(2, 40), st.randoms())
def test_a_joint_progression_in_any_order_is_one_run(
    first: int, dst_step: int, src_step: int, count: int, random: object
) -> None:
    order = list(range(count))
    random.shuffle(order)  # type: ignore[attr-defined]
    dst = np.asarray([first + i * dst_step for i in order], np.int64)
    src = np.asarray([500 + i * src_step for i in order], np.int64)
    assert len(joint_runs(dst, src)) == 1


def test_the_shorter_of_both_orders_is_taken() -> None:
    regular, interleaved = np.arange(8), np.asarray([4, 0, 5, 1, 6, 2, 7, 3])
    assert len(joint_runs(regular, interleaved)) == 2
    assert len(joint_runs(interleaved, regular)) == 2


def elements(blocks: list[Block]) -> list[tuple[int, int, int, int, float, int]]:
    """(dst buffer, dst offset, src buffer, src offset, scale, flags) of all copies, sorted."""
    found = []
    for block in blocks:
        for index in np.ndindex(block.size):
            dst = block.dst_offset + int(np.dot(index, block.dst_stride))
            src = block.src_offset + int(np.dot(index, block.src_stride))
            found.append((block.dst, dst, block.src, src, block.scale, block.flags))
    return sorted(found)


unbatched = st.builds(
    Block,
    src=st.integers(0, 1),
    dst=st.integers(0, 1),
    src_offset=st.integers(0, 40),
    dst_offset=st.integers(0, 40),
    size=st.just((1, 2, 3)),
    src_stride=st.sampled_from([(0, 3, 1), (0, 1, 2)]),
    dst_stride=st.just((0, 3, 1)),
    scale=st.sampled_from([1.0, 0.5]),
    flags=st.sampled_from([0, SCALE_ONCE]),
)


@given(st.lists(unbatched, max_size=12, unique=True))
def test_batching_keeps_every_element(blocks: list[Block]) -> None:
    assert elements(batch(blocks)) == elements(blocks)
