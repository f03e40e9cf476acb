"""A deployment under load as plain values, with the changes that would keep the limits that it misses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.search import LoadRemedy
    from shardwise.serving.load import ServeReport


def remedies_of(report: ServeReport) -> tuple[LoadRemedy, ...]:
    """Return the changes that would keep limits that are missed, none where there is no room for the model."""
    if report.meets or not report.fits:
        return ()
    from shardwise.search import load_remedies

    return load_remedies(report)


def load_values(report: ServeReport) -> dict[str, Any]:
    """Return a deployment under load as plain values, with what would keep the limits that it misses."""
    return {**report.own_values(), "remedies": [remedy_tree(one) for one in remedies_of(report)]}


def remedy_tree(one: LoadRemedy) -> dict[str, Any]:
    """Return a change as plain values: null seconds where the queue still grows."""
    seconds = one.seconds if math.isfinite(one.seconds) else None
    return {
        "field": one.field, "value": one.value, "dp": one.report.base.plan.dp,
        "metric": one.limit.metric, "quantile": one.limit.quantile, "seconds": seconds,
        "meets": one.report.meets, "devices": one.report.devices,
        "capacity": {"requests_per_second": one.report.capacity_per_second},
    }  # fmt: skip
