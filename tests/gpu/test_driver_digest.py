"""Digests of the CUDA backend, on the stand-in driver, against the CPU's."""

from __future__ import annotations

import numpy as np
import pytest
import stand_in

from lora_refit import _C

LENGTHS = [0, 2, 4, 4094, 4096, 4098, 12_290, 100_000]


@pytest.fixture(autouse=True)
def driver() -> stand_in.StandIn:
    return stand_in.load()


@pytest.mark.parametrize("shift", [0, 2])
def test_digests_equal_the_cpu(shift: int) -> None:
    rng = np.random.default_rng(shift)
    memory = [rng.integers(0, 256, length + shift, np.uint8) for length in LENGTHS]
    starts = np.array([array.ctypes.data + shift for array in memory], np.uint64)
    nbytes = np.array(LENGTHS, np.uint64)
    expected, got = np.full((2, len(LENGTHS)), 99, np.uint64)
    _C.digest(starts, nbytes, expected)
    _C.cuda.digest(0, starts, nbytes, got, 0)
    assert (got == expected).all()


def test_a_repeated_digest_is_one_launch(driver: stand_in.StandIn) -> None:
    memory = np.arange(5000, dtype=np.uint16)
    starts, nbytes = np.array([memory.ctypes.data], np.uint64), np.array([10_000], np.uint64)
    first, second = np.zeros((2, 1), np.uint64)
    _C.cuda.digest(0, starts, nbytes, first, 0)
    driver.take_calls()
    memory[1234] ^= 1
    _C.cuda.digest(0, starts, nbytes, second, 0)
    assert driver.take_calls() == stand_in.STEADY_RUN
    assert first != second


def test_tables_that_are_no_longer_asked_for_are_freed(driver: stand_in.StandIn) -> None:
    memory = np.zeros(1, np.uint16)
    live = []
    for count in range(20):
        starts = np.full(count, memory.ctypes.data, np.uint64)
        _C.cuda.digest(0, starts, np.full(count, 2, np.uint64), np.zeros(count, np.uint64), 0)
        live.append(driver.live())
    assert live[-1] == live[10]


def test_nothing_is_digested_in_no_launch(driver: stand_in.StandIn) -> None:
    nothing = np.zeros(0, np.uint64)
    driver.take_calls()
    _C.cuda.digest(0, nothing, nothing, nothing, 0)
    assert "cuLaunchKernel" not in driver.take_calls()


@pytest.mark.parametrize(
    ("start", "nbytes", "said"),
    [
        (4096, 3, "size 3 bytes is not a multiple of 2"),
        (0, 2, "buffer 0 has address 0"),
        (4097, 2, "buffer 0 has the odd address 4097"),
    ],
)
def test_bad_buffers_are_refused(start: int, nbytes: int, said: str) -> None:
    words = np.array([start], np.uint64), np.array([nbytes], np.uint64)
    with pytest.raises(ValueError, match=said):
        _C.cuda.digest(0, *words, np.zeros(1, np.uint64), 0)
