"""The space of a search within what its framework can launch, and the law that says so of single plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from shardwise.errors import Problems
from shardwise.plans import (
    DEGREES,
    DIVISORS,
    JOB_WORDS,
    RECOMPUTES,
    SCHEDULES,
    Capabilities,
    Plan,
    Stack,
    alike,
    distinct_shardings,
    find_rules,
    find_sharding,
)
from shardwise.plans.laws import stack_problems
from shardwise.records import replace
from shardwise.search._columns import ColumnsRead
from shardwise.search._constraints import Law
from shardwise.search._space import WORDS, AxisOrder, IntRanges, SearchSpace, upto

STACK = "stack"
_JOINED = re.compile(r",(?! )")
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
    runs, fields, filled = stack.runs, Problems(), dict[str, Any]()
    for name, tried in TRIED.items():
        given = getattr(space, name)
        if name == "sharding":
            tried, given = (tuple(dict.fromkeys(map(runs.word, words))) for words in (tried, given))
            # What only FSDP has means nothing elsewhere; HSDP is searched where it is asked for.
            tried = tuple(word for word in tried if not find_sharding(word).keeps_gathered or word in runs.sharding)
        known = getattr(runs, name)
        own = tuple(one for one in tried if one in known) or (known if name == "schedule" else ())
        filled[name] = given or (tried if explore else own) or tried[:1]
        if not explore:
            for value in given:
                if value not in known:
                    _refuse(fields, stack, {name: value})
    if not explore:
        for name in ("offload", "modules", "stage_layers"):
            for value in getattr(space, name):
                uneven = {"stage_layers": (1, 2) if value != "usual" else ()}
                _refuse(fields, stack, {name: uneven.get(name, value)}, value if name in uneven else "")
        filled |= _degrees(space, stack, fields)
        filled |= _orders(space, stack, fields)
    fields.raise_if_any()
    return replace(space, **filled)


def _refuse(problems: Problems, stack: Stack, changed: Mapping[str, Any], word: str = "") -> None:
    """Record that a framework does not run a value, in the words of its law; `word` is what the space calls it.

    A space joins what goes together by plus signs, as commas part its choices.
    """
    whole = {"tp": 2, "cp": 2, "pp": 2, "dp": 2, "sequence_parallel": stack.runs.sequence_parallel[0], **changed}
    for problem in stack_problems(stack, Plan(**whole)):
        if problem.field in changed:
            value, remedy = word or problem.value, f"{problem.remedy}, or --explore"
            if isinstance(changed[problem.field], tuple) and isinstance(value, str):
                value, remedy = _JOINED.sub("+", value), _JOINED.sub("+", remedy)
            problems.items.append(replace(problem, value=value, remedy=remedy))


def _degrees(space: SearchSpace, stack: Stack, problems: Problems) -> dict[str, IntRanges]:
    """Return the degrees that stay 1, recording those that are to be above it."""
    kept = {}
    for axis in DEGREES:
        if axis in stack.runs.split:
            continue
        given: IntRanges = getattr(space, axis)
        if given.ranges and not given.of([1]):
            _refuse(problems, stack, {axis: given.ranges[0][0]})
        kept[axis] = upto(1)
    return kept


def _orders(space: SearchSpace, stack: Stack, problems: Problems) -> dict[str, tuple[AxisOrder, ...]]:
    """Return the orders of the framework where nobody names one and ranks cannot be placed otherwise."""
    if stack.runs.any_place:
        return {}
    for order in space.orders:
        if order not in stack.runs.orders:
            _refuse(problems, stack, {"order": order})
    return {} if space.orders else {"orders": stack.runs.orders}


def runs_whole(stack: Stack, plan: Plan, job: Mapping[str, str]) -> bool:
    """Return whether a framework runs a job with the choices of a plan, but without sharding.

    >>> from shardwise.plans import find_stack
    >>> megatron, offloaded = find_stack("megatron"), Plan(offload=("optimizer",))
    >>> [runs_whole(megatron, Plan(), {"precision": name}) for name in ("bf16", "bf16-masters16-moments16")]
    [True, False]
    >>> runs_whole(megatron, offloaded, {})
    False
    """
    whole = replace(plan, sharding="none", shard=1, sequence_parallel=stack.runs.sequence_parallel[0])
    return not any(problem.field == "sharding" for problem in stack_problems(stack, whole, **job))


def stack_law(stack: Stack, job: Mapping[str, str]) -> Law:
    """Return the law that the framework runs a plan."""
    reads = tuple(f.name for f in fields(Plan))
    return Law(f"{stack.name} launches it", reads, lambda plan: stack_problems(stack, plan, **job))


def launched(runs: Capabilities, columns: ColumnsRead, fixed: Mapping[str, Any]) -> Any:
    """Return which rows of plans obey the rules of a framework; `fixed` are fields that all rows share.

    >>> from shardwise.plans import find_stack
    >>> rows = {"pp": np.array([1, 2])}
    >>> launched(find_stack("megatron").runs, rows, {"sharding": "fsdp", "optimizer": "adam"}).tolist()
    [True, False]
    """

    def among(name: str, values: tuple[Any, ...]) -> Any:
        if name in ("offload", "modules"):
            return any(v in fixed.get(name, ()) for v in values)
        at = fixed.get(name) if name in JOB_WORDS else fixed.get(name, columns.get(name))
        if at is None or isinstance(at, str):
            return at is None or any(alike(at, str(v)) for v in values) or at in values
        if name in WORDS:
            return np.isin(at, [WORDS[name].index(v) for v in values])
        hits: Any = False
        for value in values:
            if isinstance(value, str) and value.startswith(DIVISORS):
                hits = hits | (columns[value.removeprefix(DIVISORS)] % at == 0)
            elif isinstance(value, str):
                hits = hits | ((at > int(value[1:])) if value.startswith(">") else (at == columns[value]))
            else:
                hits = hits | (at == value)
        return hits

    legal = np.ones(len(columns["pp"]), bool)
    for rule in (one for one in runs.rules if one.judges(fixed)):
        legal &= np.logical_not(rule.broken(among))
    return legal
