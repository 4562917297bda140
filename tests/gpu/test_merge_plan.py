"""The merge planner: what it refuses, and that its strips cover every block once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from merge_cases import Program, layer, random_program
from merge_plan import check, strips

ROWS = COLS = 128
"""Of a strip: kMergeRows and kMergeCols of csrc/cuda/kernels.h."""


def small_layer() -> Program:
    return layer(torch.bfloat16, torch.bfloat16, torch.bfloat16, (20, 30), 4)


@pytest.mark.parametrize(
    ("array", "field", "value", "error"),
    [
        ("blocks", "weight", 3, "block 0: weight buffer 3 does not exist; there are 3"),
        ("blocks", "dst", -1, "block 0: destination buffer -1 does not exist; there are 1"),
        ("blocks", "rows", 21, "segment 0: B elements"),
        ("blocks", "rows", -1, "block 0: rows -1 is negative"),
        ("blocks", "cols", -2, "block 0: cols -2 is negative"),
        ("blocks", "weight_offset", -1, "block 0: weight elements -1 to"),
        ("blocks", "weight_row_stride", 2**62, "to more than 2^63 lie outside weight buffer"),
        ("blocks", "dst_offset", 1, "block 0: destination elements 1 to 600 lie outside"),
        ("blocks", "dst_row_stride", 0, "block 0: destination row stride 0 writes the same"),
        ("blocks", "first_segment", 1, "block 0: segments 1 to 1 do not exist; there are 1"),
        ("blocks", "first_segment", -1, "block 0: segments -1 to -1 do not exist"),
        ("blocks", "segment_count", -1, "do not exist; there are 1"),
        ("blocks", "module", 1, "block 0: module 1 does not exist; there are 1"),
        ("blocks", "module", -1, "block 0: module -1 does not exist"),
        ("blocks", "scale", np.nan, "block 0: the scale is not a finite number"),
        ("blocks", "scale", np.inf, "block 0: the scale is not a finite number"),
        ("segments", "b", 9, "segment 0: B buffer 9 does not exist; there are 3"),
        ("segments", "a", -4, "segment 0: A buffer -4 does not exist; there are 3"),
        ("segments", "rank", -1, "segment 0: rank -1 is negative"),
        ("segments", "rank", 5, "segment 0: B elements"),
        ("segments", "b_offset", -1, "segment 0: B elements -1 to"),
        ("segments", "a_col_stride", 5, "segment 0: A elements"),
        ("segments", "a_k_stride", -31, "segment 0: A elements -"),
    ],
)
def test_a_program_that_would_leave_its_buffers_is_refused(
    array: str, field: str, value: float, error: str
) -> None:
    """The error names the block or segment and the value."""
    program = small_layer()
    assert check(program) == ""
    getattr(program, array)[field] = value
    if field == "rows" and value > 0:  # the weight and W' would be too small first
        program.blocks["weight_row_stride"] = 0
        program.blocks["dst_row_stride"] = 1
    assert error in check(program)


def test_factors_of_two_dtypes_are_refused() -> None:
    """A and B of one program go through one kernel."""
    program = small_layer()
    program.segments["a"] = program.add_source(torch.zeros(1000))
    assert check(program) == (
        "segment 0: A buffer 3 is fp32, but A and B of this program begin with bf16; all must "
        "share one dtype"
    )


def test_empty_blocks_and_segments_reach_nowhere() -> None:
    """Offsets of what is empty do not matter."""
    program = small_layer()
    program.blocks["rows"] = 0
    program.blocks["weight_offset"] = 10**9
    assert check(program) == ""
    program = small_layer()
    program.segments["rank"] = 0
    program.segments["b_offset"] = 10**9
    assert check(program) == ""


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("thread_blocks", [1, 7, 300])
def test_strips_cover_every_block_once(seed: int, thread_blocks: int) -> None:
    """In multiples of 128 rows and columns, largest first, and enough for all thread blocks."""
    program = random_program(torch.float32, 5, seed)
    cut = strips(program, thread_blocks)
    covered = [np.zeros((block["rows"], block["cols"]), int) for block in program.blocks]
    for strip in cut:
        assert strip["row"] % ROWS == 0 and strip["col"] % COLS == 0
        assert 1 <= strip["rows"] <= ROWS and strip["cols"] >= 1
        rows = slice(strip["row"], strip["row"] + strip["rows"])
        cols = slice(strip["col"], strip["col"] + strip["cols"])
        covered[strip["block"]][rows, cols] += 1
    assert all((part == 1).all() for part in covered)
    sizes = cut["rows"] * cut["cols"]
    assert (np.diff(sizes) <= 0).all()
    tiles = sum(-(-part.shape[0] // ROWS) * -(-part.shape[1] // COLS) for part in covered)
    assert len(cut) >= min(2 * thread_blocks, tiles) // 2
