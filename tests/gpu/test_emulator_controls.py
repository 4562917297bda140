"""The emulator itself: what it must report it reports, and correct kernels pass."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import emulated_build
import pytest

CONTROLS = emulated_build.Program(
    device=(Path(__file__).parent / "emulated" / "controls.cpp",), host=()
)

RACES = [
    "two_threads_write_one_word",
    "two_blocks_write_one_word",
    "neighbour_read_without_syncwarp",
    "shuffle_is_no_fence",
    "syncwarp_between_warps",
    "overwritten_before_all_have_read",
    "async_copy_read_before_the_barrier",
]
MISUSE = {
    "barrier_in_one_branch": "__syncthreads waits for threads that have returned",
    "mask_names_lanes_that_never_come": "shfl.sync.bfly names a lane that has returned",
    "lane_outside_its_own_mask": "__syncwarp by a lane outside its own mask",
    "two_collectives_meet": "meets",
    "vector_is_misaligned": "misaligned access of 16 bytes",
}
OUT_OF_BOUNDS = ["one_word_behind_global_memory", "one_word_behind_shared_memory"]
CORRECT = [
    "reversed_through_shared_memory",
    "swapped_inside_warps",
    "shuffled_by_half_a_warp",
    "copied_asynchronously",
    "added_by_all_blocks",
]


def outcome(sanitizer: str, name: str, seed: int = 3) -> tuple[int, str]:
    """Exit status, and all that was printed."""
    result = emulated_build.run(_executable(sanitizer), name, seed)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("name", RACES)
def test_races_are_reported(name: str) -> None:
    status, text = outcome("thread", name)
    assert status == emulated_build.REPORTED
    assert "data race" in text
    assert name in text  # in the stack trace


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_reported(name: str) -> None:
    status, text = outcome("plain", name)
    assert status == 0
    assert text.startswith("reported: ")
    assert MISUSE[name] in text


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_accesses_out_of_bounds_are_reported(name: str) -> None:
    status, text = outcome("address", name)
    assert status == emulated_build.REPORTED
    assert "heap-buffer-overflow" in text


@pytest.mark.parametrize("sanitizer", emulated_build.SANITIZERS)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_kernels_pass(name: str, sanitizer: str) -> None:
    assert outcome(sanitizer, name) == (0, "ok\n")


def test_shared_memory_is_garbage_until_it_is_written() -> None:
    """Static and dynamic, and asynchronous copies do not land before they are waited for."""
    assert outcome("plain", "sees_garbage_in_shared_memory") == (0, "ok\n")


def test_a_seed_is_one_schedule() -> None:
    """Seed 0 runs the threads in order; others shuffle them, each always in the same way."""
    orders = [outcome("plain", "order_of_the_threads", seed)[1] for seed in (0, 1, 2, 2)]
    in_order = [int(word) for word in orders[0].split()[1:]]
    assert in_order[1:] == sorted(in_order[1:])
    assert orders[0] != orders[1] != orders[2] == orders[3]


@cache
def _executable(sanitizer: str) -> Path:
    return emulated_build.build(CONTROLS, sanitizer)
