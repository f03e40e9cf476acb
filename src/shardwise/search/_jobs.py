"""Memory and time of one composition of rows of plans: recompute modes by rows of plans by places.

Memory does not depend on which ranks share a domain, so it is computed for rows; of what fits, time is computed for
every place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import field
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.plans import Schedule
from shardwise.records import dataclass
from shardwise.search._batch import FeasiblePlans, PlanBatch, PlanKeys, PlanPart, PlanSelection, RankedPlan, key_of
from shardwise.search._blocks import BlockKeys, BlockTable
from shardwise.search._columns import Columns, exact_sum, pieces, scattered, spread
from shardwise.search._composition import Composition
from shardwise.search._placements import ShapeColumns
from shardwise.search._program import CELLS, MODE, PLACE, ROW, SPLIT, Program, axis_of

if TYPE_CHECKING:
    from shardwise.search._evaluator import Evaluator

# Jobs share the rows of another one of which they run at least so many: columns are gathered once for all.
_SHARED = 0.7


def alike_jobs(jobs: Sequence[tuple[Job, Any]]) -> Iterator[tuple[list[Job], Any]]:
    """Yield jobs of about the same rows, and those rows: what some of them cannot run is not legal there."""
    alike: list[tuple[list[Job], Any, Any]] = []
    for job, allowed in sorted(jobs, key=lambda one: -len(one[1])):
        if not len(allowed):
            continue
        for same, rows, mask in alike:
            if len(allowed) >= _SHARED * len(rows) and mask[allowed].all():
                same.append(job)
                break
        else:
            alike.append(([job], allowed, scattered(True, allowed, len(job.columns["pp"]))))
    yield from ((same, rows) for same, rows, _ in alike)


@dataclass(slots=True)
class Bounded:
    """What fits of a job and is not timed yet, with seconds that no step of a row is shorter than."""

    job: Job
    fitting: FeasiblePlans
    lows: Any

    @property
    def least(self) -> float:
        """Seconds that no step is shorter than, infinity where no row is left."""
        return float(self.lows.min(initial=np.inf))

    def keep(self, some: Any) -> None:
        """Keep some of the rows."""
        if len(some) < len(self.lows):
            self.fitting, self.lows = self.fitting.of(some), self.lows[some]

    def first(self, size: int) -> FeasiblePlans:
        """Return about so many rows, those with the least bounds, and leave the others."""
        fitting, last = self.fitting, np.inf
        if len(self.lows) > size:
            last = np.partition(self.lows, size - 1)[size - 1]
        soon = self.lows <= last
        self.keep(np.flatnonzero(~soon))
        return fitting.of(np.flatnonzero(soon))


def bounds_of(some: Sequence[tuple[Job, FeasiblePlans]], table: BlockTable) -> list[Bounded]:
    """Return what fits of jobs of about the same rows with its bounds; columns are gathered once for all of them."""
    # Rows in order, of a narrow range: to count is quicker than to search.
    low, high = min(fit.rows[0] for _, fit in some), max(fit.rows[-1] for _, fit in some)
    here = np.zeros(high - low + 1, bool)
    for _, fit in some:
        here[fit.rows - low] = True
    cells, place = PlanSelection(np.flatnonzero(here) + low, some[0][0].columns["set"]), np.cumsum(here) - 1
    places = [place[fit.rows - low] for _, fit in some]
    modes = np.full(len(cells.rows), some[0][0].evaluator.num_modes)
    for (_, fit), own in zip(some, places, strict=True):
        modes[own] = np.minimum(modes[own], _first_modes(reduce(np.logical_or, fit.fits.values())))
    return [job.bounded(fit, own, cells, table, modes) for (job, fit), own in zip(some, places, strict=True)]


def _first_modes(fits: Any) -> Any:
    """Return the first mode of each row that fits, given by mode and row which do; one of each row does."""
    first, none_yet = np.zeros(fits.shape[1], np.int8), ~fits[0]
    for fit in fits[1:]:
        first += none_yet
        none_yet &= ~fit
    return first


@dataclass(slots=True)
class Job:
    """One composition of some rows of a part of the base; `legal` says by sharding which rows of the part have it."""

    evaluator: Evaluator
    composed: tuple[Schedule, int, int]
    part: PlanPart
    legal: dict[str, Any]
    shardings: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.shardings = tuple(sharding for sharding, rows in self.legal.items() if rows.any())

    @property
    def columns(self) -> Columns:
        """The rows of the part."""
        return self.part.columns

    @property
    def composition(self) -> Composition:
        """The composition of the job, with the shardings that some of its rows have."""
        return self.evaluator.compositions.of(*self.composed, self.shardings)

    def _given(
        self,
        program: Program,
        cells: PlanSelection,
        table: BlockKeys | BlockTable,
        least: bool = False,
        first_modes: Any = None,
    ) -> dict[str, Any]:
        """Return the inputs of a program for some plans, each gathered once for all programs that read it.

        With the first mode of each row, what varies with modes is the least of that one and of those after it.
        """
        known: dict[tuple[int, int], Any] = {}
        numbers = self.numbers
        for name, level in program.inputs.items():
            if (name, level) in cells.inputs or name in numbers:
                continue
            axis = axis_of(level)
            if name.startswith("block "):
                column, key = table.column(name, least)
                at = known.get((id(key), axis))
                if at is None:
                    at = key.take(cells.among(axis if axis != PLACE else ROW))
                    if axis == PLACE and isinstance(table, BlockTable):
                        at = table.first[at][cells.row] + table.domain_of[cells.place - self._first]
                    known[id(key), axis] = at
                if first_modes is not None and column.ndim > 1 and isinstance(table, BlockTable):
                    if (id(key), MODE) not in known:
                        known[id(key), MODE] = at * len(column) + first_modes
                    columns = table.onward(name).take(known[id(key), MODE])
                elif column.ndim == 1 or cells.modes is None:
                    columns = column.take(at, axis=-1)
                else:
                    columns = column[cells.modes if axis != PLACE else cells.modes[cells.row], at]
            elif "/" in name:
                group, tier = name.split("/")
                columns = self._groups(cells, bool(level & PLACE))[group][int(tier)]
            else:
                columns = self.columns[name].take(cells.among(axis)).astype(np.float64)
            cells.inputs[name, level] = columns
        return {n: numbers[n] if n in numbers else cells.inputs[n, level] for n, level in program.inputs.items()}

    @property
    def numbers(self) -> dict[str, float]:
        """What programs read of the stages and chunks of the job."""
        return self.composition.numbers | {"vpp": float(self.composed[2])}

    @property
    def least_missed_bytes(self) -> float:
        """The least bytes of a plan that does not fit by now, infinity where all do."""
        nearest = self.evaluator.nearest
        return nearest.value if nearest is not None else np.inf

    def state(self, heads: PlanSelection) -> Any:
        """Return bytes that no plan of each set takes less than, given its first row."""
        program, size = self.composition.state, len(heads.rows)
        outputs = program.run(self._given(program, heads, self.part.keys), heads.shape(self.evaluator.num_modes))
        return reduce(np.minimum, [np.broadcast_to(outputs[f"state {s}"], size) for s in self.shardings]).copy()

    def judge(self, rows: Any) -> None:
        """Count which plans of some rows fit, by their bytes."""
        deque(self.fitting(rows, PlanSelection(rows, self.columns["set"])), 0)

    def count_too_large(self, rows: Any) -> None:
        """Count all plans of some rows as too large."""
        places = self.columns["places"][rows]
        plans = sum(exact_sum(places * self.legal[s][rows]) for s in self.shardings)
        self.evaluator.counts.too_large += plans * self.evaluator.num_modes

    @property
    def _first(self) -> int:
        return int(self.evaluator.grid.places.start[self.part.start])

    def _groups(self, cells: PlanSelection, placed: bool) -> ShapeColumns:
        """Return the ranks of every group in one domain of each tier, for each place or, whole groups, for each set."""
        known = cells.groups.get(placed)
        if known is None:
            rows = cells.rows[cells.row] if placed else cells.among(SPLIT)
            place = cells.place if placed else self.evaluator.grid.places.start[self.columns["base"][rows]]
            known = cells.groups[placed] = self.evaluator.grid.groups(
                place, {n: self.columns[n][rows] for n in ("ep", "etp")}
            )
        return known

    def _cells(self, chosen: Any) -> PlanSelection:
        """Return all places of some rows, for all modes."""
        places, base = self.evaluator.grid.places, self.columns["base"][chosen]
        place, count = spread(places.start[base], places.count[base])
        return PlanSelection(chosen, self.columns["set"], place, np.repeat(np.arange(len(chosen)), count))

    def all(self, chosen: Any, table: BlockTable) -> Iterator[PlanBatch]:
        """Yield memory and time of all plans of some rows."""
        composition, modes = self.composition, self.evaluator.num_modes
        cells = self._cells(chosen)
        program = composition.whole
        outputs = program.run(self._given(program, cells, table), cells.shape(modes))
        for sharding in composition.shardings:
            required = np.broadcast_to(outputs[f"required {sharding}"], (modes, len(chosen)))
            legal, fits = self._judged(sharding, chosen, required)
            shape = (modes, len(cells.row))
            self.evaluator.counts.evaluated += modes * int(np.count_nonzero(legal[cells.row]))
            if fits.any():
                device, short = outputs[f"device {sharding}"], outputs.get(f"short {sharding}", 0.0)
                yield PlanBatch(
                    step_seconds=np.broadcast_to(outputs[f"step {sharding}"], shape),
                    device_bytes=np.broadcast_to(device, required.shape).take(cells.row, axis=-1),
                    required_bytes=required.take(cells.row, axis=-1),
                    host_short_bytes=np.broadcast_to(short, required.shape).take(cells.row, axis=-1),
                    fits=fits.take(cells.row, axis=-1),
                    key=self._keys(cells, sharding),
                    **self._kind(chosen[cells.row]),
                )

    def fitting(self, rows: Any, cells: PlanSelection, at: Any = None) -> Iterator[FeasiblePlans]:
        """Yield those of some rows of which a plan fits, if any; `at` is where bytes of each are among the cells."""
        composition, modes, size = self.composition, self.evaluator.num_modes, len(cells.rows)
        outputs = composition.memory.run(self._given(composition.memory, cells, self.part.keys), cells.shape(modes))
        bytes_of, fits = {}, {}
        for s in composition.shardings:
            bytes_of[s] = np.broadcast_to(outputs[f"device {s}"], (modes, size))
            fits[s] = self._judged(s, rows, np.broadcast_to(outputs[f"required {s}"], (modes, size)), at)[1]
        mine = np.flatnonzero(reduce(np.logical_or, fits.values()).any(axis=0))
        if len(mine):
            there = mine if at is None else at[mine]
            yield FeasiblePlans(
                rows[mine],
                {s: h.take(there, axis=1) for s, h in bytes_of.items()},
                {s: f.take(mine, axis=1) for s, f in fits.items()},
            )

    def bounded(self, fitting: FeasiblePlans, own: Any, cells: PlanSelection, table: BlockTable, modes: Any) -> Bounded:
        """Return seconds that no step of a row is shorter than, given where those that fit are among the cells.

        No plan of a mode before that of its cell fits.
        """
        program, size, fits = self.composition.least, len(cells.rows), fitting.fits
        outputs = program.run(self._given(program, cells, table, True, modes), cells.shape(1))
        # Results of a program stay until the next run alone.
        lows = (
            np.where(fit.any(axis=0), np.broadcast_to(outputs[f"least {s}"], size).take(own), np.inf)
            for s, fit in fits.items()
        )
        return self._wanted(Bounded(self, fitting, reduce(np.minimum, lows)))

    def _wanted(self, bounded: Bounded) -> Bounded:
        """Drop the rows that are behind what was found by now, by their least seconds and bytes."""
        wanted, known = self.evaluator.wanted, bounded.fitting
        if wanted is not None and not wanted.all:
            fewest_bytes = reduce(np.minimum, known.device_bytes.values()).min(axis=0)
            bounded.keep(np.flatnonzero(wanted.may(self._bounds(known.rows, bounded.lows, fewest_bytes, True))))
        return bounded

    def _bounds(self, rows: Any, seconds: Any, device_bytes: Any, fits: Any) -> PlanBatch:
        """Return rows, or plans of them, with seconds that no step is shorter than; nobody asks for their keys."""
        return PlanBatch(step_seconds=seconds, device_bytes=device_bytes, fits=fits, key=None, **self._kind(rows))

    def pruned(self, bounded: Bounded, size: int, table: BlockTable) -> Iterator[PlanBatch]:
        """Yield the plans that may be wanted of about so many rows, those with the least bounds."""
        chosen = self._wanted(bounded).first(size)
        for some in pieces(np.arange(len(chosen.rows)), np.ones(len(chosen.rows), np.int64), self._most_rows):
            known = self._ahead(chosen.of(some), table)
            for group in self.composition.groups:
                wanted = np.flatnonzero(reduce(np.logical_or, [known.fits[s] for s in group]))
                yield from self._timed(group, wanted, known, table)

    @property
    def _most_rows(self) -> int:
        return CELLS // self.evaluator.num_modes

    def _ahead(self, known: FeasiblePlans, table: BlockTable) -> FeasiblePlans:
        """Return plans without those that are behind what was found by now, by their own bounds."""
        wanted, modes = self.evaluator.wanted, self.evaluator.num_modes
        if wanted is None or wanted.all or not len(known.rows):
            return known
        program, cells = self.composition.least, PlanSelection(known.rows, self.columns["set"])
        outputs = program.run(self._given(program, cells, table, least=True), cells.shape(modes))
        fits = {}
        for s, fit in known.fits.items():
            seconds = np.broadcast_to(outputs[f"least {s}"], fit.shape)
            fits[s] = fit & wanted.may(self._bounds(known.rows, seconds, known.device_bytes[s], fit))
        return FeasiblePlans(known.rows, known.device_bytes, fits)

    def _timed(
        self, group: tuple[str, ...], wanted: Any, known: FeasiblePlans, table: BlockTable
    ) -> Iterator[PlanBatch]:
        """Yield the time of plans, given by mode and row, of a group of shardings, at all of their places."""
        chosen, device_bytes, fits = known.rows, known.device_bytes, known.fits
        places, size = self.evaluator.grid.places, len(chosen)
        for some in pieces(wanted, self.columns["places"][chosen[wanted % size]], CELLS):
            rows = chosen[some % size]
            base = self.columns["base"][rows]
            place, count = spread(places.start[base], places.count[base])
            row = np.repeat(np.arange(len(rows)), count)
            cells = PlanSelection(rows, self.columns["set"], place, row, some // size)
            program = self.composition.steps(group)
            outputs = program.run(self._given(program, cells, table), cells.shape(1))
            for s in group:
                fit = fits[s].ravel()[some][row]
                self.evaluator.counts.evaluated += int(np.count_nonzero(fit))
                yield PlanBatch(
                    step_seconds=np.broadcast_to(outputs[f"step {s}"], row.shape),
                    device_bytes=device_bytes[s].ravel()[some][row],
                    fits=fit,
                    key=self._keys(cells, s),
                    **self._kind(rows[row]),
                )

    def _kind(self, rows: Any) -> dict[str, Any]:
        """Return the devices and the degrees of rows, as a batch has them."""
        columns = self.columns
        return {"devices": columns["devices"][rows], "group": columns["group"][rows], "degrees": self.part.degrees}

    def _keys(self, cells: PlanSelection, sharding: str) -> PlanKeys:
        """Return the keys of plans by their flat index."""
        schedule, _, vpp = self.composed
        return PlanKeys(self.columns, self.evaluator.grid, (schedule, vpp, sharding), cells)

    def _judged(self, sharding: str, chosen: Any, required: Any, at: Any = None) -> tuple[Any, Any]:
        """Return which rows have the sharding as a choice and which plans of them fit, and count them.

        `at` is where bytes of each row are, if not in their order.
        """
        evaluator, places = self.evaluator, self.columns["places"][chosen]
        legal, within = self.legal[sharding][chosen], required <= evaluator.limit_bytes
        fits = (within if at is None else within.take(at, axis=1)) & legal
        fitting = exact_sum(sum(mode.view(np.int8) for mode in fits) * places)
        evaluator.counts.fitting += fitting
        evaluator.counts.too_large += exact_sum(places * legal) * evaluator.num_modes - fitting
        near = evaluator.nearest
        # Seldom is one short of less than all before.
        if near is None or np.count_nonzero(required <= near.value) > np.count_nonzero(within):
            whole = required if at is None else required.take(at, axis=1)
            self._miss(sharding, chosen, whole, legal & ~fits)
        return legal, fits

    def _miss(self, sharding: str, chosen: Any, required: Any, missed: Any) -> None:
        """Note the plan that is short of the least memory."""
        evaluator = self.evaluator
        if evaluator.nearest is not None:
            missed = missed & (required <= evaluator.nearest.value)
        if not missed.any():
            return
        least = float(required[missed].min())
        schedule, _, vpp = self.composed
        for mode, row in zip(*np.nonzero(missed & (required == least)), strict=True):
            values = {name: v[chosen[row]] for name, v in self.columns.items()}
            place = int(evaluator.grid.places.start[values["base"]])
            key = key_of(values, evaluator.grid, (schedule, vpp, sharding), int(mode), place)
            entry = RankedPlan(least, 0.0, least, key)
            evaluator.nearest = min(evaluator.nearest or entry, entry)
