"""The pool that computes prompts: its devices, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster, part_of
from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.serving._report import InferReport
from shardwise.serving.load._batches import workers_of
from shardwise.serving.load._requests import Request, Trace

AXES = ("tp", "pp", "dp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillReport:
    """The pool that computes prompts: its memory and what its workers did."""

    base: InferReport
    traces: tuple[Trace, ...]

    def to_dict(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Return the record that `--json` prints, with the mean seconds of prompts and of sending their cache."""
        span = max(sum(t.seconds for t in self.traces), 1e-12)
        busy, waited = sum(t.busy_seconds for t in self.traces) / span, sum(r.queue_seconds for r in requests) / span
        return {
            "plan": {axis: getattr(self.base.plan, axis) for axis in AXES},
            "devices": self.base.plan.num_devices,
            "utilization": busy if self.traces else None,
            "waiting": {
                "mean": waited if self.traces else None,
                "max": max((t.most_waiting for t in self.traces), default=None),
            },
            "prompt_seconds": fmean(r.prompt_seconds for r in requests) if requests else None,
            "transfer_seconds": fmean(r.transfer_seconds for r in requests) if requests else None,
        }


def pools_of(cluster: Cluster, plan: Plan, prefill: Plan | None) -> tuple[Cluster, Cluster | None]:
    """Return the devices of the pool that decodes, and of the one before it that computes prompts.

    >>> decode, prompts = pools_of(Cluster.parse("16xh100"), Plan(tp=2, dp=0), Plan(tp=4))
    >>> decode.num_devices, prompts.num_devices
    (12, 4)
    """
    if prefill is None:
        return cluster, None
    devices, every, each = prefill.num_devices, cluster.num_devices, plan.tp * plan.pp
    left = every - devices
    if left < each:
        rule = f"takes {devices} of the {every} devices, and a decode worker needs {each}"
        raise InputError(
            [Problem("prefill_workers", workers_of(prefill), rule, "use fewer prefill workers, or more devices")]
        )
    if plan.dp and each * plan.dp != left:
        rule = (
            f"tp x pp x dp = {each * plan.dp} must equal the {left} devices that the pool for prompts leaves of {every}"
        )
        remedy = f"use {left // each}" if left % each == 0 else f"use {each * plan.dp + devices} devices"
        raise InputError([Problem("dp", plan.dp, rule, remedy)])
    return part_of(cluster, left), part_of(cluster, devices)
