"""Axis maps: runs give back the coordinates that they compress, few of them for regular ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_refit.trace.axis import AxisMap

coordinates = st.lists(st.integers(-5, 2**40), max_size=40)
progressions = st.tuples(st.integers(0, 2**40), st.integers(-7, 7), st.integers(1, 30))


@given(coordinates)
def test_round_trip(values: list[int]) -> None:
    axis = AxisMap.from_coordinates(values)
    assert axis.coordinates().tolist() == values
    assert axis.coordinates().dtype == np.int64
    assert axis.length == len(values)
    assert (axis.runs[:, 2] >= 1).all()


@given(st.lists(progressions, max_size=12))
def test_joined_progressions_need_few_runs(parts: list[tuple[int, int, int]]) -> None:
    values = [first + step * i for first, step, count in parts for i in range(count)]
    axis = AxisMap.from_coordinates(values)
    assert axis.coordinates().tolist() == values
    # A greedy run may swallow the first element of the next progression, splitting that in two.
    assert len(axis.runs) <= 2 * len(parts)


@pytest.mark.parametrize(
    "values", [range(14336), range(99, -1, -1), range(3, 900, 7), [5] * 10, [8]]
)
def test_a_regular_axis_is_one_run(values: list[int]) -> None:
    assert len(AxisMap.from_coordinates(list(values)).runs) == 1


def test_equal_axes_have_equal_bytes() -> None:
    assert AxisMap.from_coordinates([4, 6, 8]) == AxisMap.from_coordinates(np.arange(4, 10, 2))
    assert AxisMap.from_coordinates([]).packed == b""
