"""How far to trust what is said of a load: published runs under load over predictions, by latency, tails apart.

A run under load is further off than a fixed batch: its scheduler, its harness and what its cache held play a part too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.cost import Band, Conditions

if TYPE_CHECKING:
    from shardwise.plans import Limit
    from shardwise.serving.load._report import ServeReport

CAPACITY = "load.requests_per_second"
"""The headline of what is carried: requests or tokens a second of runs that are full."""
TAIL = "tail"
_TAILS = ("p90", "p95", "p99")
# Loads over the capacity of the closed form beyond which latencies follow how requests happen to come.
_NEAR = 0.85


def headline_of(metric: str) -> str:
    """Return the headline whose band a latency has; gaps between tokens have that of their mean.

    >>> headline_of("ttft"), headline_of("itl")
    ('load.ttft_seconds', 'load.tpot_seconds')
    """
    return f"load.{'tpot' if metric == 'itl' else metric}_seconds"


def with_tail(known: Conditions, quantile: str) -> Conditions:
    """Return the conditions of a percentile of a latency: tails are further off than means and medians."""
    return replace(known, words=(*known.words, TAIL)) if quantile in _TAILS else known


def conditions_of(report: ServeReport, quantile: str = "") -> Conditions:
    """Return what decides how far published runs under a load like this were off, in a percentile."""
    arrivals, base = report.workload.arrivals, report.base.conditions
    said = {
        "two pools": report.prefill is not None,
        "attention groups": report.groups > 1,
        "closed loop": arrivals.kind == "closed",
        "near capacity": arrivals.kind == "burst" or bool(report.steady.utilisation > _NEAR),
    }
    return with_tail(replace(base, words=(*base.words, *(word for word, holds in said.items() if holds))), quantile)


def around(band: Band, value: float) -> dict[str, float]:
    """Return low, typical and high of a prediction.

    >>> around(Band(low=0.5, typical=1.0, high=2.0, rows=3, source=""), 4.0)
    {'low': 2.0, 'typical': 4.0, 'high': 8.0}
    """
    return {"low": value * band.low, "typical": value * band.typical, "high": value * band.high}


def interval_of(report: ServeReport) -> dict[str, dict[str, dict[str, float]]]:
    """Return low, typical and high of every percentile in seconds, and of what is carried in requests a second."""
    found = {
        metric: {
            f"{name}_seconds": around(report.band(headline_of(metric), name), seconds)
            for name, seconds in values.items()
        }
        for metric, values in report.latencies.items()
        if metric != "queue"
    }
    return {**found, "capacity": {"requests_per_second": around(report.band(CAPACITY), report.capacity_per_second)}}


def chance_of(report: ServeReport, limit: Limit) -> float:
    """Return the chance that a limit is kept, by how far published runs were from predictions."""
    value = report.value(limit)
    if not value or not math.isfinite(value):
        return float(value == 0)
    return report.band(headline_of(limit.metric), limit.quantile).chance(limit.seconds / value)


def chance_to_meet(report: ServeReport) -> float:
    """Return the chance that the model fits, the load is carried and every limit is kept.

    Of limits on one latency the least likely counts. Memory, load and latencies are taken as independent, so where
    their errors go together the chance is higher.
    """
    if not report.fits or not report.stable:
        return 0.0
    chances = [report.base.chance_to_fit]
    if report.open_loop:
        carried = report.workload.arrivals.rate / report.capacity_per_second
        chances.append(1.0 - report.band(CAPACITY).chance(carried))
    by_metric: dict[str, float] = {}
    for limit in report.options.limits:
        by_metric[limit.metric] = min(by_metric.get(limit.metric, 1.0), chance_of(report, limit))
    return math.prod((*chances, *by_metric.values()))
