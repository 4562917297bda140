"""Calling an engine that may die.

vLLM's client waits without a limit for the reply to a call, also after the engine process has gone:
whoever calls while an engine dies would hang.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
_LAST_WORDS_S = 1.0
"""A reply may still lie in a queue when the death of the engine is noticed."""


def call(work: Callable[[], T], is_dead: Callable[[], bool], timeout_s: float) -> T:
    """Run `work` in a thread and return its result, or raise what it raises.

    Raises TimeoutError when it does not end in time, ConnectionError once `is_dead` says so; the
    thread is then left behind.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="lora-refit-call", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait([outcome], _LOOK_EVERY_S).done:
        if is_dead():
            if wait([outcome], _LAST_WORDS_S).done:
                break
            raise ConnectionError("the engine process has died")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no reply within {timeout_s} s")
    return outcome.result()
