"""For every law and limit of a search of training plans, the single change that helps with the least loss.

Of all plans that were rejected, those one change away from the best plans are looked at: changed back, such a plan is
one of the best, so no other single change of a rejected plan loses less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.errors import Problem
from shardwise.hardware import part_of
from shardwise.plans import AXES, STAGE_AXES, Plan, divisors, splits_replicas
from shardwise.records import dataclass, replace
from shardwise.search._constraints import Law, staged
from shardwise.search._empty import empty_rejections, why_empty
from shardwise.search._grid import PlanGrid
from shardwise.search._limits import PlanLimits
from shardwise.search._options import OBJECTIVES, TRAIN_LIMITS
from shardwise.search._result import PlanCounts, Rejection, Remedy, loss_of, missed
from shardwise.training import (
    Evaluation,
    PricedBlocks,
    Stages,
    TrainingCase,
    TrainReport,
    evaluate,
    leaner,
    report_of,
    sizes_of_columns,
    stages_of,
)
from shardwise.units import show_bytes

_BASES = 4
# Plans from which on a column takes less time than one after the other.
_COLUMN = 6
_FAR = "none of them is one change away from the best"
TOO_LARGE = "memory"


@dataclass(frozen=True, kw_only=True, slots=True)
class RejectedPlan:
    """A plan that a law or a limit rejected, one field away from one of the best plans: by what and by how much.

    `base` is the place of that one among the best.
    """

    name: str
    field: str
    base: int
    value: object
    problem: Problem | None = None
    step_seconds: float = 0.0
    device_bytes: float = 0.0
    miss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Remedies:
    """What would help the plans that a search rejected; each answer is worked out when it is asked for.

    `plans` are those of `best`, reported when they are asked for; `nearest` is told where nothing is feasible.
    """

    grid: PlanGrid
    limits: PlanLimits
    limit_bytes: float
    counts: PlanCounts
    rejections: Counter[str]
    examples: Mapping[str, Problem]
    plans: Sequence[Plan]
    best: Sequence[TrainReport]
    nearest: TrainReport | None

    @property
    def _objective(self) -> str:
        return self.limits.options.objective

    def _value(self, base: TrainReport, one: TrainReport | RejectedPlan | None = None) -> float:
        """Return the objective of a plan, or of one on as many devices."""
        value = one or base
        seconds = self.limits.ranked(value.step_seconds, base.plan.num_devices) / base.goodput
        return float(OBJECTIVES[self._objective](seconds, value.device_bytes, base.plan.num_devices))

    @cached_property
    def _unlawful(self) -> tuple[dict[str, RejectedPlan], list[Near]]:
        """The first plan beside the few best that each law rejected, and the legal ones beside the best one.

        Plans beside the next ones lose more: they are looked at for laws alone that rejected none before.
        """
        laws, by_law, legal = self.grid.laws, dict[str, RejectedPlan](), list[Near]()
        known: LawsAsked = {}
        for place, base in enumerate(self.plans[:_BASES]):
            if place:
                # What comes behind the last law without such a plan does not matter.
                open_laws = [i for i, name in enumerate(laws) if self.rejections[name] and name not in by_law]
                laws = dict([*laws.items()][: max(open_laws, default=-1) + 1])
            for field, plan in neighbours(self.grid, base):
                broken = broken_law(laws, plan, known)
                if broken is not None:
                    name, problem = broken
                    one = RejectedPlan(name=name, field=field, base=place, value=getattr(plan, field), problem=problem)
                    by_law.setdefault(name, one)
                elif place == 0:
                    legal.append((field, plan))
        return by_law, legal

    @cached_property
    def _neighbours(self) -> list[RejectedPlan]:
        """Plans beside the best that were rejected; laws beside the few best, memory and limits beside the best one."""
        neighbours, legal = self._unlawful
        return [*neighbours.values(), *self._missing(legal)]

    def _missing(self, legal: Sequence[Near]) -> Iterator[RejectedPlan]:
        """Yield those of some plans beside the best one that do not fit or miss a limit."""
        for (field, plan), (required, shown, seconds) in zip(
            legal, measured(self.grid, [p for _, p in legal]), strict=True
        ):
            ratios = {TOO_LARGE: required / self.limit_bytes, **self._ratios(seconds, shown, plan.num_devices)}
            name = next((name for name, ratio in ratios.items() if ratio > 1), "")
            if name:
                yield RejectedPlan(
                    name=name,
                    field=field,
                    base=0,
                    value=getattr(plan, field),
                    step_seconds=seconds,
                    device_bytes=shown,
                    miss=ratios[name] - 1,
                )

    def _ratios(self, seconds: float, needed: float, devices: int) -> dict[str, float]:
        return self.limits.ratios(seconds, needed, devices)

    def of(self, name: str) -> Remedy | None:
        """Return what would help plans that a law or a limit rejected, None where none is beside the best plans."""
        near = [rejected for rejected in self._neighbours if rejected.name == name]
        if not near:
            return self._alone(name)
        best = self.best[0]
        if name == TOO_LARGE:
            top = self._value(best)
            quicker = [f for f in near if self._value(best, f) < top]
            one = min(quicker or near, key=lambda f: f.miss)
        else:
            one = min(near, key=lambda f: f.miss)
        base = self.best[one.base]
        return Remedy(
            why=self._why(one),
            field=one.field,
            value=getattr(base.plan, one.field),
            loss=loss_of(self._objective, self._value(base), self._value(best)),
            best=one.base == 0,
            objective=self._objective,
        )

    def _alone(self, name: str) -> Remedy | None:
        """Return by how much the nearest plan misses a limit that none keeps."""
        near, miss = self.nearest, 0.0
        if near is not None:
            miss = self._ratios(near.step_seconds, near.device_bytes, near.plan.num_devices).get(name, 0.0) - 1
        return Remedy(why=f"the nearest {missed(miss)}") if miss > 0 and not self.best else None

    def _why(self, one: RejectedPlan) -> str:
        if one.problem is not None:
            return str(one.problem)
        change = f"{one.field.replace('_', ' ')} {str(one.value).lower()}"
        if one.name != TOO_LARGE:
            return f"{change} {missed(one.miss)}"
        pace = _pace(self.best[one.base].step_seconds, one.step_seconds)
        return f"{change} is {one.miss:.1%} short of memory, and would be {pace}"

    def _memory(self) -> str:
        """Return what makes the nearest plan fit: fewer bytes of the same plan, or of the same job."""
        nearest = self.nearest
        if nearest is None or self.best:
            return ""
        lacks = nearest.verdict.host_short_by_bytes
        short = f"the nearest is {nearest.verdict.required_bytes / self.limit_bytes - 1:.1%} short"
        if lacks:
            short = f"the nearest lacks {show_bytes(lacks)} on the host of a node"
        smaller = [
            c for c in nearest.changes if c.required_bytes <= self.limit_bytes and c.field in ("recompute", "sharding")
        ]
        if smaller and not lacks:
            slower = smaller[0].step_seconds / nearest.step_seconds - 1
            return f"{short}: {smaller[0].field} {smaller[0].value} fits, {_percent(slower)}"
        fewer = leaner(nearest.case.cluster.device)
        for field, value in fewer.items():
            changes: dict[str, Any] = {field: value}
            one = report_of(replace(nearest.case, job=replace(nearest.job, **changes)), ())
            if one.verdict.required_bytes <= self.limit_bytes and not one.verdict.host_short_by_bytes:
                pace = _pace(nearest.step_seconds, one.step_seconds)
                return f"{short}: --{field} {value} fits ({show_bytes(one.device_bytes)}), {pace}"
        tried = " nor ".join(f"--{field} {value}" for field, value in fewer.items())
        savers = next((f", or add {one.flags} to the nearest" for one in nearest.proposals if one.fits), "")
        return f"{short}, and neither recomputation nor {tried} makes it fit alone: use more devices{savers}"

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans each rejected and a remedy."""
        laws, plans = self.grid.laws, self.grid.num_plans
        if not plans:
            return empty_rejections(why_empty(self.grid))
        rows = [self._row(name, law.title, str(self.examples.get(name, ""))) for name, law in laws.items()]
        limited = not self.best and any(self.rejections[name] for name in TRAIN_LIMITS)
        # Where what fits does not keep the limits more memory alone would not help.
        memory = "" if limited else self._memory()
        title = "more memory than a device has, with the wanted chance to fit"
        rows.append(self._row(TOO_LARGE, title, memory, self.counts.too_large))
        rows += [self._row(name, title, _FAR) for name, title in TRAIN_LIMITS.items()]
        return tuple(row for row in rows if row.count)

    def _row(self, name: str, title: str, otherwise: str, count: int | None = None) -> Rejection:
        count = self.rejections[name] if count is None else count
        remedy = str(self.of(name) or otherwise) if count else ""
        return Rejection(name=name, title=title, count=count, remedy=remedy)


