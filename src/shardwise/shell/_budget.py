"""What a script may cost before it is refused: a few lines can ask for more than a machine has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardwise.errors import InputError, Problem

MOST_STEPS = 100_000
MOST_CHARACTERS = 4 << 20
MOST_DEPTH = 60


@dataclass(slots=True)
class Budget:
    """What is left of steps (commands, turns of loops, words), of characters that are made, and of nesting.

    >>> Budget("run.sh", steps=3).spend(4)
    Traceback (most recent call last):
    shardwise.errors.InputError: file = 'run.sh': takes more than 100,000 steps; give a script that launches less
    """

    source: str = "script"
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS
    depth: int = MOST_DEPTH

    def spend(self, steps: int = 1) -> None:
        """Take some steps."""
        self.steps -= steps
        if self.steps < 0:
            raise self._error(f"takes more than {MOST_STEPS:,} steps", "give a script that launches less")

    def made(self, text: str) -> str:
        """Return a text that was made, which takes its characters."""
        self.characters -= len(text)
        if self.characters < 0:
            raise self._error(f"makes more than {MOST_CHARACTERS:,} characters", "give a script that makes less")
        return text

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Run a block one level deeper."""
        self.depth -= 1
        if self.depth < 0:
            raise self._error(f"nests deeper than {MOST_DEPTH} levels", "give a script that is flatter")
        try:
            yield
        finally:
            self.depth += 1

    def _error(self, rule: str, remedy: str) -> InputError:
        return InputError([Problem("file", self.source, rule, remedy)])
