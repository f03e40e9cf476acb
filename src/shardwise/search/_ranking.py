"""The best plans by an objective, and the front of plans that none beats in time, memory and devices at once.

Both are the same whatever the order in which plans come: ties go to the plan whose fields come first.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import field, replace
from typing import Any, Self

import numpy as np

from shardwise.records import dataclass
from shardwise.search._batch import Degrees, Entry, PlanBatch, degrees_of
from shardwise.search._columns import distinct
from shardwise.search._options import OBJECTIVES

# Plans of one set of degrees that are kept: the best, and those that say how far its row ranges.
_ALIKE = 5


@dataclass(slots=True)
class TopN:
    """The best plans of the best sets of degrees by an objective: at most `size` sets, a few plans of each."""

    size: int
    objective: str
    sets: dict[Degrees, list[Entry]] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        """The best plan of each set of degrees, the best first."""
        return sorted(alike[0] for alike in self.sets.values())

    @property
    def worst(self) -> float:
        """The value from which on a plan of other degrees is not among the best."""
        return self.entries[-1].value if len(self.sets) == self.size else math.inf

    def like(self, degrees: Degrees) -> list[Entry]:
        """Return the best plans of a set of degrees, none behind the last of the other sets."""
        return [e for e in self.sets.get(degrees, ()) if e.value <= self.worst]

    def _bounds(self, batch: PlanBatch) -> Any:
        """Return for every plan of a batch the value above which it is not wanted."""
        bounds = np.full(len(batch.degrees), self.worst)
        for degrees, alike in self.sets.items():
            group = batch.degrees.get(degrees)
            if group is not None and len(alike) >= _ALIKE:
                bounds[group] = min(bounds[group], alike[_ALIKE - 1].value)
        return bounds[batch.group]

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
        group, *found = (v.ravel()[index] for v in columns)
        order = np.lexsort((found[2], found[1], found[0], group))
        for i in order[_leading(group[order], [f[order] for f in found], self.size)].tolist():
            self.put(Entry(float(found[0][i]), float(found[1][i]), float(found[2][i]), batch.key(int(index[i]))))

    def put(self, entry: Entry) -> None:
        """Take one plan, and drop the last where there are too many."""
        degrees = degrees_of(entry.key)
        alike = self.sets.setdefault(degrees, [])
        if entry not in alike:
            insort(alike, entry)
            del alike[_ALIKE:]
        if len(self.sets) > self.size:
            del self.sets[max(self.sets, key=lambda one: self.sets[one][0])]

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, sets={degrees: [*alike] for degrees, alike in self.sets.items()})

    def merge(self, other: TopN) -> None:
        """Take the best of another part of the space."""
        for alike in other.sets.values():
            for entry in alike:
                self.put(entry)


def _leading(group: Any, found: Sequence[Any], size: int) -> Any:
    """Return which of sorted plans are the few best of the best groups; ties stay until their fields are compared."""
    start = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    best = found[0][start]
    kept = start[best <= np.partition(best, size - 1)[size - 1]] if len(best) > size else start
    ends = np.r_[start[1:], len(group)][np.searchsorted(start, kept)]
    chosen = []
    for low, high in zip(kept.tolist(), ends.tolist(), strict=True):
        last = low + _ALIKE - 1
        if high > last + 1:
            tied = np.all([f[last + 1 : high] == f[last] for f in found], axis=0)
            high = last + 1 + (int(np.argmin(tied)) if not tied.all() else len(tied))
        chosen.append(np.arange(low, high))
    return np.concatenate(chosen)


@dataclass(slots=True)
class ParetoFront:
    """Plans that no other beats in seconds, bytes and devices at once; of equal ones the first by its fields."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)

    def add(self, batch: PlanBatch) -> None:
        """Take the plans of a batch that belong to the front."""
        counts = distinct(batch.devices).tolist()
        for n in counts:
            self._add(batch, n, batch.fits if len(counts) == 1 else batch.fits & (batch.devices == n))

    def may(self, batch: PlanBatch) -> Any:
        """Return which plans may belong to the front, given seconds that their steps are never shorter than."""
        least_seconds, held, devices = batch.step_seconds, batch.device_bytes, batch.devices
        found = np.zeros(np.shape(held), bool)
        for n in distinct(devices).tolist():
            mine = sorted(self.entries.get(n, []), key=lambda e: e.device_bytes)
            # The shortest step of the plans that take no more bytes.
            shortest = np.r_[np.inf, np.minimum.accumulate([e.step_seconds for e in mine])]
            beaten_by = shortest[np.searchsorted([e.device_bytes for e in mine], held, side="right")]
            found |= (least_seconds <= beaten_by) & (devices == n)
        return found

    def _add(self, batch: PlanBatch, devices: int, chosen: Any) -> None:
        mine = self.entries.setdefault(devices, [])
        seconds, held = batch.step_seconds, batch.device_bytes
        # A few points of the front settle nearly all plans.
        for point in mine[:: max(1, len(mine) // 6)]:
            chosen = chosen & ((seconds <= point.step_seconds) | (held < point.device_bytes))
        index = np.flatnonzero(chosen)
        if not len(index):
            return
        own_seconds, own_held = seconds.ravel()[index], held.ravel()[index]
        order = np.lexsort((own_held, own_seconds))
        lowest = np.minimum.accumulate(own_held[order])
        ahead = np.r_[np.inf, lowest[:-1]]
        # Equal plans stay until their fields are compared.
        for i in order[own_held[order] < ahead].tolist():
            same = np.flatnonzero((own_seconds == own_seconds[i]) & (own_held == own_held[i]))
            key = min(batch.key(int(index[k])) for k in same.tolist())
            mine.append(Entry(float(own_seconds[i]), float(own_seconds[i]), float(own_held[i]), key))
        self.entries[devices] = _undominated(mine)

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, entries={devices: [*mine] for devices, mine in self.entries.items()})

    def merge(self, other: ParetoFront) -> None:
        """Take the front of another part of the space."""
        for devices, entries in other.entries.items():
            self.entries[devices] = _undominated([*self.entries.get(devices, ()), *entries])

    def plans(self) -> list[Entry]:
        """Return the front by devices, then by seconds."""
        found: list[Entry] = []
        for devices in sorted(self.entries):
            for entry in self.entries[devices]:
                beaten = any(
                    e.step_seconds <= entry.step_seconds and e.device_bytes <= entry.device_bytes for e in found
                )
                found += [] if beaten else [entry]
        return found


def _undominated(entries: list[Entry]) -> list[Entry]:
    found: list[Entry] = []
    for entry in sorted(entries):
        # An entry seen twice is one: it does not have fewer bytes than itself.
        if not found or entry.device_bytes < found[-1].device_bytes:
            found.append(entry)
    return found
