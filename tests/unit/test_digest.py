"""The digest: equal to its formula, the same however it is tiled, and changed by every bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lora_refit import _C, kernels
from lora_refit.errors import LayoutMismatch

Bytes = NDArray[np.uint8]
MASK = (1 << 64) - 1


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


WORD_WEIGHTS = [(splitmix64(i) & 0xFFFFFFFF) | 1 for i in range(1024)]


def formula(data: Bytes) -> int:
    """The sum of word * T(j % 1024) * M(j / 1024), in Python's own integers."""
    padded = np.concatenate([data, np.zeros(-len(data) % 4, np.uint8)])
    total = 0
    for j, word in enumerate(padded.view("<u4").tolist()):
        chunk, index = divmod(j, 1024)
        total += word * WORD_WEIGHTS[index] * (splitmix64((1 << 32) + chunk) | 1)
    return total & MASK


def addresses_of(*buffers: Bytes) -> NDArray[np.uint64]:
    return np.array([buffer.ctypes.data for buffer in buffers], np.uint64)


def digest_of(*buffers: Bytes, threads: int = 1) -> list[int]:
    sizes = np.array([len(buffer) for buffer in buffers], np.uint64)
    out = np.full(len(buffers), 77, np.uint64)
    _C.digest(addresses_of(*buffers), sizes, out, threads)
    return [int(value) for value in out]


def random_bytes(seed: int, size: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


@pytest.mark.parametrize("simd", ["auto", "portable"])
@settings(max_examples=25, deadline=None)
@given(
    halves=st.lists(
        st.one_of(st.integers(0, 70), st.integers(2040, 2060), st.integers(0, 9000)), max_size=4
    ),
    misaligned=st.integers(0, 33),
    seed=st.integers(0, 2**32),
)
def test_digest_equals_its_formula(
    simd: str, halves: list[int], misaligned: int, seed: int
) -> None:
    """Several buffers of any even size, at any address, on each SIMD path."""
    buffers = [
        random_bytes(seed + i, misaligned + 2 * n)[misaligned:] for i, n in enumerate(halves)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LORA_REFIT_SIMD", simd)
        assert digest_of(*buffers) == [formula(buffer) for buffer in buffers]


def test_threads_do_not_change_the_digest() -> None:
    """Buffers of many tiles, of one, and empty: threads 1, 2, 3 and the default agree."""
    buffers = [random_bytes(1, 1_500_002), random_bytes(2, 30), random_bytes(3, 0)]
    alone = digest_of(*buffers, threads=1)
    assert alone[1:] == [formula(buffers[1]), 0]
    assert all(digest_of(*buffers, threads=threads) == alone for threads in (0, 2, 3))


def test_every_flipped_bit_changes_the_digest() -> None:
    """All bits of the words around a chunk's end, and of the odd last half word."""
    data = random_bytes(4, 2 * 4096 + 6)
    before = digest_of(data)
    positions = [*range(24), *range(4080, 4112), *range(len(data) - 8, len(data))]
    for position in positions:
        for bit in range(8):
            data[position] ^= 1 << bit
            assert digest_of(data) != before, f"byte {position} bit {bit}"
            data[position] ^= 1 << bit
    assert digest_of(data) == before


def test_moved_content_changes_the_digest() -> None:
    """Two swapped words, in one chunk and across chunks, two swapped chunks, and a shift by one."""
    data = random_bytes(5, 3 * 4096)
    before = digest_of(data)
    words = data.view(np.uint32)
    for a, b in [(slice(3, 4), slice(9, 10)), (slice(7, 8), slice(1031, 1032))]:
        moved = words.copy()
        moved[a], moved[b] = words[b], words[a]
        assert digest_of(moved.view(np.uint8)) != before
    assert digest_of(np.roll(data, 4096)) != before
    assert digest_of(np.roll(data, 2)) != before


def test_zero_padding_adds_nothing() -> None:
    data = random_bytes(6, 1234)
    padded = np.concatenate([data, np.zeros(5000, np.uint8)])
    assert digest_of(padded) == digest_of(data)


def test_public_digest_returns_one_number_per_buffer() -> None:
    data = [random_bytes(7, 100), random_bytes(8, 4100)]
    sizes = np.array([100, 4100], np.uint64)
    result = kernels.digest(addresses_of(*data), sizes)
    assert result.dtype == np.uint64
    assert result.tolist() == [formula(buffer) for buffer in data]


@pytest.mark.parametrize(
    ("address", "size", "reason"),
    [(4096, 3, "buffer 0: size 3 bytes is not a multiple of 2"), (0, 8, "buffer 0 has address 0")],
)
def test_bad_buffers_are_refused(address: int, size: int, reason: str) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        kernels.digest(np.array([address], np.uint64), np.array([size], np.uint64))


def test_arguments_are_never_converted() -> None:
    """A converted output array would be a copy, and its digests would be lost."""
    with pytest.raises(TypeError):
        _C.digest(np.zeros(1, np.uint64), np.zeros(1, np.uint64), np.zeros(1, np.int64))
