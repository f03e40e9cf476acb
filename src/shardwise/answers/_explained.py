"""A number being explained: what it opens to, and how its amounts are shown."""

from __future__ import annotations

from typing import cast

from shardwise.ledger.traced import Contribution, Traced, parts, plain
from shardwise.records import dataclass
from shardwise.units import show_bytes, show_seconds, significant

# Longer paths are typed in places.
_A_PATH = 60
# A part that counts less often than this was divided by a rate, not repeated.
A_COUNT = 1e-6


@dataclass(frozen=True, slots=True)
class ExplainedNumber:
    """A number being explained: how often it counts, its unit, and the names that lead to it.

    `places` is the same path in places from 1.
    """

    node: Traced
    unit: str
    times: float = 1.0
    path: tuple[str, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def typed(self) -> str:
        """The path as it is typed: in names, or in places where names are long."""
        names = "/".join(self.path)
        return names if len(names) <= _A_PATH else "/".join(map(str, self.places))

    @property
    def value(self) -> float:
        """The number itself, in its own unit."""
        return float(plain(self.node))


def show_value(value: float, unit: str) -> str:
    """Return a number in the unit of its headline.

    >>> show_value(0.25, "seconds"), show_value(2048, "bytes"), show_value(12.5, "")
    ('250.00 ms', '2.00 KiB', '12.5')
    """
    if unit == "seconds":
        return show_seconds(value)
    return show_bytes(value) if unit == "bytes" else significant(value, 6)


def opened(at: ExplainedNumber, part: Contribution) -> ExplainedNumber:
    """Return what a part of a number opens to."""
    # Once divided by a rate, what is below is no longer in the unit of its parent.
    node = cast(Traced, part.node)
    unit = unit_of(node.unit) or (at.unit if abs(part.times) >= A_COUNT else "")
    return ExplainedNumber(node, unit, at.times * part.times, (*at.path, part.label))


def unit_of(word: str) -> str:
    """Return a unit as headlines have it.

    >>> unit_of("s"), unit_of("tokens")
    ('seconds', 'tokens')
    """
    return {"s": "seconds", "B": "bytes"}.get(word, word)


def below_of(at: ExplainedNumber) -> list[tuple[Contribution, ExplainedNumber | None]]:
    """Return the parts of a number, each with what it opens to."""
    return [(part, opened(at, part) if part.node is not None else None) for part in parts(at.node)]
