"""Memory and time of meshes of plans, those alone that may be wanted.

The formulas are those of `shardwise.training`, recorded and run on arrays (`_composition`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from shardwise.plans import divisors
from shardwise.records import dataclass
from shardwise.search._batch import KEYED, FeasiblePlans, PlanBatch, PlanPart, PlanSelection, RankedPlan
from shardwise.search._blocks import BlockTable, tabulate
from shardwise.search._columns import distinct_rows, pieces, runs
from shardwise.search._composed import composed_rows
from shardwise.search._composition import Compositions, compositions_of
from shardwise.search._constraints import Constraints
from shardwise.search._grid import PlanGrid
from shardwise.search._hopeless import HopelessRows, hopeful, settle
from shardwise.search._jobs import Bounded, Job, alike_jobs, bounds_of
from shardwise.search._program import CELLS
from shardwise.search._ranking import WantedPlans
from shardwise.search._result import PlanCounts

# Rows of a job that are looked at at each visit to it.
_VISITS = (512, 2**62)


@dataclass(slots=True)
class Evaluator:
    """Evaluates slices of the rows of a space. With `prune`, time is computed of plans that may be wanted alone.

    `wanted` says which those are.
    """

    grid: PlanGrid
    limit_bytes: float
    prune: bool = True
    wanted: WantedPlans | None = None
    counts: PlanCounts = field(default_factory=PlanCounts)
    nearest: RankedPlan | None = None
    constraints: Constraints = field(init=False)
    compositions: Compositions = field(init=False)

    def __post_init__(self) -> None:
        self.constraints = self.grid.constraints()
        self.compositions = compositions_of(self.grid)

    def fresh(self) -> Evaluator:
        """Return the evaluator with nothing counted, what is recorded kept."""
        self.counts, self.nearest = PlanCounts(), None
        self.constraints.rejected = {}
        return self

    @property
    def num_modes(self) -> int:
        """Recompute modes."""
        return len(self.grid.space.recompute)

    def batches(self, start: int, end: int) -> Iterator[PlanBatch]:
        """Yield the plans of a slice of the base rows."""
        grid = self.grid
        base = {**{c: v[start:end] for c, v in grid.base.items()}, "base": np.arange(start, end)}
        columns = grid.expand(base, self.constraints)
        if not len(columns["tp"]):
            return
        keys = tabulate(self.compositions.blocks, grid, columns, (start, end))
        heads, split = runs(columns["set"])
        first, group = distinct_rows([columns[name][heads] for name in KEYED])
        rows, columns["group"] = np.column_stack([columns[name][heads[first]] for name in KEYED]).tolist(), group[split]
        degrees = {(grid.variant.choice, *one): place for place, one in enumerate(rows)}
        batch = grid.case.job.global_batch
        columns["num_micro"] = batch // (columns["dp"] * columns["micro_batch"])
        columns["count"] = np.searchsorted(divisors(batch), columns["num_micro"])
        known = PlanPart(columns=columns, degrees=degrees, keys=keys, start=start)
        judged = composed_rows(grid, self.constraints, self.counts, columns)
        jobs = [(Job(self, composed, known, legal), allowed) for composed, allowed, legal in judged]
        most = CELLS // self.num_modes
        if not self.prune:
            table = keys.timed(np.arange(len(columns["tp"])))
            for job, allowed in jobs:
                for chosen in pieces(allowed, columns["places"][allowed], most):
                    yield from job.all(chosen, table)
            return
        # What is not timed has one cell for all of its places. Blocks are timed of rows that fit alone.
        fitting, hopeless = list[list[tuple[Job, FeasiblePlans]]](), list[HopelessRows]()
        for alike, allowed in alike_jobs(jobs):
            # Of few rows bytes take no longer than their state alone.
            many = len(allowed) > most
            rows, others = hopeful(alike, allowed, columns["set"], self.limit_bytes) if many else (allowed, [])
            fitting += [some for some in self._fitting(alike, rows, most) if some]
            hopeless += others
        settle(hopeless, most)
        if fitting:
            table = keys.timed(np.concatenate([fit.rows for some in fitting for _, fit in some]))
            bounded = [one for some in fitting for one in bounds_of(some, table)]
            yield from self._best_first(bounded, table)

    def _fitting(self, jobs: Sequence[Job], allowed: Any, most: int) -> Iterator[list[tuple[Job, FeasiblePlans]]]:
        """Yield what fits of jobs of the same rows, so many at a time, which are gathered once for all of them."""
        for rows in pieces(allowed, np.ones(len(allowed), np.int64), most):
            sets = jobs[0].columns["set"]
            some, at = jobs[0].part.keys.of_bytes(rows, sets)
            cells = PlanSelection(some, sets)
            yield [(job, fit) for job in jobs for fit in job.fitting(rows, cells, at)]

    def _best_first(self, bounded: Sequence[Bounded], table: BlockTable) -> Iterator[PlanBatch]:
        """Yield the plans that may be wanted, the least bounds first: what is timed early leaves out more of others."""
        for size in _VISITS if self.wanted is not None else _VISITS[-1:]:
            for one in sorted(bounded, key=lambda one: one.least):
                if len(one.lows):
                    yield from one.job.pruned(one, size, table)
