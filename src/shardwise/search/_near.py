"""Plans of a space that differ from one plan in a single field, and what becomes of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.errors import Problem
from shardwise.plans import Plan, divisors
from shardwise.search._laws import Law, staged
from shardwise.search._rows import Rows
from shardwise.search._search import part_of
from shardwise.training import TrainReport
from shardwise.training._report import report_of

Near = tuple[str, Plan]


def neighbours(rows: Rows, plan: Plan) -> Iterator[Near]:
    """Yield (field, plan) for every other value of a field in the space; replicas and what has no effect follow."""
    for field, changed in (*_degrees(rows, plan), *_words(rows, plan)):
        neat = _neat(rows, changed)
        if neat is not None and neat != plan:
            yield field, neat


def _degrees(rows: Rows, plan: Plan) -> Iterator[Near]:
    s, n = rows.space, plan.num_devices
    for axis in ("tp", "tp2", "cp", "pp"):
        if axis == "tp2" and plan.layout == "1d":
            continue
        used = n // plan.dp // getattr(plan, axis)
        for value in getattr(s, axis).of(divisors(n)):
            replicas = n // (used * value)
            too_deep = axis == "pp" and value > rows.case.model.num_layers
            if value == getattr(plan, axis) or too_deep or n % (used * value) or not s.dp.of([replicas]):
                continue
            # Other degrees fill the fastest domain in the order of the axes.
            changes: dict[str, Any] = {axis: value, "dp": replicas, "fast": ()}
            yield axis, replace(plan, **changes)
    for ep, etp in rows.expert_ways(n):
        if (ep == plan.ep) != (etp == plan.etp):
            yield "etp" if ep == plan.ep else "ep", replace(plan, ep=ep, etp=etp)


def _words(rows: Rows, plan: Plan) -> Iterator[Near]:
    s = rows.space
    choices: dict[str, Any] = {
        "micro_batch": rows.micro_batches,
        "recompute": s.recompute,
        "sharding": s.sharding,
        "sequence_parallel": s.sequence_parallel,
        "cp_kind": s.cp_kind,
        "panels": rows.panels if plan.layout == "summa" else [],
    }
    for field, values in choices.items():
        for value in values:
            if value != getattr(plan, field):
                changes: dict[str, Any] = {field: value}
                yield field, replace(plan, **changes)
    for schedule, vpp in rows.compositions(plan.pp):
        changes = {"schedule": schedule, "vpp": vpp}
        if schedule != plan.schedule:
            yield "schedule", replace(plan, **changes)
        elif vpp != plan.vpp:
            yield "vpp", replace(plan, **changes)


def _neat(rows: Rows, plan: Plan) -> Plan | None:
    """Return a plan with choices that have no effect as the space has them; None where the space has no such plan."""
    s, changes = rows.space, dict[str, Any]()
    if plan.tp == 1 or plan.layout == "summa":
        changes["sequence_parallel"] = False
    if plan.cp == 1:
        changes["cp_kind"] = s.cp_kind[0]
    if plan.dp * plan.cp == 1:
        changes["sharding"] = s.sharding[0]
    pipes = rows.compositions(plan.pp)
    if not pipes:
        return None
    if (plan.schedule, plan.vpp) not in pipes:
        same = [pipe for pipe in pipes if pipe[0] == plan.schedule]
        changes["schedule"], changes["vpp"] = (same or pipes)[0]
    return staged(rows.case, replace(plan, stage_layers=(), **changes))


def broken_law(laws: dict[str, Law], plan: Plan) -> tuple[str, Problem] | None:
    """Return the first law that a plan breaks, in the order in which a search asks them, and its first problem."""
    beside = {"pipeline": ("schedule", "vpp"), "schedule": ("schedule", "vpp", "pp")}
    for name, law in laws.items():
        values = {field: getattr(plan, field) for field in (*law.reads, *beside.get(name, ()))}
        problems = law.problems(Plan(**{"sequence_parallel": False, **values}))
        if problems:
            return name, problems[0]
    return None


def report_on(rows: Rows, plan: Plan) -> TrainReport:
    """Return the report of a legal plan of a space."""
    return report_of(replace(rows.case, plan=plan, cluster=part_of(rows.case.cluster, plan.num_devices)), ())
