"""What an exporter hands back, and how it finds out that the target cannot say something."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, fields, is_dataclass, replace
from typing import cast

from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Sharding, Stack, Training
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportCase:
    """What is exported: a complete plan and job of a model on a cluster, in a framework."""

    model: Model
    cluster: Cluster
    plan: Plan
    job: Training
    stack: Stack


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Ready files by name, the version that they were checked against, and what is left to be filled in.

    `launch` is the command that starts them on each of `nodes`, with `node_devices` devices; empty where the training
    script is the user's. A server (`serves`) stands there in so many `copies`, each on nodes of its own.
    """

    system: str
    version: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = field(default=())
    launch: str = ""
    nodes: int = 1
    node_devices: int = 0
    copies: int = 1
    serves: bool = False


def differences(ours: object, theirs: object, path: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (path, ours, theirs) of every value in which two of a kind differ.

    >>> list(differences(Plan(tp=2), Plan()))
    [('tp', 2, 1)]
    """
    if type(ours) is type(theirs) and is_dataclass(ours) and not isinstance(ours, type):
        for one in fields(ours):
            inner = f"{path}.{one.name}" if path else one.name
            yield from differences(getattr(ours, one.name), getattr(theirs, one.name), inner)
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            yield from differences(a, b, f"{path}[{i}]")
    elif ours != theirs:
        yield path, ours, theirs


def refuse(
    system: str,
    found: Mapping[str, tuple[object, object]],
    case: ExportCase | None = None,
    adapters: bool = False,
) -> None:
    """Raise `InputError` naming every field that a system cannot say, or that a case's framework does not run.

    A system whose files say `adapters` is asked for them in `found`.
    """
    problems: list[Problem] = []
    if case is not None:
        problems = [*_unlaunched(case), *(() if adapters else _tuned(case, system))]
    named = {problem.field for problem in problems}
    problems += [
        Problem(path, _short(ours), f"cannot be said to {system}", _remedy(theirs))
        for path, (ours, theirs) in found.items()
        if path not in named
    ]
    if problems:
        raise InputError(problems)


def worded(case: ExportCase) -> ExportCase:
    """Return a case whose sharding is in its framework's own word."""
    sharding = cast(Sharding, case.stack.runs.word(case.plan.sharding))
    return replace(case, plan=replace(case.plan, sharding=sharding))


def _unlaunched(case: ExportCase) -> tuple[Problem, ...]:
    """Return what the framework of a case does not run."""
    precision = case.job.precision or case.stack.precision
    return stack_problems(case.stack, case.plan, precision=precision, optimizer=case.job.optimizer)


def _tuned(case: ExportCase, system: str) -> Iterator[Problem]:
    """Yield what a fine-tuning asks that no file of a system says: the training script makes adapters."""
    for name in ("adapter", "base", "trains"):
        if value := getattr(case.job, name):
            shown = ",".join(value) if isinstance(value, tuple) else value
            yield Problem(name, shown, f"cannot be said to {system}", "leave it out: the training script says it")
    if case.job.capacity_factor and system != "Megatron-LM":
        yield Problem("capacity_factor", case.job.capacity_factor, f"cannot be said to {system}", "leave it out")


Found = dict[str, tuple[object, object]]


def untold(plan: Plan, told: frozenset[str]) -> tuple[Plan, Found]:
    """Return a plan without what a system has no word for, and every field of that with what it was and became.

    >>> untold(Plan(tp=2, pp=2, sequence_parallel=False), frozenset({"tp"}))[1]
    {'pp': (2, 1)}
    """
    plain = Plan(sequence_parallel=False)
    pairs = {f.name: (getattr(plan, f.name), getattr(plain, f.name)) for f in fields(Plan) if f.name not in told}
    found = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    return replace(plan, **{name: pair[1] for name, pair in found.items()}), found


def _short(value: object) -> object:
    """Return a value as plain words: parts of a model by their names.

    >>> _short((1, 2)), _short(Plan()), _short(())
    ('1, 2', 'Plan', 'none')
    """
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, (tuple, list)):
        return ", ".join(str(_short(one)) for one in value) or "none"
    return getattr(value, "name", "") or type(value).__name__


def _remedy(value: object) -> str:
    return "leave it out" if is_dataclass(value) or value is None or value == () else f"use {_short(value)}"
