"""Words in shared memory: the atomic operations that the arena's protocol is built on."""

from __future__ import annotations

import numpy as np
import pytest

from lora_refit import _C


def test_shared_words() -> None:
    """Load, store and compare-exchange of a word; a null or misaligned address is refused."""
    word = np.zeros(2, np.uint64)
    address = word.ctypes.data
    _C.store_release(address, 2**64 - 1)
    assert _C.load_acquire(address) == 2**64 - 1 == int(word[0])
    assert not _C.compare_exchange(address, 5, 6)
    assert _C.compare_exchange(address, 2**64 - 1, 6)
    _C.fence_seq_cst()
    assert word.tolist() == [6, 0]
    for bad in (0, address + 4):
        with pytest.raises(ValueError, match="is not a 64-bit word's"):
            _C.load_acquire(bad)
