"""What would change the winner: the next plans, how far behind they are, and the constants that could put them ahead.

Each constant in turn takes the blame for the whole spread of published times over predictions (bands.toml of `cost`
and of `serving`): rates move between 1/high and 1/low of what is assumed, overheads between low and high. A constant
whose own spread is narrower sensitivity no more than what is listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from shardwise.cost import Band, Efficiencies, band_of
from shardwise.hardware import Cluster, Tier
from shardwise.plans import Training
from shardwise.records import dataclass
from shardwise.search._result import loss_of

if TYPE_CHECKING:
    from shardwise.search._serving import ServingResult
    from shardwise.search._training import TrainingResult
    from shardwise.serving import InferReport
    from shardwise.training import TrainingCase, TrainReport

TIMED = ("step", "throughput", "cost", "days", "ttft", "tpot", "latency")
_STEPS = 40
# Share of the objective below which two plans are the same.
_ROUNDING = 1e-9
# Of the logarithm of a factor: more digits than are shown.
_CLOSE = 1e-5


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
    from shardwise.training._report import report_of

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


def moved_seconds(report: TrainReport, moves: Sequence[tuple[str, float]]) -> list[float]:
    """Return seconds of a step of a training plan with each of some constants moved, all as one column."""
    from shardwise.training import sizes_of, sizes_of_columns, stages_of
    from shardwise.training._evaluate import machine_of, step_of

    case = report.case
    cases = [_moved_case(name, case, factor) for name, factor in moves]
    if len(moves) == 1:
        z: Any = sizes_of(case.plan, case.job.global_batch, case.domains)
        return [float(step_of(cases[0], z, stages_of(case), machine_of(cases[0], z.spans)).total)]
    z = sizes_of_columns([case.plan] * len(moves), case.job.global_batch, case.domains)
    machine = stacked([machine_of(one, z.spans) for one in cases])
    one = replace(case, stack=stacked([moved.stack for moved in cases]))
    seconds = step_of(one, z, stages_of(case), machine).total
    return [float(value) for value in np.broadcast_to(seconds, len(moves))]


def _served(name: str, report: InferReport, factor: float) -> InferReport:
    """Return a deployment with one constant moved."""
    from shardwise.serving import ServingOptions, infer

    case = report.case
    engine, cluster, efficiencies = case.engine, case.cluster, case.efficiencies
    if name == OVERHEAD:
        times = {n: getattr(engine.host, n) * factor for n in ("step_seconds", "sequence_seconds")}
        graphs = replace(engine.graphs, small_kernel_seconds=engine.graphs.small_kernel_seconds * factor)
        engine = replace(engine, host=replace(engine.host, **times), graphs=graphs)
    else:
        cluster, efficiencies = RATES[name]((cluster, efficiencies), factor)
    return infer(case.model, cluster, report.plan, report.job, ServingOptions(engine=engine, efficiencies=efficiencies))


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


def runners_up(found: TrainingResult | ServingResult, most: int = 3) -> tuple[RunnerUp, ...]:
    """Return the next plans behind the best, at most so many: each has degrees of its own.

    Constants are moved where the objective is made of time; for the others none is listed.

    >>> from shardwise.models import load_model
    >>> from shardwise.search import plan_serving
    >>> from shardwise.plans import Serving
    >>> job, on = Serving(input_tokens=512, output_tokens=64), Cluster.parse("2xh100-sxm-80gb")
    >>> near = runners_up(plan_serving(load_model("llama-3.1-8b"), on, job))
    >>> near[0].behind > 0
    True
    """
    best, *others = found.best or (None,)
    if best is None or not others:
        return ()
    moved, objective = _Moved(found), found.options.objective
    top = _value(found, best)
    for report in (best, *others[:most]):
        moved.look(report)
    return tuple(
        RunnerUp(
            report=report,
            behind=loss_of(objective, _value(found, report), top),
            sensitivity=tuple(moved.overtaking(best, report)),
        )
        for report in others[:most]
    )


def _value(found: TrainingResult | ServingResult, report: Any) -> float:
    return found.value(report)


def _band(found: TrainingResult | ServingResult) -> Band:
    best: Any = found.best[0]
    if _trains(best):
        return band_of("step_seconds", best.conditions)
    quantity = {"ttft": "ttft_seconds", "tpot": "tpot_seconds"}.get(found.options.objective, "request_seconds")
    return band_of(quantity, best.conditions)


@dataclass
class _Moved:
    """The objective of plans with one constant moved, each worked out once."""

    found: TrainingResult | ServingResult

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, str, float], float] = {}

    def value(self, report: Any, constant: str, factor: float) -> float:
        """Return the objective of a plan with a constant moved."""
        key = (id(report), constant, factor)
        if key not in self._known and _trains(report) and self.found.options.objective in TIMED:
            self._know(report, [(constant, factor)])
        elif key not in self._known:
            self._known[key] = _value(self.found, with_constant(report, constant, factor))
        return self._known[key]

    def _know(self, report: TrainReport, moves: Sequence[tuple[str, float]]) -> None:
        """Keep the objective of a training plan with each of some constants moved."""
        found = cast("TrainingResult", self.found)
        for (constant, factor), value in zip(moves, moved_seconds(report, moves), strict=True):
            self._known[id(report), constant, factor] = found.value_at(report, value)

    @cached_property
    def ends(self) -> dict[str, tuple[float, float]]:
        """The ends of the band of each constant, as factors of what is assumed."""
        return {name: constant_band(name, _band(self.found)) for name in CONSTANTS}

    def look(self, report: Any) -> None:
        """Work out the objective of a training plan at all ends at once."""
        if _trains(report) and self.found.options.objective in TIMED:
            moves = [(name, end) for name, ends in self.ends.items() for end in ends if end != 1]
            if moves:
                self._know(report, moves)

    def overtaking(self, best: Any, other: Any) -> Iterator[Sensitivity]:
        """Yield the constants that put another plan ahead of the best within their bands."""
        if self.found.options.objective not in TIMED:
            return
        for name, (low, high) in self.ends.items():

            def gap(factor: float, name: str = name) -> float:
                """Return the share by which the other plan is behind with the constant moved."""
                return self.value(other, name, factor) / self.value(best, name, factor) - 1

            for end in (low, high):
                # Plans that are the same but for rounding do not overtake each other.
                if end != 1 and gap(end) < -_ROUNDING:
                    regret = self.value(best, name, end) / self.value(other, name, end) - 1
                    factor = crossing(gap, end)
                    yield Sensitivity(constant=name, factor=factor, low=low, high=high, regret=regret)


def crossing(gap: Callable[[float], float], end: float) -> float:
    """Return the factor between 1 and `end` beyond which a gap is below zero, by regula falsi and halving.

    >>> round(crossing(lambda f: f - 0.8, 0.5), 4)
    0.8
    """
    near, far = 0.0, math.log(end)
    above, below = gap(1.0), gap(end)
    for i in range(_STEPS):
        if abs(near - far) < _CLOSE or above <= 0:
            break
        # A gap may jump where another operator binds: every third step halves what is left.
        middle = (near + far) / 2 if i % 3 == 2 else far - (far - near) * below / (below - above)
        value = gap(math.exp(middle))
        if abs(value) < _ROUNDING:
            return math.exp(middle)
        # The end that stays counts half, so that it does not stay for long (Illinois form of regula falsi).
        if value < 0:
            far, below, above = middle, value, above / 2
        else:
            near, above, below = middle, value, below / 2
    return math.exp(far)
