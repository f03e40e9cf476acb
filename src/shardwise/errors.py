"""Bad input as data: every problem names the field, the value, the rule it broke and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the input, as a person can act on it.

    >>> print(Problem("tp", 6, "must divide the 32 query heads", "use one of 1, 2, 4, 8, 16, 32"))
    tp = 6: must divide the 32 query heads; use one of 1, 2, 4, 8, 16, 32
    """

    field: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} = {self.value!r}: {self.rule}; {self.remedy}"

    def as_dict(self) -> dict[str, object]:
        """Return the problem as the record that `--json` prints."""
        value = self.value if isinstance(self.value, (str, int, float, bool, type(None))) else str(self.value)
        return {"field": self.field, "value": value, "rule": self.rule, "remedy": self.remedy}


class InputError(ValueError):
    """Input that cannot be used; holds every problem that was found, not the first.

    >>> try:
    ...     raise InputError([Problem("tp", 0, "must be at least 1", "use 1")])
    ... except InputError as error:
    ...     print(error)
    tp = 0: must be at least 1; use 1
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


class Problems:
    """Collects problems so that all of them are reported at once.

    >>> found = Problems()
    >>> found.add("pp", 3, "must divide 32 layers", "use 1, 2 or 4")
    >>> with found.collect():
    ...     raise InputError([Problem("dp", -1, "must be at least 1", "use 1")])
    >>> len(found.items)
    2
    """

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def add(self, field: str, value: object, rule: str, remedy: str) -> None:
        """Record one problem."""
        self.items.append(Problem(field, value, rule, remedy))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Run a block that may raise `InputError`, and keep its problems instead of raising."""
        try:
            yield
        except InputError as error:
            self.items.extend(error.problems)

    def raise_if_any(self) -> None:
        """Raise `InputError` with everything recorded, or do nothing."""
        if self.items:
            raise InputError({str(problem): problem for problem in self.items}.values())
