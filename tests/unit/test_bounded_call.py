"""A call to an engine ends: with its result or error, at the engine's death, or when time is up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lora_refit.engines.vllm import bounded

LONG_S = 60.0


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """Set only after the test, so that its thread can end."""
    event = threading.Event()
    yield event
    event.set()


def test_returns_what_the_work_returns() -> None:
    assert bounded.call(lambda: "reply", lambda: False, LONG_S) == "reply"


def test_a_late_reply_of_a_dead_engine_still_counts() -> None:
    late = threading.Event()
    threading.Timer(0.5, late.set).start()
    assert bounded.call(late.wait, lambda: True, LONG_S) is True


def test_raises_what_the_work_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        bounded.call(lambda: 1 / 0, lambda: False, LONG_S)


def test_a_dead_engine_is_not_waited_for(never: threading.Event) -> None:
    with pytest.raises(ConnectionError, match="engine process has died"):
        bounded.call(never.wait, lambda: True, LONG_S)


def test_a_silent_engine_is_waited_for_so_long(never: threading.Event) -> None:
    with pytest.raises(TimeoutError, match=r"no reply within 0\.1 s"):
        bounded.call(never.wait, lambda: False, 0.1)
