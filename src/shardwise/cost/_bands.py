"""How far to trust a number: the spread of published measurements over predictions, by device and framework.

Bands come from the development part of published runs, one prediction a row, with what the source leaves blank
assumed by one rule for all rows. They widen for devices without kernel measurements. See bands.toml for rows, sources
and dates.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """A 10 to 90 % interval as factors on the prediction, and how many measured rows it rests on."""

    low: float
    high: float
    rows: int
    source: str

    def around(self, value: float) -> tuple[float, float]:
        """Return the interval around a prediction.

        >>> Band(low=0.5, high=2.0, rows=3, source="").around(4.0)
        (2.0, 8.0)
        """
        return value * self.low, value * self.high


@cache
def bands() -> dict[str, dict[str, Band]]:
    """Return every band: by quantity, then by family of constants or framework, "other" for the rest."""
    text = resources.files("shardwise.cost").joinpath("bands.toml").read_text(encoding="utf-8")
    return {
        quantity: {name: Band(**row) for name, row in rows.items()} for quantity, rows in tomllib.loads(text).items()
    }


def band_of(quantity: str, *names: str) -> Band:
    """Return the band of a quantity under the first name that has one, "other" at the last.

    >>> band_of("step_seconds", "hopper").rows > 0
    True
    """
    rows = bands()[quantity]
    return next(rows[name] for name in (*names, "other") if name in rows)
