"""How far to trust what is said of a load: published runs under load over predictions, by latency, tails apart.

A run under load is further off than a fixed batch: its scheduler, its harness and what its cache held play a part too.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.cost import Band, Conditions, band_of, joined

TAIL = "tail"
_TAILS = ("p90", "p95", "p99")


_FIRST, _NEXT, _FULL = "load.ttft_seconds", "load.tpot_seconds", "load.requests_per_second"
HEADLINES = {"ttft": (_FIRST,), "tpot": (_NEXT,), "itl": (_NEXT,), "e2e": (_FIRST, _NEXT), "capacity": (_FULL,)}
"""Headlines whose bands a latency has, and what is carried: of requests or tokens a second of runs that are full, whose
band is that of their seconds, as residuals of rates are."""


def parts_of(metric: str, quantile: str, latencies: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the headlines whose bands a percentile has, with the share of each; "capacity" is what is carried.

    Gaps between tokens have that of their mean. A whole request waits for its first token, then for the others: runs
    that published both are within what the two say in 9 of 10 cases, and theirs is a third as wide as what whole
    requests of four sources say for themselves.

    >>> parts_of("e2e", "p99", {"ttft": {"p99": 0.5}, "e2e": {"p99": 2.0}})
    {'load.ttft_seconds': 0.25, 'load.tpot_seconds': 0.75}
    """
    if metric != "e2e":
        return dict.fromkeys(HEADLINES[metric], 1.0)
    whole = latencies["e2e"][quantile]
    first = latencies["ttft"][quantile] / whole if whole else 0.0
    return {_FIRST: first, _NEXT: 1.0 - first}


def band_of_parts(parts: Mapping[str, float], known: Conditions) -> Band:
    """Return the band of a sum of headlines, each with its share, for a run; of what is carried that of a rate.

    >>> run = Conditions(stack="vllm", family="hopper", words=("near capacity",))
    >>> carried = band_of_parts({_FULL: 1.0}, run)
    >>> carried.low == 1 / band_of(_FULL, run).high
    True
    """
    band = joined([(share, band_of(headline, known)) for headline, share in parts.items()])
    return band.of_rate if _FULL in parts else band


def with_tail(known: Conditions, quantile: str) -> Conditions:
    """Return the conditions of a percentile of a latency: tails are further off than means and medians."""
    return known.also(TAIL) if quantile in _TAILS else known


def around(band: Band, value: float) -> dict[str, float]:
    """Return low, typical and high of a prediction.

    >>> around(Band(low=0.5, typical=1.0, high=2.0, rows=3, source=""), 4.0)
    {'low': 2.0, 'typical': 4.0, 'high': 8.0}
    """
    return {"low": value * band.low, "typical": value * band.typical, "high": value * band.high}
