"""Plans and deployments with one constant of the hardware moved: many moves, and plans alike, as one column."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from shardwise.cost import Band, Efficiencies
from shardwise.hardware import Cluster, Tier, part_of
from shardwise.plans import Plan, Stack, Training
from shardwise.records import replace

if TYPE_CHECKING:
    from shardwise.serving import InferReport, ServingCase
    from shardwise.training import TrainingCase, TrainReport

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
    return _trained(name, report, factor) if is_training(report) else _served(name, cast("InferReport", report), factor)


def is_training(report: TrainReport | InferReport) -> TypeGuard[TrainReport]:
    """Return whether a report is of training; to ask for its class would load what serves, or what trains."""
    return isinstance(report.job, Training)


def constant_band(name: str, band: Band) -> tuple[float, float]:
    """Return how far a constant may lie from what is assumed where it alone explains the band of the seconds."""
    return (band.low, band.high) if name == OVERHEAD else (1 / band.high, 1 / band.low)