def _percent(slower: float) -> str:
    return "equally fast" if abs(slower) < 5e-4 else f"{abs(slower):.1%} {'slower' if slower > 0 else 'quicker'}"


def _pace(base: float, other: float) -> str:
    """Return in words how much quicker or slower a plan is than another, by the seconds of their steps."""
    gain = base / other - 1
    return f"{gain:.1%} quicker" if gain >= 5e-4 else _percent(other / base - 1)


Near = tuple[str, Plan]


def neighbours(grid: PlanGrid, plan: Plan) -> Iterator[Near]:
    """Yield (field, plan) for every other value of a field in the space; replicas and what has no effect follow."""
    for field, changed in (*_degrees(grid, plan), *_words(grid, plan)):
        neat = _neat(grid, changed)
        if neat is not None and neat != plan:
            yield field, neat


def _degrees(grid: PlanGrid, plan: Plan) -> Iterator[Near]:
    space, n = grid.space, plan.num_devices
    for axis in (axis for axis in AXES if axis != "dp"):
        if axis == "tp2" and plan.layout == "1d":
            continue
        used = n // plan.dp // getattr(plan, axis)
        for value in getattr(space, axis).of(divisors(n)):
            replicas = n // (used * value)
            too_deep = axis == "pp" and value > grid.case.model.num_layers
            if value == getattr(plan, axis) or too_deep or n % (used * value) or not space.dp.of([replicas]):
                continue
            # Other degrees fill the fastest domain in the order of the axes.
            changes: dict[str, Any] = {axis: value, "dp": replicas, "fast": ()}
            yield axis, replace(plan, **changes)
    for ep, etp in grid.expert_ways(n):
        if (ep == plan.ep) != (etp == plan.etp):
            yield "etp" if ep == plan.ep else "ep", replace(plan, ep=ep, etp=etp)


