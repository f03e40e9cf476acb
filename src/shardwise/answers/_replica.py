"""How many devices a served replica takes where no flag says: the fewest that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.answers._inputs import Inputs
from shardwise.cost import WANTED_CHANCE
from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.plans import DEGREES, Plan, divisors
from shardwise.records import replace
from shardwise.serving import InferReport

SPLITS = (*DEGREES, "layout", "order", "fast", "stage_layers", "prefill_workers", "gpu_layers", "cpu_experts", "host")
"""Flags that say how a replica is split."""
NOTES = (
    f"the fewest devices that hold a replica with the chance of --risk, {WANTED_CHANCE:.0%} at least",
    f"the fewest devices that hold a replica, with a chance below --risk or {WANTED_CHANCE:.0%}",
    "the widest replica, which the devices do not hold either",
)
"""Why a replica is as wide as it is."""


def splits_are_said(inputs: Inputs) -> bool:
    """Return whether flags or a launch file say how a replica is split, so that nothing is to be chosen."""
    return inputs.imported is not None or bool(set(SPLITS) & (inputs.values.keys() | inputs.bad))


def _wider(plan: Plan, cluster: Cluster, staged: bool) -> Iterator[Plan]:
    """Yield plans of wider replicas that fill the cluster, the smallest first: by tp alone, or with stages too.

    Replicas that share a node evenly or take whole nodes come before those that straddle nodes. tp stays within the
    fastest links, and the widest comes first beside stages.
    """
    domain = cluster.tiers[0].size
    sizes = sorted(divisors(cluster.num_devices)[1:], key=lambda n: (bool(n % domain and domain % n), n))
    for size in sizes:
        for tp in divisors(size)[::-1] if staged else (size,):
            if domain % tp == 0 and (tp < size) == staged:
                yield replace(plan, tp=tp, pp=size // tp, dp=0, etp=1)


def fewest_devices(inputs: Inputs, report: InferReport, cluster: Cluster, at: Callable[[Plan], InferReport]) -> Plan:
    """Return the plan whose replica takes the fewest devices that hold it, else the widest that is legal.

    Stages are for what tp alone does not hold. It is that of `report` where it is held, where flags say how it is
    split, and where no other is legal. The choice is noted. `at` answers for a wider one.
    """
    wanted = max(inputs.get("risk", 0.0), WANTED_CHANCE)
    tried = [report]
    for staged in () if splits_are_said(inputs) or _sure(report, wanted) else (False, True):
        for plan in _wider(report.plan, cluster, staged):
            try:
                tried.append(at(plan))
            except InputError:  # a degree that the model or the engine refuses
                continue
            if _sure(tried[-1], wanted):
                return _noted(inputs, tried[-1], NOTES[0])
        fitting = next((one for one in tried if one.fits), None)
        if fitting is not None:
            return report.plan if fitting is report else _noted(inputs, fitting, NOTES[1])
    widest = max(tried, key=lambda one: one.plan.tp * one.plan.pp)
    return report.plan if widest is report else _noted(inputs, widest, NOTES[2])


def _sure(report: InferReport, wanted: float) -> bool:
    return report.fits and report.chance_to_fit >= wanted


def _noted(inputs: Inputs, report: InferReport, why: str) -> Plan:
    """Return the plan of a report, recording why it is chosen: "tp 8, pp 2: ..."."""
    degrees = [f"{axis} {size}" for axis in ("tp", "pp") if (size := getattr(report.plan, axis)) > 1]
    inputs.notes.append(f"{', '.join(degrees)}: {why}")
    return report.plan
