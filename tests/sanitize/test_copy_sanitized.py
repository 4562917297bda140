"""The C++ copy program under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("simd", ["auto", "portable"])
def test_random_block_lists_are_clean_under_sanitizers(
    fuzz: Callable[[str, int, str], str], simd: str
) -> None:
    """Random block lists equal a plain loop; absurd ones are refused; no access strays."""
    assert "150 random block lists equal the plain loop" in fuzz("fuzz_copy", 150, simd)
