"""How far to trust a number: the spread of published measurements over predictions, by what rows have in common.

Bands come from residuals of published runs (benchmarks/accuracy.py), one a configuration. They are wide where the
device's kernels were not measured and where fields of the runs had to be assumed. See bands.toml for rows and sources.
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
    """Return every band: by quantity, then by the names of `band_names`, "other" for the rest."""
    text = resources.files("shardwise.cost").joinpath("bands.toml").read_text(encoding="utf-8")
    return {
        quantity: {name: Band(**row) for name, row in rows.items()} for quantity, rows in tomllib.loads(text).items()
    }


def band_names(family: str, experts: bool, assumed: bool) -> tuple[str, ...]:
    """Return the names of bands of a training run, the nearest first: device family, kind of model, what was assumed.

    >>> band_names("hopper", experts=True, assumed=False)
    ('hopper.experts', 'other.experts', 'other.experts.assumed')
    """
    kind = ".experts" if experts else ""
    whole = (f"{family}{kind}", f"other{kind}")
    wide = tuple(f"{name}.assumed" for name in whole)
    return wide if assumed else (*whole, f"other{kind}.assumed")


def band_of(quantity: str, *names: str) -> Band:
    """Return the band of a quantity under the first name that has one, "other" at the last.

    >>> band_of("step_seconds", "hopper").rows > 0
    True
    """
    rows = bands()[quantity]
    return next(rows[name] for name in (*names, "other") if name in rows)
