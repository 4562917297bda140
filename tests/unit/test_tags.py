"""Tags: every element of a list of tensors has its own, in every floating dtype."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_refit.trace import tags

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
shapes = st.lists(
    st.lists(st.sampled_from([1, 2, 3, 7, 255, 256, 300]), max_size=3)
    .map(tuple)
    .filter(lambda shape: torch.Size(shape).numel() <= 20_000),
    min_size=1,
    max_size=4,
)


def decode(shapes: list[tuple[int, ...]], index: int, dtype: torch.dtype) -> torch.Tensor:
    """(tensor, row, column) of every element, int64 [numel, 3], from digits written in `dtype`."""
    fields = {field: torch.zeros(torch.Size(shapes[index]).numel()).long() for field in tags.FIELDS}
    for plane in tags.planes_for(shapes):
        tensor = torch.full(shapes[index], -1.0, dtype=dtype)
        tags.fill(tensor, index, plane)
        digits = tensor.double().reshape(-1)
        assert ((digits >= 1) & (digits <= tags.BASE) & (digits == digits.round())).all()
        fields[plane.field] += (digits.long() - 1) * tags.BASE**plane.digit
    return torch.stack(list(fields.values()), dim=1)


@given(shapes, st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_tags_name_their_element(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    for index, shape in enumerate(shapes):
        rows, cols = tags.matrix_shape(shape)
        row, col = torch.meshgrid(torch.arange(rows), torch.arange(cols), indexing="ij")
        found = decode(shapes, index, dtype)
        assert found[:, 0].tolist() == [index] * (rows * cols)
        assert torch.equal(found[:, 1], row.reshape(-1))
        assert torch.equal(found[:, 2], col.reshape(-1))


@pytest.mark.parametrize(
    ("shape", "matrix"), [((), (1, 1)), ((5,), (1, 5)), ((4, 3), (4, 3)), ((2, 4, 3), (8, 3))]
)
def test_matrix_shape(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert tags.matrix_shape(shape) == matrix


def test_more_tensors_than_one_digit_counts() -> None:
    planes = [plane for plane in tags.planes_for([(2, 2)] * 600) if plane.field == "tensor"]
    seen = {tuple(plane.digit_of(index) for plane in planes) for index in range(600)}
    assert len(planes) == 2
    assert len(seen) == 600


def test_a_large_model_needs_few_passes() -> None:
    layer = [(16, 8192), (28672, 16), (16, 28672), (8192, 16)]
    assert len(tags.planes_for(layer * 80)) == 6


def test_filling_a_transposed_view_keeps_its_own_rows_and_columns() -> None:
    view = torch.zeros(3, 5).t()
    tags.fill(view, 0, tags.Plane("row", 0))
    assert view[:, 0].tolist() == [1, 2, 3, 4, 5]
