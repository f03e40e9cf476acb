"""What would change the winner: the next plans, how far behind they are, and the constants that could put them ahead.

Each constant in turn takes the blame for the whole spread of published step times over predictions (bands.toml of
`cost`): rates move between 1/high and 1/low of what is assumed, overheads between low and high. A constant whose own
spread is narrower swaps no more than what is listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cost import Efficiencies, band_of
from shardwise.hardware import Cluster
from shardwise.search._remedies import value_of
from shardwise.search._search import Found
from shardwise.training import Case, TrainReport
from shardwise.training._report import report_of

TIMED = ("step", "throughput", "cost", "days")
_STEPS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """A constant that puts a rival ahead within its band: `factor` of what is assumed at which they are equal."""

    constant: str
    factor: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rival:
    """A plan behind the best by a share of its objective, and the constants that would put it ahead."""

    report: TrainReport
    behind: float
    swaps: tuple[Swap, ...]


def _faster_device(case: Case, names: tuple[str, ...], factor: float) -> Cluster:
    device = case.cluster.device
    values = {fact.field: fact.value * factor for fact in device.sources if fact.field.startswith(names)}
    return replace(case.cluster, device=device.with_values(values, "scaled", "2026-11"))


def _faster_links(case: Case, fast: bool, factor: float) -> Cluster:
    def scaled(place: int, tier: Any) -> Any:
        inner = place == 0 and tier.name != "network"
        return replace(tier, bytes_per_second=tier.bytes_per_second * factor) if inner == fast else tier

    return case.cluster.with_tiers(scaled(i, tier) for i, tier in enumerate(case.cluster.tiers))


def _imposed(efficiencies: Efficiencies, name: str, factor: float) -> Efficiencies:
    """Return efficiencies with an achieved rate scaled where one is imposed."""
    changes: dict[str, Any] = {name: getattr(efficiencies, name) * factor}
    return replace(efficiencies, **changes)


def _compute(case: Case, factor: float) -> Case:
    scaled = _imposed(case.efficiencies, "matmul_flops_per_second", factor)
    return replace(case, cluster=_faster_device(case, ("matrix_flops.",), factor), efficiencies=scaled)


def _memory(case: Case, factor: float) -> Case:
    scaled = _imposed(case.efficiencies, "memory_bytes_per_second", factor)
    return replace(case, cluster=_faster_device(case, ("memory_bytes_per_second",), factor), efficiencies=scaled)


def _fast(case: Case, factor: float) -> Case:
    scaled = _imposed(case.efficiencies, "fast_bytes_per_second", factor)
    return replace(case, cluster=_faster_links(case, True, factor), efficiencies=scaled)


def _network(case: Case, factor: float) -> Case:
    scaled = _imposed(case.efficiencies, "slow_bytes_per_second", factor)
    return replace(case, cluster=_faster_links(case, False, factor), efficiencies=scaled)


def _launch(case: Case, factor: float) -> Case:
    stack = case.stack
    slower = {name: getattr(stack, name) * factor for name in ("eager_launch_seconds", "step_overhead_seconds")}
    return replace(case, stack=replace(stack, **slower))


# Name, how it is moved, and whether it is a time rather than a rate.
CONSTANTS: tuple[tuple[str, Callable[[Case, float], Case], bool], ...] = (
    ("matrix FLOP/s", _compute, False),
    ("memory bandwidth", _memory, False),
    ("fast link", _fast, False),
    ("network", _network, False),
    ("launch and step overhead", _launch, True),
)


def rivals(found: Found, most: int = 3) -> tuple[Rival, ...]:
    """Return the next plans behind the best: the very next, then those with other degrees, at most so many.

    Constants are moved where the objective is made of time; for the others none is listed.
    """
    if len(found.best) < 2:
        return ()
    best, others = found.best[0], found.best[1:]
    apart = [report for report in others[1:] if _degrees(report) not in map(_degrees, (best, others[0]))]
    chosen = [others[0], *{_degrees(report): report for report in reversed(apart)}.values()][:most]
    top = value_of(found, best)
    chosen.sort(key=lambda report: value_of(found, report))
    return tuple(
        Rival(report=report, behind=value_of(found, report) / top - 1, swaps=_swaps(found, report)) for report in chosen
    )


def _degrees(report: TrainReport) -> tuple[int, ...]:
    plan = report.plan
    return plan.tp, plan.tp2, plan.cp, plan.pp, plan.dp, plan.ep, plan.etp


def _swaps(found: Found, rival: TrainReport) -> tuple[Swap, ...]:
    if found.wish.objective not in TIMED:
        return ()
    best = found.best[0]
    family, stack = best.evaluation.rates.family, best.case.stack.name
    band = band_of("step_seconds", f"{family}.{stack}", family)
    swaps = []
    for name, moved, is_time in CONSTANTS:
        low, high = (band.low, band.high) if is_time else (1 / band.high, 1 / band.low)

        def gap(factor: float, moved: Callable[[Case, float], Case] = moved) -> float:
            """Return how far the rival is behind with the constant moved."""
            reports = (report_of(moved(report.case, factor), ()) for report in (best, rival))
            ours, theirs = (value_of(found, report) for report in reports)
            return theirs - ours

        for end in (low, high):
            if end != 1 and gap(end) < 0:
                swaps.append(Swap(constant=name, factor=crossing(gap, end), low=low, high=high))
    return tuple(swaps)


def crossing(gap: Callable[[float], float], end: float) -> float:
    """Return the factor between 1 and `end` beyond which a gap is below zero, by bisection.

    >>> round(crossing(lambda f: f - 0.8, 0.5), 6)
    0.8
    """
    near, far = 1.0, end
    for _ in range(_STEPS):
        middle = (near * far) ** 0.5
        near, far = (near, middle) if gap(middle) < 0 else (middle, far)
    return far
