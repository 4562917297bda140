"""Bounded waiting on shared words."""

from __future__ import annotations

import time
from collections.abc import Iterator

_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 1e-3


def attempts(timeout_s: float, longest_nap_s: float = _LONGEST_NAP_S) -> Iterator[None]:
    """Yield at once, then after naps that double from 20 us, a last time when the time is up.

    With a timeout of 0 there is one attempt.
    """
    deadline = time.monotonic() + timeout_s
    nap = _FIRST_NAP_S
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(nap, left))
        nap = min(2 * nap, longest_nap_s)
        yield
