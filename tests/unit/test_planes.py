"""Planes: what was read equals what the exporter gave, in memory of rows plus columns."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.errors import NotMovement
from lora_refit.trace import planes, tags

NAME = "model.layers.3.mlp.down_proj"
small = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**31))


def expand(plane: planes.CompressedPlane, shape: tuple[int, int]) -> np.ndarray:
    return plane.at(np.arange(shape[0]), np.arange(shape[1]))


@given(small, st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]))
@settings(deadline=None)
def test_reading_gives_back_the_plane(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, cols, seed = shape
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randint(0, 256, (rows, cols), generator=generator).to(dtype)
    found = expand(planes.read(matrix, NAME), (rows, cols))
    assert np.array_equal(found, matrix.double().numpy())


@given(small)
def test_positions_may_come_in_any_order(shape: tuple[int, int, int]) -> None:
    rows, cols, seed = shape
    random = np.random.default_rng(seed)
    matrix = random.integers(0, 256, (rows, cols))
    plane = planes.read(torch.from_numpy(matrix).float(), NAME)
    picked = random.integers(0, rows, 5), random.integers(0, cols, 4)
    assert np.array_equal(plane.at(*picked), matrix[np.ix_(*picked)])


@pytest.mark.parametrize(
    "value", [0.5, 254.5, -1.0, 256.0, 1e30, math.nan, math.inf, -math.inf, 1 + 2**-20]
)
def test_values_that_are_no_tags_are_refused(value: float) -> None:
    matrix = torch.ones(4, 6)
    planes.read(matrix, NAME)
    matrix[2, 5] = value
    with pytest.raises(NotMovement, match=rf"{NAME}: 1 of 24 values"):
        planes.read(matrix, NAME)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(NotMovement, match=f"{NAME}: dtype {dtype}"):
        planes.read(torch.ones(2, 2).to(dtype), NAME)


def test_scattered_elements_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randint(1, 256, (400, 400), generator=generator).float()
    with pytest.raises(NotMovement, match=f"{NAME}: its elements are scattered"):
        planes.read(matrix, NAME)


def test_a_large_tensor_takes_memory_of_rows_plus_columns() -> None:
    shape = (14336, 16)
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    for plane in tags.planes_for([shape]):
        tags.fill(tensor, 0, plane)
        found = planes.read(tensor, NAME)
        stored = found.row_starts.size + found.col_starts.size + found.values.size
        assert stored <= 2 * sum(shape) + 1
        assert found.values.base is None, "a view would keep the whole tensor alive"


@given(st.integers(1, 3), small)
@settings(deadline=None)
def test_digits_combine_to_coordinates(count: int, shape: tuple[int, int, int]) -> None:
    rows, cols, seed = shape
    random = np.random.default_rng(seed)
    values = random.integers(0, tags.BASE**count, (rows, cols))
    padding = random.random((rows, cols)) < 0.2
    digits = []
    for place in range(count):
        digit = np.where(padding, 0, values // tags.BASE**place % tags.BASE + 1)
        digits.append(planes.read(torch.from_numpy(digit).float(), NAME))
    found = expand(planes.combine(digits, NAME), (rows, cols))
    assert np.array_equal(found, np.where(padding, -1, values))


def test_padding_that_differs_between_digits_is_refused() -> None:
    low, high = torch.ones(3, 3), torch.ones(3, 3)
    high[1, 1] = 0
    with pytest.raises(NotMovement, match=f"{NAME}: its padding differs"):
        planes.combine([planes.read(low, NAME), planes.read(high, NAME)], NAME)
