"""The best plans by an objective, and the front of plans that none beats in time, memory and devices at once.

Both are the same whatever the order in which plans come: ties go to the plan whose fields come first.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Self

import numpy as np

from shardwise.errors import Problem
from shardwise.records import dataclass, replace
from shardwise.search._batch import DegreesKey, PlanBatch, RankedPlan, degrees_of
from shardwise.search._columns import distinct, tied
from shardwise.search._options import OBJECTIVES
from shardwise.search._result import PlanCounts

# Plans of one set of degrees that are kept: the best, and those that say how far its row ranges.
_ALIKE = 5
# Sets of degrees are kept so many ties behind the best: what is told apart from it is seen, and what ties with that.
_TIES = 2


@dataclass(slots=True)
class TopN:
    """The best plans of sets of degrees by an objective: of the `size` best sets, and of those near to them.

    Values whose ratio is up to `tie` do not tell which plan is the better one. `last` is the value of the last of the
    best sets, `worst` the value from which on a plan of other degrees is not wanted; both shrink as plans come.
    """

    size: int
    objective: str
    tie: float = 1.0
    sets: dict[DegreesKey, list[RankedPlan]] = field(default_factory=dict)
    last: float = math.inf
    worst: float = math.inf
    bounds: tuple[Mapping[DegreesKey, int], Any] | None = field(default=None, repr=False, compare=False)
    """Sets of degrees of batches, and for each the value above which its plans are not wanted by now."""

    @property
    def ranked(self) -> list[RankedPlan]:
        """The best plan of each set of degrees that is kept, the best first."""
        return sorted(alike[0] for alike in self.sets.values())

    @property
    def entries(self) -> list[RankedPlan]:
        """The best plan of each of the best sets of degrees, the best first."""
        return self.ranked[: self.size]

    def groups(self) -> list[list[RankedPlan]]:
        """Return the sets of degrees in groups of ties, at most `size`: each tie with the first of its group.

        The next group begins with the best plan that does not. Groups are whole: of further sets some are not kept.
        """
        ranked, last = self.ranked, self.worst / self.tie
        ranges = tied([entry.value for entry in ranked], self.tie)[: self.size]
        return [ranked[start:end] for start, end in ranges if ranked[start].value <= last]

    def like(self, degrees: DegreesKey) -> list[RankedPlan]:
        """Return the best plans of a set of degrees, none behind the last of the best sets."""
        return [e for e in self.sets.get(degrees, ()) if e.value <= self.last]

    def _bounds(self, batch: PlanBatch) -> Any:
        """Return for every plan of a batch the value above which it is not wanted.

        Of a set that is known the best is wanted, and a few more that are not behind the last of the best sets.
        """
        if self.bounds is None or self.bounds[0] is not batch.degrees:
            self.bounds = batch.degrees, np.full(len(batch.degrees), self.worst)
            self._bound(self.sets)
        return self.bounds[1][batch.group]

    def _bound(self, some: Iterable[DegreesKey]) -> None:
        """Say above which value plans of some sets are not wanted."""
        if self.bounds is None:
            return
        groups, bounds = self.bounds
        for degrees in some:
            group, alike = groups.get(degrees), self.sets.get(degrees)
            if group is not None and alike is not None:
                few = self.last if len(alike) < _ALIKE else min(alike[-1].value, self.last)
                bounds[group] = max(alike[0].value, few)

    def may(self, batch: PlanBatch) -> Any:
        """Return which plans may belong to the best, given seconds that their steps are never shorter than."""
        values = OBJECTIVES[self.objective](batch.step_seconds, batch.device_bytes, batch.devices)
        return values <= self._bounds(batch)

    def add(self, batch: PlanBatch) -> None:
        """Take the plans of a batch that belong to the best."""
        values = OBJECTIVES[self.objective](batch.step_seconds, batch.device_bytes, batch.devices)
        index = np.flatnonzero(batch.fits & (values <= self._bounds(batch)))
        if not len(index):
            return
        columns = np.broadcast_arrays(batch.group, values, batch.step_seconds, batch.device_bytes)
        group, *chosen = (v.ravel()[index] for v in columns)
        order = np.lexsort((chosen[2], chosen[1], chosen[0], group))
        ahead = order[_leading(group[order], [f[order] for f in chosen], self._reach)]
        leading = zip(*(f[ahead].tolist() for f in chosen), batch.key.many(index[ahead]), strict=True)
        self._take(RankedPlan(*one) for one in leading)

    def _take(self, entries: Iterable[RankedPlan]) -> None:
        """Put plans to their sets, and drop the sets that are not wanted."""
        changed = set[DegreesKey]()
        for entry in entries:
            degrees = degrees_of(entry.key)
            if degrees not in self.sets and entry.value > self.worst:
                continue
            alike = self.sets.setdefault(degrees, [])
            place = bisect_left(alike, entry)
            if place < _ALIKE and alike[place : place + 1] != [entry]:
                alike.insert(place, entry)
                del alike[_ALIKE:]
                changed.add(degrees)
        reach = self._reach(sorted(alike[0].value for alike in self.sets.values()))
        if reach != (self.last, self.worst):
            (self.last, self.worst), self.bounds = reach, None
            self.sets = {d: alike for d, alike in self.sets.items() if alike[0].value <= self.worst}
        if self.tie == 1 and len(self.sets) > self.size:
            self.sets = dict(sorted(self.sets.items(), key=lambda one: one[1][0])[: self.size])
            self.bounds = None
        self._bound(changed)

    def _reach(self, values: Sequence[float]) -> tuple[float, float]:
        """Return the last value of the best sets and that up to which sets are wanted, given the best of some sets."""
        if len(values) < self.size:
            return math.inf, math.inf
        last = float(values[self.size - 1])
        return last, last if self.tie == 1 else max(last, float(values[0]) * self.tie**_TIES) * self.tie

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, sets={degrees: [*alike] for degrees, alike in self.sets.items()}, bounds=None)

    def merge(self, other: TopN) -> None:
        """Take the best of another part of the space."""
        self._take(entry for alike in other.sets.values() for entry in alike)


def _leading(group: Any, keys: Sequence[Any], reach: Callable[[Any], tuple[float, float]]) -> Any:
    """Return which of sorted plans are the few best of sets that are wanted; equal ones stay until fields decide."""
    start = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    best = keys[0][start]
    among, worst = reach(np.sort(best))
    kept = start[best <= worst]
    ends = np.r_[start[1:], len(group)][np.searchsorted(start, kept)]
    # Of sets behind the best ones no more than the best plan is ever asked for.
    most = np.where(keys[0][kept] <= among, _ALIKE, 1)
    chosen = []
    for low, high, few in zip(kept.tolist(), ends.tolist(), most.tolist(), strict=True):
        last = low + few - 1
        if high > last + 1:
            equal = np.all([f[last + 1 : high] == f[last] for f in keys], axis=0)
            high = last + 1 + (int(np.argmin(equal)) if not equal.all() else len(equal))
        chosen.append(np.arange(low, high))
    return np.concatenate(chosen)


@dataclass(slots=True)
class ParetoFront:
    """Plans that no other beats in seconds, bytes and devices at once; of equal ones the first by its fields."""

    entries: dict[int, list[RankedPlan]] = field(default_factory=dict)

    def add(self, batch: PlanBatch) -> None:
        """Take the plans of a batch that belong to the front."""
        counts = _counts(batch.devices)
        for n in counts:
            self._add(batch, n, batch.fits if len(counts) == 1 else batch.fits & (batch.devices == n))

    def may(self, batch: PlanBatch) -> Any:
        """Return which plans may belong to the front, given seconds that their steps are never shorter than."""
        device_bytes, devices = batch.device_bytes, batch.devices
        counts = _counts(devices)
        if len(counts) == 1:
            return self._ahead(batch, counts[0], np.ones(np.shape(device_bytes), bool))
        mask = np.zeros(np.shape(device_bytes), bool)
        for n in counts:
            mask |= self._ahead(batch, n, np.broadcast_to(devices == n, np.shape(device_bytes)))
        return mask

    def _ahead(self, batch: PlanBatch, devices: int, chosen: Any) -> Any:
        """Return which of the chosen plans no entry of so many devices beats."""
        mine, seconds, entries_of = self.entries.get(devices, []), batch.step_seconds, batch.device_bytes
        chosen = _beyond(mine, seconds, entries_of, chosen)
        index = np.flatnonzero(chosen)
        if not mine or not len(index):
            return chosen
        mine = sorted(mine, key=lambda e: e.device_bytes)
        # The shortest step of the plans that take no more bytes.
        shortest = np.r_[np.inf, np.minimum.accumulate([e.step_seconds for e in mine])]
        own_seconds, own_held = (np.broadcast_to(v, chosen.shape).ravel()[index] for v in (seconds, entries_of))
        beaten_by = shortest[np.searchsorted([e.device_bytes for e in mine], own_held, side="right")]
        mask = np.zeros(chosen.shape, bool)
        mask.ravel()[index[own_seconds <= beaten_by]] = True
        return mask

    def _add(self, batch: PlanBatch, devices: int, chosen: Any) -> None:
        mine = self.entries.setdefault(devices, [])
        seconds, device_bytes = batch.step_seconds, batch.device_bytes
        index = np.flatnonzero(_beyond(mine, seconds, device_bytes, chosen))
        if not len(index):
            return
        own_seconds, own_held = seconds.ravel()[index], device_bytes.ravel()[index]
        order = np.lexsort((own_held, own_seconds))
        lowest = np.minimum.accumulate(own_held[order])
        ahead = np.r_[np.inf, lowest[:-1]]
        # Equal plans stay until their fields are compared.
        for i in order[own_held[order] < ahead].tolist():
            same = np.flatnonzero((own_seconds == own_seconds[i]) & (own_held == own_held[i]))
            key = min(batch.key(int(index[k])) for k in same.tolist())
            mine.append(RankedPlan(float(own_seconds[i]), float(own_seconds[i]), float(own_held[i]), key))
        self.entries[devices] = _undominated(mine)

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, entries={devices: [*mine] for devices, mine in self.entries.items()})

    def merge(self, other: ParetoFront) -> None:
        """Take the front of another part of the space."""
        for devices, entries in other.entries.items():
            self.entries[devices] = _undominated([*self.entries.get(devices, ()), *entries])

    def plans(self) -> list[RankedPlan]:
        """Return the front by devices, then by seconds."""
        plans_of: list[RankedPlan] = []
        for devices in sorted(self.entries):
            for entry in self.entries[devices]:
                beaten = any(
                    e.step_seconds <= entry.step_seconds and e.device_bytes <= entry.device_bytes for e in plans_of
                )
                plans_of += [] if beaten else [entry]
        return plans_of


@dataclass(frozen=True, slots=True)
class WantedPlans:
    """Says which plans may belong to the best or to the front; `weight` makes seconds comparable to other grids'."""

    top: TopN
    front: ParetoFront
    weight: float = 1.0

    @property
    def all(self) -> bool:
        """Whether nothing is known by now, so that every plan may."""
        return not (self.top.sets or self.front.entries)

    def may(self, batch: PlanBatch) -> Any:
        """Return which plans may, given seconds that their steps are never shorter than."""
        if self.weight != 1:
            batch = replace(batch, step_seconds=batch.step_seconds * self.weight)
        return self.top.may(batch) | self.front.may(batch)


