"""The front of a search for a deployment under load: tokens a second of a device and of a user, none beaten in both."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from shardwise.records import dataclass
from shardwise.search._load_bounds import first_tokens, least
from shardwise.search._load_groups import FEW, LoadGroup, LoadSearch
from shardwise.search._result import FrontPoint
from shardwise.serving.load import even_share

# Shares of the capacity at which the front is drawn.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
# A point of the front is listed where it serves more tokens than the one before it by this factor.
_CLEARLY = 1.02


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A layout at a share of its capacity: tokens a second of a user and of a device, requests a second, seconds."""

    user: float
    each: float
    place: tuple[int, int, int]
    """Its group, share and row: of equals the first counts."""
    rate: float
    ttft: float


class _Beaten:
    """The fastest users of all that are known who make a device serve so many tokens or more."""

    def __init__(self) -> None:
        self.each: list[float] = []
        self.users: list[float] = []

    def add(self, points: list[_Point]) -> None:
        """Take in more points."""
        every = sorted([*zip(self.each, self.users, strict=True), *((one.each, one.user) for one in points)])
        self.each, self.users = [], []
        for each, user in reversed(every):
            if not self.users or user > self.users[-1]:
                self.each.append(-each)
                self.users.append(user)
        self.each = [-each for each in reversed(self.each)]
        self.users.reverse()

    def fastest(self, each: float) -> float:
        """Return the tokens a second of the fastest user beside whom a device serves so many, 0 where none is."""
        at = bisect_left(self.each, each)
        return self.users[at] if at < len(self.users) else 0.0


def front_of(search: LoadSearch) -> tuple[FrontPoint, ...]:
    """Return the points that none beats in tokens a second of a device and of a user, the fastest user first.

    Users are no faster than of an empty replica, and no faster under more load unless prompts run in steps of their
    own, or are held: then as many of them share a step. What is beaten by users that are known is not asked, nor what
    misses a limit under less load.
    """
    points: list[_Point] = []
    groups, beaten = search.groups, _Beaten()
    # The fastest that users of each layout can be.
    users = [1 / np.maximum(group.empty.tpot_seconds, 1e-9) for group in groups if group.form is not None]
    even = [even_share(group.form) for group in groups if group.form is not None]
    for number, share in enumerate(_SHARES):
        bounds = zip(users, even, strict=True)
        for index, group in enumerate(groups):
            if group.form is None:
                continue
            unbeaten = _at(search, (index, number), share, (*next(bounds), beaten))
            beaten.add(unbeaten)
            points += unbeaten
    front, most = [], 0.0
    for point in sorted(points, key=lambda one: (-one.user, -one.each, one.place)):
        if point.each > _CLEARLY * most:
            most, group = point.each, groups[point.place[0]]
            front.append(FrontPoint(
                plan=group.plans[point.place[2]], job=group.job, engine=group.engine, rate=point.rate,
                tokens_per_second_per_gpu=point.each, tokens_per_second_per_user=point.user, ttft_seconds=point.ttft,
            ))  # fmt: skip
    return tuple(front)


def _at(search: LoadSearch, place: tuple[int, int], share: float, known: tuple[Any, Any, _Beaten]) -> list[_Point]:
    """Return the layouts of a group at a share that keep the limits and may not be beaten; `known` users are noted."""
    (index, number), (users, even, beaten), group = place, known, search.groups[place[0]]
    form, many = group.form, np.array([int(plan.dp) for plan in group.plans])
    if form is None:
        raise LookupError(group)
    rate = share * form.capacity
    each = rate * many * form.moments.output_tokens / group.devices
    rows = np.flatnonzero([user >= beaten.fastest(one) for user, one in zip(users, each.tolist(), strict=True)])
    if not len(rows):
        return []
    part: LoadGroup = group.some(rows) if len(rows) < FEW * len(each) else group
    if part is group:
        rows = np.arange(len(each))
    steady = part.form.at(rate[rows]) if part.form else part.empty
    kept = np.isfinite(steady.ttft_seconds)  # some take longer than numbers hold
    # No simulation confirms a point.
    kept &= share <= even[rows]
    for limit in search.options.limits:
        kept &= least(steady, part.empty, limit) * search.margin(group.case, limit) <= limit.seconds
        if limit.metric == "tpot":  # the floor of a median is far below it under load: what a point says keeps it too
            kept &= steady.tpot_seconds <= limit.seconds
        elif limit.metric == "ttft" and not limit.of:
            kept &= first_tokens(steady, part.empty, limit.quantile, share) <= limit.seconds
    if group.policy.mixed and not group.policy.balance_steps:  # what misses a limit misses it under more load
        users[rows] = np.where(kept, 1 / np.maximum(steady.tpot_seconds, 1e-9), -np.inf)
    points = []
    for at in np.flatnonzero(kept).tolist():
        row = int(rows[at])
        points.append(_Point(
            user=1 / max(float(steady.tpot_seconds[at]), 1e-9), place=(index, number, row),
            each=float(rate[row]) * int(many[row]) * form.moments.output_tokens / float(group.devices[row]),
            rate=float(rate[row]) * int(many[row]), ttft=float(steady.ttft_seconds[at]),
        ))  # fmt: skip
    return points
