"""The C++ merge program under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.mark.parametrize("simd", ["auto", "portable"])
def test_random_merge_programs_are_clean_under_sanitizers(
    fuzz: Callable[[str, int, str], str], simd: str
) -> None:
    """Random programs equal a plain loop; absurd ones are refused; no access strays."""
    assert "150 random merge programs equal the plain loop" in fuzz("fuzz_merge", 150, simd)
