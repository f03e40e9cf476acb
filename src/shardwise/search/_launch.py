"""The space of a search within what its framework can launch, and the law that says so of single plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shardwise.errors import Problem, Problems
from shardwise.plans import (
    DEGREES,
    RECOMPUTES,
    SCHEDULES,
    Capabilities,
    Plan,
    Schedule,
    Stack,
    alike,
    distinct_shardings,
    find_rules,
    find_sharding,
)
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass
from shardwise.search._columns import Columns, distinct, exact_sum, scattered
from shardwise.search._constraints import Constraints, Law
from shardwise.search._space import WORDS, IntRanges, Order, SearchSpace, upto

if TYPE_CHECKING:
    from shardwise.search._grid import PlanGrid
    from shardwise.search._result import PlanCounts

T = TypeVar("T")
STACK = "stack"
# What is tried where nobody says what: all that has a price, with `explore`, or what of it the framework runs.
TRIED: dict[str, tuple[Any, ...]] = {
    **WORDS,
    "sequence_parallel": (False, True),
    "schedule": tuple(one for one in SCHEDULES if find_rules(one).searched),
    "sharding": distinct_shardings(),
    "recompute": RECOMPUTES,
}


def within(space: SearchSpace, stack: Stack, explore: bool) -> SearchSpace:
    """Return the space with every choice filled in; raises `InputError` for choices that the framework does not run.

    >>> from shardwise.plans import find_stack
    >>> within(SearchSpace(), find_stack("megatron"), explore=False).schedule
    ('1f1b', 'interleaved')
    """
    runs, found, filled = stack.runs, Problems(), dict[str, Any]()
    for name, tried in TRIED.items():
        given = getattr(space, name)
        if name == "sharding":
            tried, given = (tuple(dict.fromkeys(map(runs.word, words))) for words in (tried, given))
            # What only FSDP has means nothing elsewhere; HSDP is searched where it is asked for.
            tried = tuple(word for word in tried if not find_sharding(word).keeps_gathered or word in runs.sharding)
        known = getattr(runs, name)
        filled[name] = given or (tried if explore else tuple(one for one in tried if one in known)) or tried[:1]
        if not explore:
            for value in given:
                if value not in known:
                    _refuse(found, stack, {name: value})
    if not explore:
        for name in ("offload", "modules", "stage_layers"):
            for value in getattr(space, name):
                shown = {"stage_layers": (1, 2) if value != "usual" else ()}.get(name, value)
                _refuse(found, stack, {name: shown})
        filled |= _degrees(space, stack, found)
        filled |= _orders(space, stack, found)
    found.raise_if_any()
    return replace(space, **filled)


def _refuse(found: Problems, stack: Stack, changed: Mapping[str, Any]) -> None:
    """Record that a framework does not run a value, in the words of its law."""
    whole = {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "sequence_parallel": stack.runs.sequence_parallel[0], **changed}
    for problem in stack_problems(stack, Plan(**whole)):
        if problem.field in changed:
            found.items.append(replace(problem, remedy=f"{problem.remedy}, or --explore"))


def _degrees(space: SearchSpace, stack: Stack, found: Problems) -> dict[str, IntRanges]:
    """Return the degrees that stay 1, recording those that are to be above it."""
    kept = {}
    for axis in DEGREES:
        if axis in stack.runs.split:
            continue
        given: IntRanges = getattr(space, axis)
        if given.ranges and not given.of([1]):
            _refuse(found, stack, {axis: given.ranges[0][0]})
        kept[axis] = upto(1)
    return kept


def _orders(space: SearchSpace, stack: Stack, found: Problems) -> dict[str, tuple[Order, ...]]:
    """Return the orders of the framework where nobody names one and ranks cannot be placed otherwise."""
    if stack.runs.any_place:
        return {}
    for order in space.orders:
        if order not in stack.runs.orders:
            _refuse(found, stack, {"order": order})
    return {} if space.orders else {"orders": stack.runs.orders}


def stack_law(stack: Stack, job: Mapping[str, str]) -> Law:
    """Return the law that the framework runs a plan."""
    reads = tuple(f.name for f in fields(Plan))
    return Law(f"{stack.name} launches it", reads, lambda plan: stack_problems(stack, plan, **job))


def launched(runs: Capabilities, columns: Columns, fixed: Mapping[str, Any]) -> Any:
    """Return which rows of plans obey the rules of a framework; `fixed` are fields that all rows share.

    >>> from shardwise.plans import find_stack
    >>> rows = {"pp": np.array([1, 2])}
    >>> launched(find_stack("megatron").runs, rows, {"sharding": "fsdp", "optimizer": "adam"}).tolist()
    [True, False]
    """

    def among(name: str, values: tuple[Any, ...]) -> Any:
        if name in ("offload", "modules"):
            return any(v in fixed.get(name, ()) for v in values)
        at = fixed.get(name, columns.get(name))
        if at is None or isinstance(at, str):
            return at is None or any(alike(at, str(v)) for v in values) or at in values
        if name in WORDS:
            return np.isin(at, [WORDS[name].index(v) for v in values])
        hits: Any = False
        for value in values:
            if isinstance(value, str):
                hits = hits | ((at > int(value[1:])) if value.startswith(">") else (at == columns[value]))
            else:
                hits = hits | (at == value)
        return hits

    legal = np.ones(len(columns["pp"]), bool)
    for rule in runs.rules:
        legal &= np.logical_not(rule.broken(among))
    return legal


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
        rows = {c: v[mine] for c, v in columns.items()}
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


def _launches(grid: PlanGrid, constraints: Constraints, rows: Columns, fixed: Mapping[str, Any]) -> _Runs:
    """Return which rows of a pipeline are launched with each sharding."""
    found, copied = dict[str, Any](), grid.copied(rows)
    weights, refused_plans = rows["places"] * len(grid.space.recompute), 0
    for sharding in grid.space.sharding:
        chosen = copied | (sharding == grid.space.sharding[0])
        runs = grid.launched(rows, sharding=sharding, **fixed)
        found[sharding] = chosen & runs
        refused = chosen & ~runs
        if refused.any():
            refused_plans += exact_sum(weights[refused])
            if STACK not in constraints.examples:
                first = {c: v[refused] for c, v in rows.items()}
                problem = example(grid.laws[STACK], first, {"sharding": sharding, **fixed})
                if problem is not None:
                    constraints.examples[STACK] = problem
    ways = sum(one.view(np.int8) for one in found.values())
    return _Runs(found, ways * weights, refused_plans)


def example(law: Law, columns: Columns, fixed: Mapping[str, Any]) -> Problem | None:
    """Return what the law of a framework says of the first of some rows."""
    row = {name: int(columns[name][0]) for name in DEGREES if name in columns and name != "vpp"}
    sequence = bool(columns["sequence_parallel"][0])
    kind = WORDS["cp_kind"][int(columns["cp_kind"][0])]
    plan = Plan(sequence_parallel=sequence, cp_kind=kind, **{**row, **fixed})  # type: ignore[arg-type]
    return next(iter(law.problems(plan)), None)
