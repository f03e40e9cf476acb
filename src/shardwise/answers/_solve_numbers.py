"""Where a yes turns into a no: the end of whole numbers, of real ones of so many digits, of numbers of devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias, cast

from shardwise.records import dataclass, replace

Keeps: TypeAlias = "Callable[[float], bool]"
Alone: TypeAlias = "Callable[[float], Keeps]"
"""What a search found at a value, asked at others: whether that one plan keeps the verdict, with no search."""
LOW, HIGH = 1e-4, 1e18
"""The least and the most of real numbers that are tried."""
MOST_WHOLE = 2**30
# After so many plans, each of which keeps a little more than the one before, the end is sought without them.
_PLANS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """Places with the value of each: which keep the verdict up to an end, towards `way`, within `low` and `high`."""

    keeps: Keeps
    value: Callable[[int], float]
    low: int
    high: int
    way: int
    alone: Alone | None = None

    def at(self, place: int) -> bool:
        """Return whether a place keeps the verdict."""
        return self.keeps(self.value(place))

    def clamped(self, place: int) -> int:
        """Return the place that is nearest of those that may be."""
        return min(max(place, self.low), self.high)

    def last(self, near: int, stride: int) -> int | None:
        """Return the last place that keeps the verdict, sought around one: by strides that double, then by halves."""
        good, bad, wide = near, cast("int | None", None), stride
        while not self.at(good):
            good, bad, wide = self.clamped(good - self.way * wide), good, 2 * wide
            if good == bad:
                return None
        if self.alone is not None:
            good, bad = self._by_plans(self.alone, good, bad)
        wide = stride
        while bad is None:
            far = self.clamped(good + self.way * wide)
            if far == good:
                return good
            good, bad, wide = (far, None, 2 * wide) if self.at(far) else (good, far, wide)
        while abs(good - bad) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.at(middle) else (good, middle)
        return good

    def _by_plans(self, alone: Alone, good: int, bad: int | None) -> tuple[int, int | None]:
        """Return the last place that is known to keep the verdict, and one beyond that does not, if there is one.

        How far the plan of a place keeps it is cheap to ask: others are searched there, and one farther at last.
        """
        for _ in range(_PLANS):
            own = replace(self, keeps=alone(self.value(good)), alone=None)
            end = self.clamped(good + self.way * (self.high - self.low)) if bad is None else bad - self.way
            within = replace(own, low=min(good, end), high=max(good, end))
            guess = within.last(good, 1) or good
            if guess == good:
                guess = self.clamped(good + self.way)
                if guess in (good, bad):
                    return good, bad
            if not self.at(guess):
                return good, guess
            good = guess
        return good, bad


def largest(at: Keeps, step: int, but: Keeps | None = None) -> float | None:
    """Return the largest multiple of a step that keeps the verdict.

    Where the first does not, `but` is the verdict without what more may help: its last is then the one, or else one
    of the doublings up to it leads there.

    >>> largest(lambda value: value <= 1000, 8)
    1000
    >>> largest(lambda value: 40 <= value <= 1000, 8)
    >>> [largest(lambda value: 40 <= value <= most, 8, lambda value: value <= 1000) for most in (1000, 100, 30)]
    [1000, 96, None]
    """
    most = MOST_WHOLE // step
    line = _Line(keeps=at, value=lambda place: place * step, low=1, high=most, way=1)
    value = line.last(1, 1)
    if value is None and but is not None:
        end = replace(line, keeps=but).last(1, 1)
        value = end if end is None or line.at(end) else _doubled(line, end)
    return None if value is None else value * step


def _doubled(line: _Line, end: int) -> int | None:
    """Return the last place that keeps the verdict beyond the first of the doublings that does, None without one."""
    near = next((place for place in (2**i for i in range(1, end.bit_length())) if line.at(place)), None)
    return None if near is None else line.last(near, near)


def digit(index: int, digits: int) -> float:
    """Return the number of so many significant digits at a place of all such, 1 at 0.

    >>> [digit(i, 3) for i in (-900, -1, 0, 1, 900)]
    [0.1, 0.999, 1.0, 1.01, 10.0]
    """
    each = 9 * 10 ** (digits - 1)
    return float(f"{10 ** (digits - 1) + index % each}e{index // each - digits + 1}")


def place(value: float, digits: int) -> int:
    """Return the place of the number of so many digits that is the last up to a value.

    >>> place(1.014, 3), digit(place(3.352e12, 4), 4)
    (1, 3352000000000.0)
    """
    exponent: int = math.floor(math.log10(value) + 1e-12)
    lead: int = 10 ** (digits - 1)
    return 9 * lead * exponent + min(max(math.floor(value / 10.0**exponent * lead + 1e-6) - lead, 0), 9 * lead - 1)


def real(at: Keeps, least: bool, first: float, digits: int, alone: Alone | None = None) -> float | None:
    """Return the last of the numbers of so many digits that keeps the verdict, sought around a first one.

    >>> real(lambda value: value <= 53.219, False, 1.0, 4), real(lambda value: value >= 53.219, True, 1e9, 4)
    (53.21, 53.22)
    >>> real(lambda value: False, False, 1.0, 3)
    >>> asked = []
    >>> real(lambda value: not asked.append(value) and value <= 53.219, False, 1.0, 4, lambda _: lambda v: v <= 53.219)
    53.21
    >>> asked
    [1.0, 53.21, 53.22]
    """
    line = _Line(
        keeps=at,
        value=lambda index: digit(index, digits),
        low=place(LOW, digits),
        high=place(HIGH, digits),
        way=-1 if least else 1,
        alone=alone,
    )
    value = line.last(line.clamped(place(first, digits)), 9 * 10 ** (digits - 1) // 32)
    return None if value is None else digit(value, digits)


def fewest(at: Callable[[float], bool], node: int, most: int) -> float | None:
    """Return the fewest devices that keep the verdict: doubled until they do, then whole nodes between, by eighths.

    >>> fewest(lambda value: value >= 40, 8, 1024), fewest(lambda value: value >= 3, 8, 1024)
    (40, 4)
    """
    sizes = [2**i for i in range(int(math.log2(most)) + 1)]
    good = next((value for value in dict.fromkeys([*sizes, most]) if at(value)), None)
    if good is None or good // 2 < node:
        return good
    step = max(node, (good - good // 2) // 8 // node * node)
    return next((value for value in range(good // 2 + step, good, step) if at(value)), good)
