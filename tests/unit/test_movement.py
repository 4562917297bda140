"""Movements: a black box that moves data is decoded to a map that replays it exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from helpers import Move, learn
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.errors import CoverageError, NotMovement
from lora_refit.trace import tags
from lora_refit.trace.movement import TagReader, TensorMap, gather, identity, slab_shape

Shapes = list[tuple[int, ...]]


def assert_replays(move: Move, shapes: Shapes, dtype: torch.dtype = torch.float32) -> list[int]:
    """Check every output on random values; return the number of cells of each."""
    generator = torch.Generator().manual_seed(7)
    values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    maps = learn(move, shapes, dtype)
    for tensor_map, expected in zip(maps, move(values), strict=True):
        replayed = gather(tensor_map, dict(enumerate(values)))
        assert torch.equal(replayed, expected.double())
    return [len(tensor_map.cells) for tensor_map in maps]


def gqa_split(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    """Megatron's interleaved qkv of 4 groups x (3 query heads, k, v) of 5 rows, to q, k, v."""
    groups = sources[0].reshape(4, 5, 5, 2)
    return [groups[:, :3].reshape(-1, 2), groups[:, 3].reshape(-1, 2), groups[:, 4].reshape(-1, 2)]


def scramble(sources: list[torch.Tensor]) -> list[torch.Tensor]:
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    cols = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    return [sources[0][rows][:, cols]]


