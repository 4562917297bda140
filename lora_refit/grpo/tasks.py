"""Tasks with verifiable rewards: prompts, and a function that scores a response."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """A prompt and what its reward checks for."""

    prompt: str
    answer: str


class Task(Protocol):
    """Where problems come from and what a response to one is worth."""

    def sample(self, generator: random.Random) -> Problem:
        """A training problem."""

    def held_out(self) -> list[Problem]:
        """Problems that `sample` never gives."""

    def reward(self, problem: Problem, response: str) -> float:
        """Between 0 and 1."""


class Addition:
    """Sums of two digits. A quarter of the pairs is never trained on."""

    def sample(self, generator: random.Random) -> Problem:
        while True:
            first, second = generator.randint(1, 9), generator.randint(1, 9)
            if not self._is_held_out(first, second):
                return self._problem(first, second)

    def held_out(self) -> list[Problem]:
        digits = range(1, 10)
        return [self._problem(a, b) for a in digits for b in digits if self._is_held_out(a, b)]

    def reward(self, problem: Problem, response: str) -> float:
        """1 if the first number of the response is the sum."""
        number = re.search(r"\d+", response)
        return float(number is not None and number.group() == problem.answer)

    @staticmethod
    def _is_held_out(first: int, second: int) -> bool:
        return (7 * first + 3 * second) % 4 == 0

    @staticmethod
    def _problem(first: int, second: int) -> Problem:
        return Problem(f"Question: What is {first} + {second}?\nAnswer:", str(first + second))


class Letters:
    """Write letters: a reward that a tiny random model can learn in a few steps."""

    _PROMPTS = tuple(f"{digit}:" for digit in range(10))

    def sample(self, generator: random.Random) -> Problem:
        return Problem(generator.choice(self._PROMPTS[:8]), answer="")

    def held_out(self) -> list[Problem]:
        return [Problem(prompt, answer="") for prompt in self._PROMPTS[8:]]

    def reward(self, problem: Problem, response: str) -> float:
        """The share of the response's characters that are ASCII letters."""
        letters = sum(character.isascii() and character.isalpha() for character in response)
        return letters / max(len(response), 1)


TASKS: dict[str, Task] = {"addition": Addition(), "letters": Letters()}
