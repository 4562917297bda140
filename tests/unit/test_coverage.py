"""Uncovered elements, against a bitmap of the whole matrix."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lora_refit.trace.coverage import uncovered_elements

cases = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 6), st.integers(0, 2**31))


@given(cases)
def test_against_a_bitmap(case: tuple[int, int, int, int]) -> None:
    rows, cols, count, seed = case
    random = np.random.default_rng(seed)
    pieces = [
        (random.integers(0, rows, random.integers(0, 9)), random.integers(0, cols, 4))
        for _ in range(count)
    ]
    pieces += pieces[:1]
    bitmap = np.zeros((rows, cols), bool)
    for piece in pieces:
        bitmap[np.ix_(*piece)] = True
    assert uncovered_elements((rows, cols), pieces) == int((~bitmap).sum())


def test_no_piece_covers_nothing() -> None:
    assert uncovered_elements((3, 4), []) == 12


def test_one_missing_element_of_a_large_matrix_is_counted() -> None:
    shape = (14336, 4096)
    rows, cols = (np.arange(size) for size in shape)
    pieces = [(rows[:-1], cols), (rows[-1:], cols[1:])]
    assert uncovered_elements(shape, pieces) == 1
    assert uncovered_elements(shape, [*pieces, (rows[-1:], cols[:1])]) == 0