EXPERTS = 6
MOVES: dict[str, tuple[Move, Shapes, list[int]]] = {
    "slice": (lambda x: [x[0][3:11:2, 1:]], [(14, 5)], [1]),
    "cut into ranks": (lambda x: list(x[0].chunk(4)) + list(x[0].chunk(3, 1)), [(8, 6)], [1] * 7),
    "ranks along rows": (lambda x: [torch.cat(x)], [(3, 4), (3, 4), (2, 4)], [3]),
    "ranks along columns": (lambda x: [torch.cat(x, 1)], [(3, 4), (3, 1)], [2]),
    "ranks along both": (
        lambda x: [torch.cat([torch.cat(x[:2], 1), torch.cat(x[2:], 1)])],
        [(3, 4)] * 4,
        [4],
    ),
    "transpose": (lambda x: [x[0].t(), x[0].t().contiguous()[1:]], [(300, 5)], [1, 1]),
    "transposed ranks": (lambda x: [torch.cat([y.t() for y in x])], [(5, 3), (5, 4)], [2]),
    "straight beside transposed": (lambda x: [torch.cat([x[0], x[1].t()])], [(2, 5), (5, 3)], [15]),
    "grouped queries": (gqa_split, [(100, 2)], [1, 1, 1]),
    "gate and up interleaved": (
        lambda x: [torch.stack(x, 1).reshape(-1, 3)],
        [(6, 3), (6, 3)],
        [12],
    ),
    "rank times experts": (
        lambda x: [x[0].reshape(EXPERTS, 9, 4).permute(1, 2, 0).reshape(9, 4 * EXPERTS)],
        [(EXPERTS, 9, 4)],
        [4 * EXPERTS],
    ),
    "experts times rank": (
        lambda x: [x[0].permute(1, 0, 2).reshape(9, 4 * EXPERTS)],
        [(EXPERTS, 9, 4)],
        [EXPERTS],
    ),
    "columns permuted": (lambda x: [x[0][:, [4, 0, 3, 1, 2]]], [(7, 5)], [1]),
    "rows and columns scrambled": (scramble, [(40, 24)], [1]),
    "padding": (lambda x: [F.pad(x[0], (0, 3, 1, 2))], [(4, 5)], [1]),
    "only padding beside data": (lambda x: [torch.zeros(3, 4), x[0]], [(3, 4)], [0, 1]),
    "stacked experts": (lambda x: [torch.stack(x)], [(3, 4)] * EXPERTS, [EXPERTS]),
    "experts taken apart": (lambda x: list(x[0]), [(3, 5, 2)], [1, 1, 1]),
    "experts transposed": (lambda x: [x[0].transpose(1, 2)], [(3, 5, 2)], [3]),
    "block diagonal": (lambda x: [torch.block_diag(*x)], [(2, 3), (4, 1)], [2]),
    "one source twice": (lambda x: [x[0].repeat(2, 1), x[0].clone()], [(3, 4)], [1, 1]),
    "rows broadcast": (lambda x: [x[0].expand(6, 4)], [(1, 4)], [1]),
    "vectors": (lambda x: [x[0].flip(0), x[1].reshape(-1)], [(9,), (1, 7)], [1, 1]),
    "scalar": (lambda x: [torch.stack(x).reshape(1, 2)], [(), ()], [2]),
    "more rows than one digit": (lambda x: [x[0].roll(100, 0)], [(700, 2)], [1]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", MOVES)
def test_moves_replay_exactly(case: str, dtype: torch.dtype) -> None:
    move, shapes, cells = MOVES[case]
    assert assert_replays(move, shapes, dtype) == cells


def permute_rows(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x[torch.randperm(x.shape[0], generator=generator)]


def pick_rows(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return x[torch.randint(x.shape[0], (max(1, x.shape[0] - 1),), generator=generator)]


STEPS: list[Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = [
    permute_rows,
    pick_rows,
    lambda x, _: x.t(),
    lambda x, _: x.reshape(x.shape[1], x.shape[0]),
    lambda x, _: torch.cat([x[:1], x]) if x.shape[0] < 12 else x[:7],
    lambda x, _: F.pad(x, (0, 1)) if x.shape[1] < 12 else x[:, 2:],
]


@given(st.lists(st.sampled_from(STEPS), max_size=6), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_random_chains_of_moves_replay_exactly(
    steps: list[Callable[[torch.Tensor, torch.Generator], torch.Tensor]], seed: int
) -> None:
    def move(sources: list[torch.Tensor]) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        x = torch.cat(sources, 1)
        for step in steps:
            x = step(x, generator)
        return [x]

    assert_replays(move, [(5, 3), (5, 4)])


def test_a_map_of_a_large_factor_is_small() -> None:
    (tensor_map,) = learn(lambda x: [torch.cat(x)], [(14336, 16), (14336, 16)], torch.bfloat16)
    assert [len(cell.along_rows.packed) for cell in tensor_map.cells] == [24, 24]


def test_identity_is_the_map_of_a_copy() -> None:
    for shape in [(5,), (3, 4), (2, 3, 4), (2, 2, 3, 4)]:
        (learned,) = learn(lambda x: [x[0].clone()], [shape], torch.float32)
        assert identity("out0", shape, tensor=0) == learned
        assert learned.slab_shape == slab_shape(shape)


def read_planes(write: Callable[[tags.Plane], torch.Tensor], shapes: Shapes) -> TensorMap:
    reader = TagReader(shapes)
    for plane in reader.planes:
        reader.read("out", write(plane), plane)
    return reader.tensor_map("out")


def tagged(plane: tags.Plane, shape: tuple[int, ...] = (4, 3)) -> torch.Tensor:
    tensor = torch.empty(shape)
    tags.fill(tensor, 0, plane)
    return tensor


def test_tags_of_elements_that_do_not_exist_are_refused() -> None:
    assert len(read_planes(tagged, [(4, 3)]).cells) == 1
    for field in tags.FIELDS:
        with pytest.raises(NotMovement, match="out: its tags name elements that do not exist"):
            read_planes(lambda plane: tagged(plane) + (plane.field == field), [(4, 3)])  # noqa: B023


@pytest.mark.parametrize("field", tags.FIELDS)
def test_padding_in_one_pass_only_is_refused(field: str) -> None:
    def write(plane: tags.Plane) -> torch.Tensor:
        tensor = tagged(plane)
        if plane.field == field:
            tensor[1:3, 2] = 0
        return tensor

    with pytest.raises(NotMovement, match="out: its padding differs"):
        read_planes(write, [(4, 3)])


def test_rows_that_depend_on_columns_fall_into_too_many_pieces() -> None:
    order = torch.randperm(90 * 90, generator=torch.Generator().manual_seed(0))
    with pytest.raises(NotMovement, match=r"out0: falls into \d+ pieces"):
        learn(lambda x: [x[0].reshape(-1)[order].reshape(90, 90)], [(90, 90)], torch.float32)


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)])
def test_shapes_without_rows_and_columns_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(NotMovement, match="out0: shape"):
        learn(lambda x: [torch.zeros(shape)], [(2, 2)], torch.float32)


def test_passes_must_agree() -> None:
    reader = TagReader([(2, 2)])
    first, *others = reader.planes
    reader.read("out", torch.ones(2, 2), first)
    with pytest.raises(CoverageError, match="out: yielded twice"):
        reader.read("out", torch.ones(2, 2), first)
    with pytest.raises(NotMovement, match=r"out: shape changed from \(2, 2\) to \(2, 3\)"):
        reader.read("out", torch.ones(2, 3), others[0])
    with pytest.raises(NotMovement, match="out: missing from 2 of 3 passes"):
        reader.tensor_map("out")