def _words(grid: PlanGrid, plan: Plan) -> Iterator[Near]:
    space = grid.space
    choices: dict[str, Any] = {
        "micro_batch": grid.micro_batches,
        "recompute": space.recompute,
        "sharding": space.sharding,
        "sequence_parallel": space.sequence_parallel,
        "cp_kind": space.cp_kind,
        "panels": grid.panels if plan.layout == "summa" else [],
    }
    for field, values in choices.items():
        for value in values:
            if value != getattr(plan, field):
                changes: dict[str, Any] = {field: value}
                yield field, replace(plan, **changes)
    for schedule, vpp in grid.compositions(plan.pp):
        changes = {"schedule": schedule, "vpp": vpp}
        if schedule != plan.schedule:
            yield "schedule", replace(plan, **changes)
        elif vpp != plan.vpp:
            yield "vpp", replace(plan, **changes)


def _neat(grid: PlanGrid, plan: Plan) -> Plan | None:
    """Return a plan with choices that have no effect as the space has them; None where the space has no such plan."""
    space, changes = grid.space, dict[str, Any]()
    if plan.tp == 1 or plan.layout == "summa":
        changes["sequence_parallel"] = False
    if plan.cp == 1:
        changes["cp_kind"] = space.cp_kind[0]
    pipes, lone = grid.compositions(plan.pp), grid.lone_shardings
    copied = bool(grid.copied({name: getattr(plan, name) for name in (*STAGE_AXES, "ep", "etp")}))
    if not pipes or not (copied or lone):
        return None
    if not copied and plan.sharding not in lone:
        changes["sharding"] = lone[0]
    if (plan.schedule, plan.vpp) not in pipes:
        same = [pipe for pipe in pipes if pipe[0] == plan.schedule]
        changes["schedule"], changes["vpp"] = (same or pipes)[0]
    return staged(grid.case, replace(plan, stage_layers=(), **changes))


LawsAsked = dict[tuple[str, *tuple[object, ...]], tuple[Problem, ...]]
_STAGED = {"pipeline": ("schedule", "vpp"), "schedule": ("schedule", "vpp", "pp")}


