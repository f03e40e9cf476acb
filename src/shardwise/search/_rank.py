"""The best plans by an objective, and the front of plans that none beats in time, memory and devices at once.

Both are the same whatever the order in which plans come: ties go to the plan whose fields come first.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from shardwise.search._key import Entry
from shardwise.search._mesh import Sheet


def _per_token(seconds: Any, devices: Any) -> Any:
    return seconds * devices


OBJECTIVES: dict[str, Callable[[Any, Any, Any], Any]] = {
    # Smaller is better; arguments are seconds of a step, bytes on a device and devices.
    "step": lambda seconds, held, devices: seconds,
    "throughput": lambda seconds, held, devices: _per_token(seconds, devices),
    "cost": lambda seconds, held, devices: _per_token(seconds, devices),
    "memory": lambda seconds, held, devices: held + 0 * seconds,
    "devices": lambda seconds, held, devices: devices + 0 * seconds,
    # With failures, work under limits gives seconds that include the time they lose.
    "days": lambda seconds, held, devices: seconds,
    "headroom": lambda seconds, held, devices: held + 0 * seconds,
}


@dataclass(slots=True)
class Top:
    """The best plans by an objective, at most `size` of them."""

    size: int
    objective: str
    entries: list[Entry] = field(default_factory=list)

    def add(self, sheet: Sheet) -> None:
        """Take the plans of a sheet that belong to the best."""
        values = OBJECTIVES[self.objective](sheet.step_seconds, sheet.device_bytes, sheet.devices)
        worst = self.entries[-1].value if len(self.entries) == self.size else np.inf
        index = np.flatnonzero(sheet.fits & (values <= worst))
        if not len(index):
            return
        found = tuple(v.ravel()[index] for v in (values, sheet.step_seconds, sheet.device_bytes))
        kept = np.arange(len(index))
        if len(index) > self.size:
            # Ties beyond the last place stay until their fields are compared.
            order = np.lexsort((found[2], found[1], found[0]))
            last = order[self.size - 1]
            tied = np.all([f == f[last] for f in found], axis=0)
            kept = np.union1d(order[: self.size], np.flatnonzero(tied))
        for i in kept.tolist():
            self.put(Entry(float(found[0][i]), float(found[1][i]), float(found[2][i]), sheet.key(int(index[i]))))

    def may(self, least_seconds: Any, held: Any, devices: Any) -> Any:
        """Return which plans may belong to the best, given seconds that their steps are never shorter than."""
        worst = self.entries[-1].value if len(self.entries) == self.size else np.inf
        return OBJECTIVES[self.objective](least_seconds, held, devices) <= worst

    def put(self, entry: Entry) -> None:
        """Take one plan, and drop the last where there are too many."""
        if entry not in self.entries:
            insort(self.entries, entry)
        del self.entries[self.size :]

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, entries=[*self.entries])

    def merge(self, entries: Iterable[Entry]) -> None:
        """Take the best of another part of the space."""
        for entry in entries:
            self.put(entry)


@dataclass(slots=True)
class Front:
    """Plans that no other beats in seconds, bytes and devices at once; of equal ones the first by its fields."""

    entries: dict[int, list[Entry]] = field(default_factory=dict)

    def add(self, sheet: Sheet) -> None:
        """Take the plans of a sheet that belong to the front."""
        counts = np.unique(sheet.devices).tolist()
        for n in counts:
            self._add(sheet, n, sheet.fits if len(counts) == 1 else sheet.fits & (sheet.devices == n))

    def may(self, least_seconds: Any, held: Any, devices: Any) -> Any:
        """Return which plans may belong to the front, given seconds that their steps are never shorter than."""
        found = np.zeros(np.shape(held), bool)
        for n in np.unique(devices).tolist():
            mine = sorted(self.entries.get(n, []), key=lambda e: e.device_bytes)
            # The shortest step of the plans that take no more bytes.
            shortest = np.r_[np.inf, np.minimum.accumulate([e.step_seconds for e in mine])]
            beaten_by = shortest[np.searchsorted([e.device_bytes for e in mine], held, side="right")]
            found |= (least_seconds <= beaten_by) & (devices == n)
        return found

    def _add(self, sheet: Sheet, devices: int, chosen: Any) -> None:
        mine = self.entries.setdefault(devices, [])
        seconds, held = sheet.step_seconds, sheet.device_bytes
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
            key = min(sheet.key(int(index[k])) for k in same.tolist())
            mine.append(Entry(float(own_seconds[i]), float(own_seconds[i]), float(own_held[i]), key))
        self.entries[devices] = _undominated(mine)

    def copied(self) -> Self:
        """Return what is known by now; what is taken later does not change it."""
        return replace(self, entries={devices: [*mine] for devices, mine in self.entries.items()})

    def merge(self, other: Front) -> None:
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
