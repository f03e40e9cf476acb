"""Memory and time of meshes of plans: rows of plans on the last axis, recompute modes before it.

The formulas are those of `shardwise.training`, on arrays that broadcast. Python loops only over what changes the
composition: schedule, chunks and sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwise.search._key import Entry, key_of
from shardwise.search._laws import Columns, Court, with_stages
from shardwise.search._rows import Rows, case_for
from shardwise.search._tables import Gathered, Span, TableSet, sizes_of_rows, spans_of, tabulate
from shardwise.training import Case, Sizes, stages_of
from shardwise.training._evaluate import machine_of, memory_of, peak_of, step_job
from shardwise.training._memory import Recipe, device_bytes
from shardwise.training._step import (
    StepJob,
    least_seconds,
    micro_batch_seconds,
    piped_seconds,
    runs_of_seconds,
    with_update,
)

CELLS = 32_768


@dataclass(slots=True)
class Counts:
    """Plans by what became of them; what the laws dropped is with the court."""

    legal: int = 0
    fitting: int = 0
    evaluated: int = 0
    too_large: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """Plans of one schedule, number of chunks and sharding: (recompute modes, rows) bytes, seconds, which count."""

    columns: Columns
    schedule: str
    vpp: int
    sharding: str
    device_bytes: Any
    step_seconds: Any
    legal: Any
    fits: Any

    @property
    def composed(self) -> tuple[str, int, str]:
        """Schedule, chunks and sharding."""
        return self.schedule, self.vpp, self.sharding


@dataclass(slots=True)
class Mesh:
    """Evaluates slices of the rows of a space. With `prune`, time is not computed where nothing fits.

    `may` says which plans may be wanted, given seconds that their steps are never shorter than, bytes and devices.
    """

    rows: Rows
    prune: bool = True
    may: Callable[[Any, Any, Any], Any] | None = None
    counts: Counts = field(default_factory=Counts)
    nearest: Entry | None = None
    court: Court = field(init=False)

    def __post_init__(self) -> None:
        self.court = self.rows.court()

    @property
    def num_modes(self) -> int:
        """Recompute modes."""
        return len(self.rows.space.recompute)

    def sheets(self, start: int, end: int) -> Iterator[Sheet]:
        """Yield the plans of a slice of the base rows, which share their pipeline."""
        rows = self.rows
        base = {c: v[start:end] for c, v in rows.base.items()}
        pp = int(base["pp"][0])
        columns = rows.expand(base, self.court)
        columns = {c: v for c, v in columns.items() if not c.startswith("of ")}
        if not len(columns["tp"]):
            return
        case = case_for(rows.case, pp=pp, vpp=1)
        shared = spans_of(columns, rows.space, case.domains)
        tables: TableSet | None = None
        each = CELLS // self.num_modes
        for schedule, vpp in rows.compositions(pp):
            allowed = self._lawful(columns, schedule, vpp)
            if not len(allowed):
                continue
            tables = tables or tabulate(case, rows.space, columns, shared)
            composed = _composed(case, schedule, vpp)
            job = _Job(self, composed, columns, shared, tables, stages_of(composed))
            for at in range(0, len(allowed), each):
                yield from self._composition(job, allowed[at : at + each])

    def _lawful(self, columns: Columns, schedule: str, vpp: int) -> Any:
        """Return the indices of rows that the schedule can run, and count the plans of the others."""
        fixed = {"schedule": schedule, "vpp": vpp}
        copies = columns["dp"] * columns["cp"] > 1
        each = np.where(copies, len(self.rows.space.sharding), 1) * self.num_modes
        legal = self.court.judge("pipeline", {"pp": columns["pp"][:1]}, **fixed)
        legal = np.broadcast_to(legal, each.shape)
        self.court.keep("pipeline", {}, each, legal)
        if not legal.all():
            return np.flatnonzero(legal)
        legal = self.court.judge("schedule", columns, **fixed, pp=int(columns["pp"][0]))
        self.court.keep("schedule", {}, each, legal)
        self.counts.legal += int(each[legal].sum())
        return np.flatnonzero(legal)

    def _composition(self, job: _Job, chosen: Any) -> Iterator[Sheet]:
        by_time: dict[tuple[bool, bool], list[str]] = {}
        for sharding in self.rows.space.sharding:
            r = case_for(job.case, sharding=sharding).recipe
            by_time.setdefault((r.shards_gradients, r.shards_weights), []).append(sharding)
        for shardings in by_time.values():
            yield from job.evaluate(chosen, shardings)


@dataclass(frozen=True, slots=True)
class _Timing:
    """Seconds of one micro-batch on each run of stages, and those that the step is never shorter than."""

    machine: Any
    job: StepJob[Any]
    stages: Any
    runs: Any
    least: Any


@dataclass(slots=True)
class _Job:
    """One composition of some rows."""

    mesh: Mesh
    case: Case
    columns: Columns
    shared: Span
    tables: TableSet
    stages: tuple[Any, ...]

    def _rows(self, chosen: Any) -> tuple[Columns, Sizes[Any], Gathered]:
        columns = {c: v[chosen] for c, v in self.columns.items()}
        shared = {axis: tuple(t[chosen] for t in tiers) for axis, tiers in self.shared.items()}
        return columns, sizes_of_rows(columns, shared, self.case), self.tables.rows(chosen)

    def evaluate(self, chosen: Any, shardings: Sequence[str]) -> Iterator[Sheet]:
        """Yield the sheets of shardings that take the same time for their micro-batches."""
        columns, z, blocks = self._rows(chosen)
        limit = self.case.cluster.device.usable_memory_bytes
        first = self.mesh.rows.space.sharding[0]
        shape = (self.mesh.num_modes, len(chosen))
        copies = columns["dp"] * columns["cp"] > 1
        stages = self.stages
        held, legal, fits = {}, {}, {}
        for sharding in shardings:
            case = case_for(self.case, sharding=sharding)
            peak = peak_of(stages, memory_of(case, z, blocks.parts, stages))
            held[sharding] = np.broadcast_to(device_bytes(case.stack, z, peak), shape)
            legal[sharding] = copies | (sharding == first)
            fits[sharding] = (held[sharding] <= limit) & legal[sharding]
            self._count(fits[sharding], legal[sharding])
            self._miss(sharding, columns, held[sharding], legal[sharding] & ~fits[sharding])
        anywhere = np.any([f.any(axis=0) for f in fits.values()], axis=0)
        if self.mesh.prune and not anywhere.any():
            return
        kept = None
        if self.mesh.prune and anywhere.mean() < 0.7:
            kept = np.flatnonzero(anywhere)
            columns, z, blocks = self._rows(chosen[kept])
        timing = self._timed(shardings[0], columns, z, blocks)
        if self.mesh.may is not None:
            mine = [_kept(held[s], kept) for s in shardings]
            apt = [self.mesh.may(timing.least, bytes_, columns["devices"]) for bytes_ in mine]
            useful = np.any([a & _kept(fits[s], kept) for a, s in zip(apt, shardings, strict=True)], axis=0).any(axis=0)
            if not useful.any():
                return
            if useful.mean() < 0.7:
                kept = np.flatnonzero(useful) if kept is None else kept[useful]
                columns, z, blocks = self._rows(chosen[kept])
                timing = self._timed(shardings[0], columns, z, blocks)
        recipe = case_for(self.case, sharding=shardings[0]).recipe
        piped = piped_seconds(timing.machine, z, recipe, timing.stages, timing.runs, timing.job)
        for sharding in shardings:
            recipe = case_for(self.case, sharding=sharding).recipe
            step = with_update(timing.machine, z, recipe, blocks.parts, stages, piped).total
            sheet = Sheet(
                columns=columns,
                schedule=self.case.plan.schedule,
                vpp=self.case.plan.vpp,
                sharding=sharding,
                device_bytes=_kept(held[sharding], kept),
                step_seconds=np.broadcast_to(step, (shape[0], len(columns["tp"]))),
                legal=np.broadcast_to(_kept(legal[sharding], kept), (shape[0], len(columns["tp"]))),
                fits=_kept(fits[sharding], kept),
            )
            self.mesh.counts.evaluated += int(np.count_nonzero(sheet.legal))
            yield sheet

    def _timed(self, sharding: str, columns: Columns, z: Sizes[Any], blocks: Gathered) -> _Timing:
        """Return the seconds of one micro-batch on each run of stages."""
        machine, recipe = machine_of(self.case, z.spans), case_for(self.case, sharding=sharding).recipe
        job = step_job(self.case, blocks.parts, blocks.send)
        timed = micro_batch_seconds(machine, z, recipe, blocks.parts, self.stages, job)
        runs: Any = runs_of_seconds(self.stages, timed)
        return _Timing(machine, job, timed, runs, least_seconds(z, runs, job.schedule))

    def _count(self, fits: Any, legal: Any) -> None:
        counts, plans = self.mesh.counts, int(np.count_nonzero(legal)) * self.mesh.num_modes
        fitting = int(np.count_nonzero(fits))
        counts.fitting += fitting
        counts.too_large += plans - fitting

    def _miss(self, sharding: str, columns: Columns, held: Any, missed: Any) -> None:
        """Note the plan that is short of the least memory."""
        least = float(np.min(held, where=missed, initial=np.inf))
        mesh = self.mesh
        if not np.isfinite(least) or (mesh.nearest is not None and least > mesh.nearest.value):
            return
        plan = self.case.plan
        for mode, row in zip(*np.nonzero(missed & (held == least)), strict=True):
            key = key_of(columns, mesh.rows, (plan.schedule, plan.vpp, sharding), int(mode), int(row))
            entry = Entry(least, 0.0, least, key)
            mesh.nearest = min(mesh.nearest or entry, entry)


def _kept(values: Any, rows: Any) -> Any:
    return values if rows is None else values[..., rows]


def _composed(case: Case, schedule: str, vpp: int) -> Case:
    """Return the case with its pipeline filled in, layers written out where stages differ."""
    plan: Any = replace(case.plan, schedule=schedule, vpp=vpp, stage_layers=())  # type: ignore[arg-type]
    return replace(case, plan=with_stages(plan, case.model.num_layers))


__all__ = ["CELLS", "Counts", "Mesh", "Recipe", "Sheet"]
