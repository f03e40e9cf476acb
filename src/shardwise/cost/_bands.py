"""How far to trust a number: the spread of published measurements over predictions, by what rows have in common.

Bands come from residuals of published runs (benchmarks/accuracy.py), one a configuration. They are wide where the
device's kernels were not measured and where fields of the runs had to be assumed. See bands.toml for rows and sources.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

# Standard deviations of a normal distribution from its median to its 90 %.
_EDGE = 1.2815515655446004


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Factors from predicted to measured: 10 %, median and 90 % of published runs, and how many rows they rest on."""

    low: float
    typical: float
    high: float
    rows: int
    source: str

    def around(self, value: float) -> tuple[float, float]:
        """Return the interval around a prediction.

        >>> Band(low=0.5, typical=1.0, high=2.0, rows=3, source="").around(4.0)
        (2.0, 8.0)
        """
        return value * self.low, value * self.high

    def at(self, chance: float) -> float:
        """Return the factor below which measured over predicted lies with a chance.

        Logarithms are normal on either side of the median, as wide as the 10 % and the 90 % say.

        >>> round(Band(low=0.5, typical=1.0, high=1.1, rows=3, source="").at(0.9), 12)
        1.1
        """
        from statistics import NormalDist

        side = self.high if chance > 0.5 else self.low
        return self.typical * math.exp(math.log(side / self.typical) * abs(NormalDist().inv_cdf(chance)) / _EDGE)

    def chance(self, factor: float) -> float:
        """Return the chance that measured over predicted lies below a factor.

        >>> round(Band(low=0.5, typical=1.0, high=1.1, rows=3, source="").chance(1.1), 12)
        0.9
        """
        side = self.high if factor > self.typical else self.low
        if side == self.typical:
            return float(factor >= self.typical)
        deviations = _EDGE * math.log(factor / self.typical) / abs(math.log(side / self.typical))
        return (1 + math.erf(deviations / math.sqrt(2))) / 2


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


def memory_band(stack: str) -> Band:
    """Return the band of the bytes of a device under a stack.

    >>> memory_band("megatron").high > 1
    True
    """
    # Attention scores are kept as exactly as the rest.
    return band_of("memory.peak_bytes", stack.removesuffix("-scores"))
