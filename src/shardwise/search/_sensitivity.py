"""What would change the winner: the next plans, how far behind they are, and the constants that could put them ahead.

Each constant in turn takes the blame for the whole spread of published times over predictions (bands.toml of `cost`
and of `serving`): rates move between 1/high and 1/low of what is assumed, overheads between low and high. A constant
whose own spread is narrower sensitivity no more than what is listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from shardwise.cost import Band, Efficiencies, band_of
from shardwise.hardware import Cluster, Tier, part_of
from shardwise.plans import Plan, Stack, Training
from shardwise.records import dataclass, replace
from shardwise.search._result import loss_of

if TYPE_CHECKING:
    from shardwise.search._serving import ServingResult
    from shardwise.search._training import TrainingResult
    from shardwise.serving import InferReport, ServingCase
    from shardwise.training import TrainingCase, TrainReport

TIMED = ("step", "throughput", "cost", "days", "ttft", "tpot", "latency")
# Share of the objective below which two plans are the same.
_ROUNDING = 1e-9
# Steps of the logarithm of a factor, from 1 to the end of its band, at which the gap of two plans is looked at, and how
# often the step in which it closes is cut again where it is not straight: 1/256 of a band is more than the two digits
# that are shown.
_STEPS, _ROUNDS = 16, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """A constant that puts a runner-up ahead within its band: `factor` of what is assumed at which they are equal.

    `regret` is the share by which the best is then worse, where the constant lies at that end of its band.
    """

    constant: str
    factor: float
    low: float
    high: float
    regret: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerUp:
    """A plan behind the best by a share of its objective, and the constants that would put it ahead."""

    report: TrainReport | InferReport
    behind: float
    sensitivity: tuple[Sensitivity, ...]


Hardware = tuple[Cluster, Efficiencies]


def _faster_device(cluster: Cluster, fields: tuple[str, ...], factor: float) -> Cluster:
    device = cluster.device
    values = {fact.field: fact.value * factor for fact in device.sources if fact.field.startswith(fields)}
    return replace(cluster, device=device.with_values(values, "moved within its band", "2026-11"))


def _faster_links(cluster: Cluster, fast: bool, factor: float) -> Cluster:
    def moved(place: int, tier: Tier) -> Tier:
        inner = place == 0 and tier.name != "network"
        return replace(tier, bytes_per_second=tier.bytes_per_second * factor) if inner == fast else tier

    return cluster.with_tiers(moved(i, tier) for i, tier in enumerate(cluster.tiers))


def _imposed(efficiencies: Efficiencies, name: str, factor: float) -> Efficiencies:
    """Return efficiencies with an achieved rate moved where one is imposed."""
    changes: dict[str, Any] = {name: getattr(efficiencies, name) * factor}
    return replace(efficiencies, **changes)


def _compute(m: Hardware, factor: float) -> Hardware:
    return _faster_device(m[0], ("matrix_flops.",), factor), _imposed(m[1], "matmul_flops_per_second", factor)


def _memory(m: Hardware, factor: float) -> Hardware:
    return _faster_device(m[0], ("memory_bytes_per_second",), factor), _imposed(m[1], "memory_bytes_per_second", factor)


def _fast(m: Hardware, factor: float) -> Hardware:
    return _faster_links(m[0], True, factor), _imposed(m[1], "fast_bytes_per_second", factor)


def _network(m: Hardware, factor: float) -> Hardware:
    return _faster_links(m[0], False, factor), _imposed(m[1], "slow_bytes_per_second", factor)


RATES: dict[str, Callable[[Hardware, float], Hardware]] = {
    "matrix FLOP/s": _compute,
    "memory bandwidth": _memory,
    "fast link": _fast,
    "network": _network,
}
OVERHEAD = "launch and step overhead"


def _moved_case(name: str, case: TrainingCase, factor: float) -> TrainingCase:
    """Return a training case with one constant moved."""
    if name == OVERHEAD:
        stack = case.stack
        times = {n: getattr(stack, n) * factor for n in ("eager_launch_seconds", "step_overhead_seconds")}
        return replace(case, stack=replace(stack, **times))
    cluster, efficiencies = RATES[name]((case.cluster, case.efficiencies), factor)
    return replace(case, cluster=cluster, efficiencies=efficiencies)


def _trained(name: str, report: TrainReport, factor: float) -> TrainReport:
    """Return a training plan with one constant moved."""
    from shardwise.training import report_of

    return report_of(_moved_case(name, report.case, factor), ())


def stacked(values: Sequence[Any]) -> Any:
    """Return records of one shape as one, numbers that differ as a column.

    >>> stacked([(1.0, "a"), (2.0, "a")])
    (array([1., 2.]), 'a')
    """
    first = values[0]
    if all(value is first for value in values):
        return first
    if is_dataclass(first) and not isinstance(first, type):
        names = [f.name for f in fields(first)]
        return replace(first, **{name: stacked([getattr(v, name) for v in values]) for name in names})
    if isinstance(first, tuple) and all(len(v) == len(first) for v in values):
        return tuple(stacked(items) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: stacked([v[key] for v in values]) for key in first}
    differ = isinstance(first, (int, float)) and any(value != first for value in values)
    return np.array(values, np.float64) if differ else first


Moves = Sequence[tuple[str, float]]


def _grouped(reports: Sequence[Any], alike: Callable[[Any], object]) -> list[list[int]]:
    """Return the places of the reports that can be evaluated as one column."""
    groups: dict[object, list[int]] = {}
    for place, report in enumerate(reports):
        groups.setdefault(alike(report), []).append(place)
    return list(groups.values())


def moved_steps(reports: Sequence[TrainReport], moves: Moves) -> list[list[float]]:
    """Return seconds of a step of each training plan with each of some constants moved, plans alike as columns.

    Plans that split a layer alike are priced as one column, of which each structure composes its own.
    """
    from shardwise.training import machine_of

    steps: list[list[float]] = [[]] * len(reports)
    machines: dict[TrainingCase, list[tuple[Stack, Any]]] = {}
    cases = [replace(one.case, plan=_as_split(one.plan)) for one in reports]
    for places in _grouped(cases, lambda one: replace(one, plan=_split_of(one.plan))):
        case = cases[places[0]]
        # Plans on the same devices meet the same machine but for where their groups lie.
        kind = replace(case, plan=Plan(offload=case.plan.offload))
        if kind not in machines:
            moved = [_moved_case(name, kind, factor) for name, factor in moves]
            machines[kind] = [(one.stack, machine_of(one, {})) for one in moved]
        seconds = _moved_seconds(case, [cases[place].plan for place in places], machines[kind])
        steps = _dealt(steps, places, seconds.tolist())
    return steps


def _as_split(plan: Plan) -> Plan:
    """Return a plan as those that split their sequence, where there is one rank to split it over."""
    return plan if plan.tp * plan.tp2 > 1 else replace(plan, sequence_parallel=True)


def _split_of(plan: Plan) -> Plan:
    """Return what plans whose layers are priced as one column agree in."""
    same = ("layout", "sequence_parallel", "cp_kind", "offload")
    return replace(Plan(), **{name: getattr(plan, name) for name in same})


def _moved_seconds(case: TrainingCase, plans: Sequence[Plan], moved: Sequence[tuple[Stack, Any]]) -> Any:
    """Return seconds of a step by plan and moved machine, of plans that split a layer alike."""
    from shardwise.search._remedies import stage_columns, structure
    from shardwise.training import ColumnPrices, sizes_of_columns, step_of

    sizes = sizes_of_columns([plan for plan in plans for _ in moved], case.job.global_batch, case.domains)
    stack, machine = stacked([*moved] * len(plans))
    machine, known = replace(machine, group_shapes=sizes.group_shapes), ColumnPrices[Any]()
    seconds = np.empty((len(plans), len(moved)))
    for own in _grouped(plans, structure):
        plan = plans[own[0]]
        # Rows of other structures stand for nothing here, and have the stages of this one.
        stages = stage_columns(case, [one if at in own else plan for at, one in enumerate(plans) for _ in moved])
        with np.errstate(all="ignore"):
            step = step_of(replace(case, plan=plan, stack=stack), sizes, stages, machine, known).total
        seconds[own] = np.broadcast_to(step, seconds.size).reshape(seconds.shape)[own]
    return seconds


def _dealt(lists: list[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    given = dict(zip(places, values, strict=True))
    return [given.get(place, one) for place, one in enumerate(lists)]


def _moved_serving(name: str, case: ServingCase, factor: float) -> ServingCase:
    """Return a case of serving with one constant moved."""
    if name == OVERHEAD:
        engine = case.engine
        times = {n: getattr(engine.host, n) * factor for n in ("step_seconds", "sequence_seconds")}
        graphs = replace(engine.graphs, small_kernel_seconds=engine.graphs.small_kernel_seconds * factor)
        return replace(case, engine=replace(engine, host=replace(engine.host, **times), graphs=graphs))
    cluster, efficiencies = RATES[name]((case.cluster, case.efficiencies), factor)
    return replace(case, cluster=cluster, efficiencies=efficiencies)


def moved_replicas(reports: Sequence[InferReport], moves: Moves) -> list[list[InferReport]]:
    """Return each deployment with the seconds that it takes with each of some constants moved, as columns."""
    from shardwise.serving import engine_cost_model, evaluate, sizes_of_columns

    replicas: list[list[InferReport]] = [[]] * len(reports)
    widest = max((one.case.cluster for one in reports), key=lambda cluster: cluster.num_devices)

    def whole(case: ServingCase) -> ServingCase:
        """Return a case on all devices where it is on a part of them: a replica does the same there."""
        return replace(case, cluster=widest) if part_of(widest, case.cluster.num_devices) == case.cluster else case

    def alike(one: InferReport) -> ServingCase:
        """Return what deployments agree in whose seconds are columns; room for sequences takes bytes alone."""
        return replace(whole(one.case), plan=Plan(), job=replace(one.job, batch=1, max_sequences=0))

    for places in _grouped(reports, alike):
        case, several = whole(reports[places[0]].case), [reports[place] for place in places for _ in moves]
        plans, batches = [one.plan for one in several], [one.job.batch for one in several]
        sizes = sizes_of_columns(case.model, plans, batches, case.domains, case.job)
        cases = [_moved_serving(name, case, factor) for name, factor in moves]
        costs = stacked([engine_cost_model(one, sizes) for one in cases] * len(places))
        one = replace(case, engine=stacked([moved.engine for moved in cases] * len(places)))
        with np.errstate(all="ignore"):
            cost = evaluate(one, sizes, costs)
        columns = (
            np.broadcast_to(v, len(plans)).tolist()
            for v in (cost.prefill.seconds, cost.decode.seconds, cost.request_seconds)
        )
        seen = [_retimed(report, *seconds) for report, *seconds in zip(several, *columns, strict=True)]
        replicas = _dealt(replicas, places, [seen[i : i + len(moves)] for i in range(0, len(seen), len(moves))])
    return replicas


def _retimed(report: InferReport, prefill: float, decode: float, request: float) -> InferReport:
    """Return a deployment whose batch takes other seconds."""
    e = report.evaluation
    passes = replace(e.prefill, seconds=prefill), replace(e.decode, seconds=decode)
    return replace(report, evaluation=replace(e, request_seconds=request, prefill=passes[0], decode=passes[1]))


def _served(name: str, report: InferReport, factor: float) -> InferReport:
    """Return a deployment with one constant moved."""
    from shardwise.serving import ServingOptions, infer

    case = _moved_serving(name, report.case, factor)
    options = ServingOptions(engine=case.engine, efficiencies=case.efficiencies)
    return infer(case.model, case.cluster, report.plan, report.job, options)


CONSTANTS = (*RATES, OVERHEAD)


def with_constant(report: TrainReport | InferReport, name: str, factor: float) -> TrainReport | InferReport:
    """Return a plan as predicted with one constant moved by a factor."""
    return _trained(name, report, factor) if _trains(report) else _served(name, cast("InferReport", report), factor)


def _trains(report: TrainReport | InferReport) -> TypeGuard[TrainReport]:
    """Return whether a report is of training; to ask for its class would load what serves, or what trains."""
    return isinstance(report.job, Training)


def constant_band(name: str, band: Band) -> tuple[float, float]:
    """Return how far a constant may lie from what is assumed where it alone explains the band of the seconds."""
    return (band.low, band.high) if name == OVERHEAD else (1 / band.high, 1 / band.low)


def runners_up(result: TrainingResult | ServingResult, most: int = 2) -> tuple[RunnerUp, ...]:
    """Return the next plans behind the best, at most so many, each of other degrees: those that tie with it first.

    Constants are moved where the objective is made of time; for the others none is listed.

    >>> from shardwise.models import load_model
    >>> from shardwise.search import plan_serving
    >>> from shardwise.plans import Serving
    >>> job, on = Serving(input_tokens=512, output_tokens=64), Cluster.parse("2xh100-sxm-80gb")
    >>> near = runners_up(plan_serving(load_model("llama-3.1-8b"), on, job))
    >>> near[0].behind > 0
    True
    """
    if len(result.best) < 2:
        return ()
    reports: Sequence[Any] = result.best
    best, *others = reports[: most + 1]
    moved, objective = _Moved(result), result.options.objective
    top = result.value(best)
    moved.look([best, *others])
    return tuple(
        RunnerUp(
            report=report,
            behind=loss_of(objective, result.value(report), top),
            sensitivity=ahead,
        )
        for report, ahead in zip(others, moved.overtaking(best, others), strict=True)
    )


def _band(result: TrainingResult | ServingResult) -> Band:
    best: Any = result.best[0]
    if _trains(best):
        return band_of("step_seconds", best.conditions)
    return band_of(result.options.serving_headline or "request_seconds", best.conditions)


@dataclass
class _Moved:
    """The objective of plans with one constant moved, each worked out once."""

    result: TrainingResult | ServingResult

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, str, float], float] = {}

    def _know(self, reports: Sequence[Any], moves: Moves) -> None:
        """Keep the objective of plans with each of some constants moved, all plans alike worked out as one column."""
        result: Any = self.result
        if _trains(reports[0]):
            steps = moved_steps(reports, moves)
            values = [[result.value_at(r, s) for s in own] for r, own in zip(reports, steps, strict=True)]
        else:
            values = [[result.value(one) for one in own] for own in moved_replicas(reports, moves)]
        for report, own in zip(reports, values, strict=True):
            self._known |= {(id(report), *move): value for move, value in zip(moves, own, strict=True)}

    @cached_property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The ends of the band of each constant, as factors of what is assumed."""
        return {name: constant_band(name, _band(self.result)) for name in CONSTANTS}

    def look(self, reports: Sequence[Any]) -> None:
        """Work out the objective of plans at all ends at once."""
        result: Any = self.result
        self._known |= {(id(report), name, 1.0): result.value(report) for report in reports for name in CONSTANTS}
        moves = [(name, end) for name, ends in self.ends.items() for end in ends if end != 1]
        if moves and result.options.objective in TIMED:
            self._know(reports, moves)

    def _gap(self, best: Any, other: Any, name: str, factor: float) -> float:
        """Return the share by which the other plan is behind with a constant moved."""
        return self._known[id(other), name, factor] / self._known[id(best), name, factor] - 1

    def overtaking(self, best: Any, others: Sequence[Any]) -> list[tuple[Sensitivity, ...]]:
        """Return for each of some plans the constants that put it ahead of the best within their bands."""
        if self.result.options.objective not in TIMED:
            return [()] * len(others)
        # Plans that are the same but for rounding do not overtake each other.
        places, moves = range(len(others)), [(name, end) for name, ends in self.ends.items() for end in ends]
        ways = [(p, *m) for p in places for m in moves if m[1] != 1 and self._gap(best, others[p], *m) < -_ROUNDING]

        def gaps(asked: _Asked) -> dict[int, list[float]]:
            seen = {(ways[i][0], (ways[i][1], f)) for i, factors in asked.items() for f in factors}
            if new := {(p, move) for p, move in seen if (id(others[p]), *move) not in self._known}:
                self._know([best, *(others[p] for p in sorted({p for p, _ in new}))], sorted({move for _, move in new}))
            return {i: [self._gap(best, others[ways[i][0]], ways[i][1], f) for f in some] for i, some in asked.items()}

        rows: list[list[Sensitivity]] = [[] for _ in others]
        for (place, name, end), factor in zip(ways, crossings(gaps, [end for *_, end in ways]), strict=True):
            regret = self._known[id(best), name, end] / self._known[id(others[place]), name, end] - 1
            low, high = self.ends[name]
            rows[place].append(Sensitivity(constant=name, factor=factor, low=low, high=high, regret=regret))
        return list(map(tuple, rows))