def broken_law(laws: dict[str, Law], plan: Plan, known: LawsAsked | None = None) -> tuple[str, Problem] | None:
    """Return the first law that a plan breaks, in the order in which a search asks them, and its first problem.

    What laws say of other plans is `known`: most that differ in one field are the same to most laws.
    """
    known = {} if known is None else known
    for name, law in laws.items():
        fields = *law.reads, *_STAGED.get(name, ())
        key = name, *(getattr(plan, field) for field in fields)
        if key not in known:
            known[key] = law.problems(Plan(**{"sequence_parallel": False, **dict(zip(fields, key[1:], strict=True))}))
        if known[key]:
            return name, known[key][0]
    return None


def case_of(grid: PlanGrid, plan: Plan) -> TrainingCase:
    """Return the case of a plan of a space, on the devices that it fills."""
    return replace(grid.case, plan=plan, cluster=part_of(grid.case.cluster, plan.num_devices))


def report_on(grid: PlanGrid, plan: Plan) -> TrainReport:
    """Return the report of a legal plan of a space."""
    return report_of(case_of(grid, plan), (), grid.priced.setdefault(plan.num_devices, PricedBlocks()))


def measured(grid: PlanGrid, plans: Sequence[Plan]) -> list[tuple[float, float, float]]:
    """Return the bytes that a device has to have and shows, and seconds of a step, of legal plans on as many devices.

    Those alike are evaluated as columns.
    """
    groups: dict[tuple[object, ...], list[int]] = {}
    for place, plan in enumerate(plans):
        groups.setdefault(structure(plan), []).append(place)
    values: dict[int, tuple[float, float, float]] = {}
    for places in groups.values():
        if len(places) < _COLUMN:
            for place in places:
                one = report_on(grid, plans[place])
                values[place] = one.evaluation.required, one.device_bytes, one.step_seconds
            continue
        some = [plans[place] for place in places]
        case = case_of(grid, some[0])
        with np.errstate(all="ignore"):
            evaluated = evaluate_columns(case, some)
            shown = evaluated.needed + evaluated.resident
        numbers = evaluated.required, shown, evaluated.step.total
        columns = (np.broadcast_to(column, len(some)).tolist() for column in numbers)
        values |= dict(zip(places, zip(*columns, strict=True), strict=True))
    return [values[place] for place in range(len(plans))]


def structure(plan: Plan) -> tuple[object, ...]:
    """Return what plans must have in common to be evaluated as one column.

    >>> structure(Plan(tp=2)) == structure(Plan(pp=4)), structure(Plan()) == structure(Plan(recompute="full"))
    (True, False)
    """
    same = ("layout", "sequence_parallel", "cp_kind", "schedule", "sharding", "recompute", "modules", "offload")
    return (*(getattr(plan, name) for name in same), bool(plan.recompute_layers), splits_replicas(plan))


def stage_columns(case: TrainingCase, plans: Sequence[Plan]) -> tuple[Stages[Any], ...]:
    """Return the stages of plans of one `structure` as columns; who has fewer runs has runs of no stages."""
    known: dict[Plan, tuple[Stages[float], ...]] = {}
    for plan in plans:
        if plan not in known:
            known[plan] = stages_of(replace(case, plan=plan))
    longest = max(map(len, known.values()))
    rows = {plan: (*row, *[replace(row[-1], count=0)] * (longest - len(row))) for plan, row in known.items()}
    return tuple(_stacked(runs) for runs in zip(*(rows[plan] for plan in plans), strict=True))


def evaluate_columns(case: TrainingCase, plans: Sequence[Plan]) -> Evaluation[Any]:
    """Return memory and time of plans of one `structure` as columns."""
    sizes = sizes_of_columns(plans, case.job.global_batch, case.domains)
    return evaluate(replace(case, plan=plans[0]), sizes, stage_columns(case, plans))


def _stacked(runs: Sequence[Stages[float]]) -> Stages[Any]:
    """Return a run of many plans, its numbers columns."""

    def column(values: Sequence[Any]) -> Any:
        if isinstance(values[0], tuple):
            return tuple(map(column, zip(*values, strict=True)))
        return np.array(values, np.float64)

    return Stages(**{one.name: column([getattr(run, one.name) for run in runs]) for one in fields(Stages)})
