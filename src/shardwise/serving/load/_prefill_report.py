"""What the pool that computes prompts did."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from shardwise.records import dataclass
from shardwise.serving._report import InferReport
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
