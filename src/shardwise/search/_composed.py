"""Which schedules and chunks the rows of plans run: what laws and a framework allow of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shardwise.errors import Problem
from shardwise.plans import DEGREES, Plan, Schedule
from shardwise.records import dataclass
from shardwise.search._columns import ChosenRows, Columns, ColumnsRead, distinct, exact_sum, scattered
from shardwise.search._constraints import Constraints, Law
from shardwise.search._grid import PlanGrid
from shardwise.search._launch import STACK
from shardwise.search._result import PlanCounts
from shardwise.search._space import WORDS


@dataclass(frozen=True, slots=True)
class _Runs:
    """What a framework runs of a pipeline: which rows with each sharding, their plans, and how many it refuses."""

    legal: Mapping[str, Any]
    each: Any
    refused: int


def composed_rows(
    grid: PlanGrid, constraints: Constraints, counts: PlanCounts, columns: Columns
) -> Iterator[tuple[tuple[Schedule, int, int], Any, dict[str, Any]]]:
    """Yield schedule, stages and chunks of rows, the rows that run so, and which of all rows do with each sharding.

    Plans that laws refuse are counted. What is said of a schedule, whatever its chunks, is asked once.
    """
    size, rules = len(columns["pp"]), () if grid.explore else grid.case.stack.runs.rules
    reads = {name for rule in rules for name, _ in (*rule.where, *rule.needs)}
    for pp in distinct(columns["pp"]).tolist():
        mine = np.flatnonzero(columns["pp"] == pp)
        rows = ChosenRows(columns, mine)
        launched_as, ran = dict[Any, _Runs](), dict[Any, tuple[Any, dict[str, Any], int, int]]()
        for schedule, vpp in grid.compositions(pp):
            fixed = {"schedule": schedule, "vpp": vpp, "pp": pp}
            key = tuple(fixed[name] for name in ("schedule", "vpp") if name in reads)
            if key not in launched_as:
                launched_as[key] = _launches(grid, constraints, rows, fixed)
            known = launched_as[key]
            constraints.reject(STACK, known.refused)
            if not constraints.check("pipeline", {"pp": rows["pp"][:1]}, schedule=schedule, vpp=vpp)[0]:
                constraints.reject("pipeline", known.each)
                continue
            if (key, schedule) not in ran:
                runs = constraints.check("schedule", rows, **fixed)
                legal = {s: scattered(one & runs, mine, size) for s, one in known.legal.items()}
                whole = exact_sum(known.each)
                kept = exact_sum(known.each[runs])
                ran[key, schedule] = mine[runs & (known.each > 0)], legal, kept, whole - kept
            allowed, legal, kept, refused = ran[key, schedule]
            constraints.reject("schedule", refused)
            counts.legal += kept
            yield (schedule, pp, vpp), allowed, legal


def _launches(grid: PlanGrid, constraints: Constraints, rows: ColumnsRead, fixed: Mapping[str, Any]) -> _Runs:
    """Return which rows of a pipeline are launched with each sharding."""
    columns, copied = dict[str, Any](), grid.copied(rows)
    weights, refused_plans = rows["places"] * len(grid.space.recompute), 0
    for sharding in grid.space.sharding:
        chosen = copied | (sharding in grid.lone_shardings)
        runs = grid.launched(rows, sharding=sharding, **fixed)
        columns[sharding] = chosen & runs
        refused = chosen & ~runs
        if refused.any():
            refused_plans += exact_sum(weights[refused])
            if STACK not in constraints.examples:
                first = ChosenRows(rows, refused)
                problem = example(grid.laws[STACK], first, {"sharding": sharding, **fixed})
                if problem is not None:
                    constraints.examples[STACK] = problem
    ways = sum(one.view(np.int8) for one in columns.values())
    return _Runs(columns, ways * weights, refused_plans)


def example(law: Law, columns: ColumnsRead, fixed: Mapping[str, Any]) -> Problem | None:
    """Return what the law of a framework says of the first of some rows."""
    row = {name: int(columns[name][0]) for name in DEGREES if name in columns and name != "vpp"}
    sequence = bool(columns["sequence_parallel"][0])
    kind = WORDS["cp_kind"][int(columns["cp_kind"][0])]
    plan = Plan(sequence_parallel=sequence, cp_kind=kind, **{**row, **fixed})  # type: ignore[arg-type]
    return next(iter(law.problems(plan)), None)