_Asked = Mapping[int, Sequence[float]]


def crossings(gaps: Callable[[_Asked], Mapping[int, Sequence[float]]], ends: Sequence[float]) -> list[float]:
    """Return for each of some gaps a factor between 1 and its end beyond which it is below zero.

    Factors of all gaps are asked for together.

    >>> factors = crossings(lambda asked: {i: [f - 0.8 - i / 10 for f in own] for i, own in asked.items()}, [0.5, 0.6])
    >>> [round(factor, 4) for factor in factors]
    [0.8, 0.9]
    """
    searches = [_crossing(end) for end in ends]
    asked, factors = {place: next(one) for place, one in enumerate(searches)}, dict[int, float]()
    while asked:
        answers, asked = gaps(asked), {}
        for place, own in answers.items():
            try:
                asked[place] = searches[place].send(own)
            except StopIteration as done:
                factors[place] = done.value
    return [factors[place] for place in range(len(ends))]


def _crossing(end: float) -> Generator[Sequence[float], Sequence[float], float]:
    """Yield factors at which a gap is asked for until it is known where between 1 and `end` it falls below zero.

    A gap may jump where another operator binds, so that steps are even; a column of many factors takes hardly longer
    than one of few.
    """
    near, far = 0.0, math.log(end)
    above, below = yield (1.0, end)
    for _ in range(_ROUNDS if above > 0 else 0):
        places = [near + (far - near) * i / _STEPS for i in range(1, _STEPS)]
        values = [*(yield [math.exp(place) for place in places]), below]
        around, gaps = [near, *places, far], [above, *values]
        first = next(i for i, gap in enumerate(values) if gap < 0)
        near_it = slice(max(first - 1, 0), first + 3)
        if _is_straight(gaps[near_it]):
            return math.exp(_zero(around[near_it], gaps[near_it]))
        (near, far), (above, below) = around[first : first + 2], gaps[first : first + 2]
    return math.exp(near + (far - near) * above / (above - below) if above > 0 else near)


def _is_straight(gaps: Sequence[float]) -> bool:
    """Return whether lines through each two of gaps at even steps meet zero at one place but for a share of a step."""
    falls = [a - b for a, b in pairwise(gaps)]
    meets = [at + gap / fall for at, (gap, fall) in enumerate(zip(gaps, falls, strict=False)) if fall > 0]
    return len(meets) == len(falls) and max(meets) - min(meets) < 1 / _STEPS


def _zero(places: Sequence[float], gaps: Sequence[float]) -> float:
    """Return where gaps that fall at some places are zero, by Lagrange's polynomial of the place over the gap.

    >>> round(_zero([0.0, 1.0, 2.0], [1.0, 0.4, -0.4]), 4)
    1.5476
    """
    others = [[b / (b - a) for j, b in enumerate(gaps) if j != i] for i, a in enumerate(gaps)]
    return sum(place * math.prod(shares) for place, shares in zip(places, others, strict=True))
