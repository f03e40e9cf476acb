"""What the closed form says of a deployment under load at least: of a limit's seconds, and of users who take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from shardwise.plans import Limit
from shardwise.serving.load import Steady

# How far a quantile of the TTFT lies above an empty replica's, over how far the mean does, at least: nothing falls by
# the closed form that a simulation would keep. Tokens and whole requests average over steps: their quantiles are near.
_TAIL = {"mean": 0.85, "p50": 0.3, "p90": 1.0, "p95": 1.2, "p99": 1.5}
_NEAR_MEAN = 0.95
# Of a closed loop, whose users come after their answers and not in bunches, less is sure of first tokens.
_CLOSED_TAIL, _CLOSED_NEAR_MEAN = 0.6, 0.9
# The same as it usually is, and over the mean of waits for a place, which few have and long: chosen after `serve` of a
# dozen deployments of three models, 2026-12-01; two of four of gpt-oss-20b, which was none of them, are over the limit
# still. Layouts are listed by it and never refused. No median is here: it follows the load (`first_tokens`).
_USUAL_TAIL = {"mean": (1.0, 1.0), "p90": (1.8, 5.0), "p95": (2.2, 8.0), "p99": (3.5, 14.0)}
SHARES = (0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, *(k / 20 for k in range(4, 20)), 0.97, 0.99)
"""Shares of the capacity between which users who take turns are looked up."""


def least(steady: Steady[Any], empty: Steady[Any], limit: Limit, closed: bool = False) -> Any:
    """Return the seconds that a limit is about, at least: what an empty replica takes, and a share of what is beyond.

    >>> one = Steady(full_seconds=0.5, carried_seconds=0.5, rate=1.0, running=1.0, ttft_seconds=0.3, tpot_seconds=0.02,
    ...     e2e_seconds=2.3, waiting_seconds=0.0)
    >>> round(float(least(one, one, Limit(metric="ttft", quantile="p99", seconds=1.0))), 3)
    0.255
    """
    name = {"itl": "tpot"}.get(limit.metric, limit.metric)
    if limit.of and name != "tpot":
        # Requests of one class may be shorter than all: the simulation decides.
        return np.zeros_like(steady.rate)
    floor, mean = (getattr(one, f"{name}_seconds") for one in (empty, steady))
    if limit.metric == "ttft":
        tail = min(_TAIL[limit.quantile], _CLOSED_TAIL) if closed else _TAIL[limit.quantile]
        with np.errstate(invalid="ignore"):  # endless seconds less endless ones
            beyond = np.maximum(mean - floor, 0.0)
        return 0.85 * floor + np.where(np.isfinite(floor), beyond, 0.0) * tail
    # Within a few percent in the closed form.
    return (_CLOSED_NEAR_MEAN if closed else _NEAR_MEAN) * (mean if limit.quantile != "p50" else floor)


def first_tokens(steady: Steady[Any], empty: Steady[Any], quantile: str, share: float) -> Any:
    """Return the seconds that a quantile of the TTFT usually takes at a share of the capacity.

    The median has no wait for a place, and of what steps that are shared take beyond an empty replica's so much as
    there are steps at work.

    >>> one = Steady(full_seconds=0.5, carried_seconds=0.5, rate=1.0, running=1.0, ttft_seconds=0.3, tpot_seconds=0.02,
    ...     e2e_seconds=2.3, waiting_seconds=0.1)
    >>> nobody = Steady(full_seconds=0.5, carried_seconds=0.5, rate=0.0, running=0.0, ttft_seconds=0.1,
    ...     tpot_seconds=0.02, e2e_seconds=2.1, waiting_seconds=0.0)
    >>> [round(float(first_tokens(one, nobody, quantile, 0.5)), 2) for quantile in ("mean", "p50", "p99")]
    [0.3, 0.15, 1.85]
    """
    of_steps, of_waits = _USUAL_TAIL.get(quantile, (share, 0.0))
    with np.errstate(invalid="ignore"):  # endless seconds less endless ones
        beyond = np.maximum(steady.ttft_seconds - steady.waiting_seconds - empty.ttft_seconds, 0.0)
        return empty.ttft_seconds + of_steps * beyond + of_waits * steady.waiting_seconds


def rows_of(steady: Steady[Any], rows: Any) -> Steady[Any]:
    """Return the means of some layouts."""
    return Steady(**{f.name: np.asarray(getattr(steady, f.name))[..., rows] for f in fields(Steady)})


def with_rows(steady: Steady[Any], rows: Any, some: Steady[Any]) -> Steady[Any]:
    """Return means of which those of some layouts are others."""
    values = {f.name: np.array(getattr(steady, f.name)) for f in fields(Steady)}
    for name, value in values.items():
        value[rows] = getattr(some, name)
    return Steady(**values)


def stacked(every: Sequence[Steady[Any]]) -> Steady[Any]:
    """Return means at several rates as one, a row for each rate."""
    return Steady(**{f.name: np.stack([getattr(one, f.name) for one in every]) for f in fields(Steady)})


def with_users(shares: Steady[Any], users: Any, think_seconds: float) -> Steady[Any]:
    """Return the means of a replica of each layout whose so many users ask again when they have thought.

    A user's turn is a request and the time to think, so that rate x turn = users (Little); `shares` has a row for each
    rate, between which means are taken as lines. Where more users come than a replica takes at once they wait for
    each other: the rate is the most that is carried then. Nobody else waits for a place in a closed loop.

    >>> rates = [(0.5, 1.0), (1.0, 1.5), (2.0, 4.0)]
    >>> shares = stacked([Steady(**{f.name: np.array([0.1]) for f in fields(Steady)} | {"rate": np.array([rate]),
    ...     "e2e_seconds": np.array([e2e]), "waiting_seconds": np.array([0.0])}) for rate, e2e in rates])
    >>> at = [with_users(shares, np.array([users]), 1.0) for users in (1.0, 2.5, 20.0)]
    >>> [(float(one.rate[0]), float(one.e2e_seconds[0])) for one in at]
    [(0.5, 1.0), (1.0, 1.5), (2.0, 9.0)]
    """
    unplaced = {f.name: getattr(shares, f.name) for f in fields(Steady)}
    for name in ("ttft_seconds", "e2e_seconds"):
        unplaced[name] = unplaced[name] - shares.waiting_seconds
    unplaced["waiting_seconds"] = np.zeros_like(shares.waiting_seconds)
    turn = unplaced["e2e_seconds"] + think_seconds
    known, layouts = shares.rate * turn, np.arange(shares.rate.shape[1])
    users = np.broadcast_to(np.asarray(users, float), layouts.shape)
    low = np.clip((known <= users).sum(axis=0) - 1, 0, len(known) - 2)
    below, above = known[low, layouts], known[low + 1, layouts]
    part = np.clip((users - below) / np.maximum(above - below, 1e-12), 0.0, 1.0)
    values = {
        name: np.where(part > 0, (1 - part) * rows[low, layouts] + part * rows[low + 1, layouts], rows[low, layouts])
        for name, rows in unplaced.items()
    }
    more = np.maximum(users / values["rate"] - values["e2e_seconds"] - think_seconds, 0.0)
    waits = np.where(users > known[-1], more, 0.0)
    for name in ("ttft_seconds", "e2e_seconds", "waiting_seconds"):
        values[name] = values[name] + waits
    return Steady(**values)
