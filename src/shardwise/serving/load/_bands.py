"""How far to trust what is said of a load: published runs under load over predictions, by latency, tails apart.

A run under load is further off than a fixed batch: its scheduler, its harness and what its cache held play a part too.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.cost import Band, Conditions

CAPACITY = "load.requests_per_second"
"""The headline of what is carried: requests or tokens a second of runs that are full."""
TAIL = "tail"
_TAILS = ("p90", "p95", "p99")


def headline_of(metric: str) -> str:
    """Return the headline whose band a latency has; gaps between tokens have that of their mean.

    >>> headline_of("ttft"), headline_of("itl")
    ('load.ttft_seconds', 'load.tpot_seconds')
    """
    return f"load.{'tpot' if metric == 'itl' else metric}_seconds"


def with_tail(known: Conditions, quantile: str) -> Conditions:
    """Return the conditions of a percentile of a latency: tails are further off than means and medians."""
    return replace(known, words=(*known.words, TAIL)) if quantile in _TAILS else known


def around(band: Band, value: float) -> dict[str, float]:
    """Return low, typical and high of a prediction.

    >>> around(Band(low=0.5, typical=1.0, high=2.0, rows=3, source=""), 4.0)
    {'low': 2.0, 'typical': 4.0, 'high': 8.0}
    """
    return {"low": value * band.low, "typical": value * band.typical, "high": value * band.high}