def _counts(devices: Any) -> list[int]:
    """Return the counts of devices of a batch; nearly all have one."""
    first = np.ravel(devices)[:1]
    counts: list[int] = (first if (devices == first).all() else distinct(devices)).tolist()
    return counts


def _beyond(front: Sequence[RankedPlan], seconds: Any, device_bytes: Any, chosen: Any) -> Any:
    """Return the chosen plans that a few points of a front do not beat: these settle nearly all."""
    for point in front[:: max(1, len(front) // 6)]:
        chosen = chosen & ((seconds <= point.step_seconds) | (device_bytes < point.device_bytes))
    return chosen


def _undominated(entries: list[RankedPlan]) -> list[RankedPlan]:
    plans_of: list[RankedPlan] = []
    for entry in sorted(entries):
        # An entry seen twice is one: it does not have fewer bytes than itself.
        if not plans_of or entry.device_bytes < plans_of[-1].device_bytes:
            plans_of.append(entry)
    return plans_of


@dataclass(slots=True)
class PartialResult:
    """What became of the plans of some parts of a space; `nearest` is short of memory, `closest` misses a limit."""

    top: TopN
    front: ParetoFront
    counts: PlanCounts = field(default_factory=PlanCounts)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Problem] = field(default_factory=dict)
    nearest: RankedPlan | None = None
    closest: RankedPlan | None = None
    parts: int = 0

    @property
    def known(self) -> tuple[TopN, ParetoFront]:
        """The best plans and the front of the parts."""
        return self.top, self.front

    def merge(self, other: PartialResult) -> None:
        """Take in what became of the plans of other parts."""
        self.top.merge(other.top)
        self.front.merge(other.front)
        for name in ("legal", "fitting", "evaluated", "too_large"):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.rejected += other.rejected
        for name, problem in sorted(other.examples.items()):
            kept = self.examples.get(name, problem)
            self.examples[name] = min(kept, problem, key=str)
        self.nearest = least(self.nearest, other.nearest)
        self.closest = least(self.closest, other.closest)
        self.parts += other.parts


def least(one: RankedPlan | None, other: RankedPlan | None) -> RankedPlan | None:
    return min(one, other) if one is not None and other is not None else one or other
