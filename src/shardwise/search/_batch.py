"""Evaluated plans: a batch of them, one in a ranking, and a plan as a key of whole numbers, which breaks ties."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from shardwise.plans import AXES, DEGREES, Plan
from shardwise.records import dataclass, replace
from shardwise.search._blocks import BlockKeys
from shardwise.search._columns import Columns, runs
from shardwise.search._constraints import staged
from shardwise.search._grid import PlanGrid
from shardwise.search._placements import ShapeColumns
from shardwise.search._program import SPLIT, ProgramShape
from shardwise.training import TrainingCase

# Fields in the order in which they break ties; words count by their place in the space.
PlanKey: TypeAlias = tuple[int, ...]
# Choice of cluster and job, devices, degrees: plans that share them differ in how they run, and are one row.
DegreesKey: TypeAlias = tuple[int, ...]
KEYED = ("devices", *(name for name in DEGREES if name != "vpp"))
# Numbers of a key ahead of its fields: the choice of cluster and job, and the grid.
AHEAD = 2
_COMPOSED = ("schedule", "sharding", "recompute")
FIELDS = (
    *("devices", "layout", *DEGREES, "micro_batch", "panels", "sequence_parallel", "cp_kind", *_COMPOSED),
    *(f"fast {axis}" for axis in AXES),
    "order",
)
"""The fields of a key behind those, in the order that breaks ties."""


@dataclass(frozen=True, order=True, slots=True)
class RankedPlan:
    """A plan in a ranking: what it is ranked by, seconds of a step, bytes on a device, and the key of its fields."""

    value: float
    step_seconds: float
    device_bytes: float
    key: PlanKey


@dataclass(frozen=True, slots=True)
class FrontPlan:
    """A plan of a front, in its case, with the seconds of its step and its bytes on a device."""

    case: TrainingCase
    step_seconds: float
    device_bytes: float

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.case.plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanBatch:
    """Evaluated plans of one schedule, number of chunks and sharding: seconds and bytes, which fit, and their keys.

    Arrays have one shape, or broadcast to it; `group` is the number of a plan's degrees in `degrees`, `key` takes
    its flat index. Bytes that a device has to have and that a host lacks are told where every plan is timed.
    """

    step_seconds: Any
    device_bytes: Any
    fits: Any
    devices: Any
    group: Any
    degrees: Mapping[DegreesKey, int]
    key: Any
    required_bytes: Any = 0.0
    host_short_bytes: Any = 0.0


def _key_fields(values: Columns, grid: PlanGrid, composed: tuple[str, int, str], mode: Any, place: Any) -> list[Any]:
    """Return the fields of plans in the order that breaks ties; `composed` is schedule, vpp, sharding."""
    space = grid.space
    schedule, vpp, sharding = composed
    words = (space.schedule.index(schedule), space.sharding.index(sharding), mode)
    where = (*grid.places.fast[place].T, grid.places.order[place])
    own = {"vpp": vpp, **dict(zip(FIELDS[-len(AXES) - 4 :], (*words, *where), strict=True))}
    return [grid.variant.choice, grid.variant.number, *(own[n] if n in own else values[n] for n in FIELDS)]


def key_of(values: Columns, grid: PlanGrid, composed: tuple[str, int, str], mode: int, place: int) -> PlanKey:
    """Return the fields of one plan as numbers, in the order that breaks ties."""
    return tuple(map(int, _key_fields(values, grid, composed, mode, place)))


def key_table(values: Columns, grid: PlanGrid, composed: tuple[str, int, str], mode: Any, place: Any) -> Any:
    """Return the fields of plans as numbers, a row each."""
    fields = _key_fields(values, grid, composed, mode, place)
    return np.column_stack([np.broadcast_to(field, mode.shape) for field in fields]).astype(np.int64)


def degrees_of(key: PlanKey) -> DegreesKey:
    """Return the choice of cluster and job, the devices and the degrees of a plan by its key."""
    devices, _, tp, tp2, cp, pp, _, dp, ep, etp = key[AHEAD : AHEAD + 10]
    return key[0], devices, tp, tp2, cp, pp, dp, ep, etp


def grid_of(key: PlanKey) -> int:
    """Return the number of the grid of a plan by its key."""
    return key[1]


def plan_of(key: PlanKey, grid: PlanGrid) -> Plan:
    """Return the plan of a key."""
    fields: dict[str, Any] = dict(zip(FIELDS[1:], key[AHEAD + 1 :], strict=True))
    fast = tuple(fields.pop(f"fast {axis}") for axis in AXES)
    fields |= {name: words[fields[name]] for name, words in grid.space.words.items()}
    fields |= {"sequence_parallel": bool(fields["sequence_parallel"]), "fast": fast if fast[0] else ()}
    return staged(grid.case, replace(grid.case.plan, **fields))


@dataclass(frozen=True)
class PlanSelection:
    """Plans to be evaluated: their rows, the place of each and the row of each place, and modes where they are flat.

    `sets` tells rows of a part apart that differ in more than the micro-batch. What programs read of plans is kept in
    `inputs`, by name and level.
    """

    rows: Any
    sets: Any
    place: Any = field(default_factory=lambda: np.empty(0, np.int64))
    row: Any = field(default_factory=lambda: np.empty(0, np.int64))
    modes: Any = None
    groups: dict[bool, ShapeColumns] = field(default_factory=dict)
    inputs: dict[tuple[str, int], Any] = field(default_factory=dict)

    @cached_property
    def _splits(self) -> tuple[Any, Any]:
        """Where rows begin that differ from the one before in more than the micro-batch, and the split of each row."""
        return runs(self.sets[self.rows])

    def shape(self, modes: int) -> ProgramShape:
        """Return the shape of what programs compute of the plans."""
        start, split = self._splits
        return ProgramShape(rows=len(self.rows), modes=modes, row=self.row, splits=len(start), split=split)

    def among(self, axis: int) -> Any:
        """Return the rows of an axis of what programs compute: all of them, or the first of each split."""
        return self.rows[self._splits[0]] if axis == SPLIT else self.rows


@dataclass(frozen=True, slots=True)
class PlanKeys:
    """The keys of evaluated plans: of one by its flat index, or of many as rows of a table."""

    columns: Columns
    grid: PlanGrid
    composed: tuple[str, int, str]
    cells: PlanSelection

    def __call__(self, index: int) -> PlanKey:
        mode, row, place = self._at(index)
        values = {name: column[row] for name, column in self.columns.items()}
        return key_of(values, self.grid, self.composed, mode, place)

    def many(self, indices: Any) -> list[PlanKey]:
        """Return the keys of flat indices."""
        return [*map(tuple, self.table(indices).tolist())]

    def table(self, indices: Any) -> Any:
        """Return the keys of flat indices, a row each."""
        mode, rows, places = self._at(indices)
        values = {name: column[rows] for name, column in self.columns.items()}
        return key_table(values, self.grid, self.composed, mode, places)

    def _at(self, index: Any) -> tuple[Any, Any, Any]:
        """Return mode, row and place of a flat index, or of many."""
        mode, at = divmod(index, len(self.cells.row))
        row = self.cells.row[at]
        return (mode if self.cells.modes is None else self.cells.modes[row]), self.cells.rows[row], self.cells.place[at]


@dataclass(frozen=True, slots=True)
class FeasiblePlans:
    """Rows of which some plan fits: bytes of their plans and which of them fit, by sharding."""

    rows: Any
    device_bytes: dict[str, Any]
    fits: dict[str, Any]

    def of(self, some: Any) -> FeasiblePlans:
        """Return some of the rows."""
        device_bytes, fits = (
            {s: v.take(some, axis=1) for s, v in one.items()} for one in (self.device_bytes, self.fits)
        )
        return FeasiblePlans(self.rows[some], device_bytes, fits)


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The rows of a part of the base from `start`, the sets of degrees that they have, and the keys of their blocks."""

    columns: Columns
    degrees: dict[DegreesKey, int]
    keys: BlockKeys
    start: int
