"""Replicas that come and go with the load: how many are wanted, how long they take to start, what they cost.

The rule is that of Kubernetes' horizontal autoscaler (kubernetes.io/docs/tasks/run-application/
horizontal-pod-autoscale): as many replicas as bring the mean of a metric to its target, none started or stopped within
a tenth of it, looked at every 15 s, and fewer only where that was so for 300 s. Metrics: requests that run (vLLM's
num_requests_running), that run or wait (Knative and KServe's concurrency), that wait (num_requests_waiting), the share
of the cache in use (Dynamo's planner, decode), or the rate of the last interval over what a replica carries (Dynamo's
planner by throughput, its load taken as that of the interval before; docs.nvidia.com/dynamo/components/planner). A
replica that is stopped takes no more requests and ends those it has.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, get_args

from shardwise.errors import Problems
from shardwise.plans import Workload
from shardwise.records import dataclass
from shardwise.serving.load._fleet import Pool, Router, Routing
from shardwise.serving.load._replica import Replica
from shardwise.serving.load._requests import Request, Trace

Signal: TypeAlias = Literal["running", "requests", "queue", "cache", "load"]
SIGNALS: tuple[Signal, ...] = get_args(Signal)
# kube-controller-manager: horizontal-pod-autoscaler-tolerance.
_TOLERANCE = 0.1
_SHARES = ("cache", "load")
MOST_LOOKS = 50_000
"""Most times that the metric is looked at: a week of every 15 s takes seconds, and nothing is simulated for hours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Autoscale:
    """When replicas are started and stopped.

    >>> Autoscale(metric="cache", target=2.0, start_seconds=90).problems().items[0].rule
    'must be a share of at most 1'
    """

    metric: Signal
    target: float
    """What each replica has of the metric on average: requests, or a share of the cache or of what it carries."""
    start_seconds: float
    """Seconds from the decision to a replica that takes requests."""
    least: int = 1
    interval_seconds: float = 15.0
    keep_seconds: float = 300.0
    """Seconds for which fewer replicas must have been enough before one is stopped."""

    def problems(self) -> Problems:
        """Return what is wrong with it."""
        problems = Problems()
        if self.metric not in SIGNALS:
            problems.add("autoscale", self.metric, "is not what replicas follow", f"use one of {', '.join(SIGNALS)}")
        if not (math.isfinite(self.target) and self.target > 0):
            problems.add("autoscale", self.target, "must be more than 0", "write for example running:32 or cache:0.8")
        elif self.metric in _SHARES and self.target > 1:
            problems.add(
                "autoscale", self.target, "must be a share of at most 1", f"write for example {self.metric}:0.8"
            )
        if self.least < 1:
            problems.add("min_replicas", self.least, "must be at least 1", "use 1")
        if not (math.isfinite(self.interval_seconds) and self.interval_seconds > 0):
            problems.add("scale_interval", self.interval_seconds, "must be more than 0 seconds", "use for example 15s")
        return problems


@dataclass(slots=True)
class _ScaledWorker:
    """One replica: when it was asked for, when it takes requests, and when it was stopped."""

    engine: Replica
    asked: float
    ready: float
    stopped: float = math.inf

    @property
    def outstanding(self) -> int:
        return sum(group.outstanding for group in self.engine.entries)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scaling:
    """What replicas did that came and went."""

    autoscale: Autoscale
    replicas: tuple[tuple[float, int], ...]
    """From when on how many replicas ran or started, in seconds of the simulated clock."""
    replica_seconds: float
    """Seconds that replicas were paid for, starting and ending included."""
    started: int
    most: int
    span_seconds: float

    @property
    def mean_replicas(self) -> float:
        """Replicas that are paid for on average."""
        return self.replica_seconds / self.span_seconds

    def to_dict(self, devices: int) -> dict[str, Any]:
        """Return it as plain values, beside a fleet of as many replicas as ran at most; `devices` are of a replica."""
        hours = devices / 3600
        return {
            "metric": self.autoscale.metric, "target": self.autoscale.target,
            "startup_seconds": self.autoscale.start_seconds,
            "replicas": {"mean": self.mean_replicas, "max": self.most}, "started": self.started,
            "device_hours": self.replica_seconds * hours, "fixed_device_hours": self.most * self.span_seconds * hours,
            "changes": [{"seconds": at, "replicas": count} for at, count in self.replicas],
        }  # fmt: skip


_OF: dict[Signal, Callable[[Replica], float]] = {
    "running": lambda engine: sum(group.decoding + len(group.prompts) for group in engine.groups),
    "requests": lambda engine: sum(group.outstanding for group in engine.entries),
    "queue": lambda engine: sum(len(group.waiting) + len(group.pending) for group in engine.entries),
    "cache": lambda engine: engine.cache_share,
}


class Autoscaler:
    """A pool whose replicas follow the load."""

    def __init__(self, pool: Pool, rule: Autoscale, routing: tuple[Router, int], most: int) -> None:
        self.pool, self.rule, self.most = pool, rule, most
        self.live = [_ScaledWorker(pool.replica(), 0.0, 0.0) for _ in range(min(rule.least, most))]
        self.every = list(self.live)
        self.routing = Routing([one.engine for one in self.live], *routing)
        self.tick = rule.interval_seconds
        self.arrived = 0
        self.wanted: deque[tuple[float, int]] = deque()
        self.counts = [(0.0, len(self.live))]

    def run(self, requests: Iterable[Request]) -> tuple[list[Trace], Scaling]:
        """Return what every group of every replica did, and when there were how many."""
        last, requests = 0.0, tuple(requests)
        self._check(requests[-1].ready)
        for request in requests:
            while self.tick <= request.ready:
                self._scale(self.tick)
            self.arrived += 1
            self.routing.send(request)
            last = request.ready
        while any(one.outstanding for one in self.live):
            self._check(self.tick)
            self._scale(self.tick)
        traces = [trace for one in self.every for trace in one.engine.finish()]
        end = max((r.end for trace in traces for r in trace.finished), default=last)
        whole = sum(max(min(self._over(one, end), end) - one.asked, 0.0) for one in self.every)
        return traces, Scaling(
            autoscale=self.rule, replicas=tuple(self.counts), replica_seconds=whole, started=len(self.every),
            most=max(count for _, count in self.counts), span_seconds=max(end, 1e-9),
        )  # fmt: skip

    def _check(self, until: float) -> None:
        """Raise `InputError` where the metric would be looked at too often up to a time."""
        if until > MOST_LOOKS * self.rule.interval_seconds:
            problems = Problems()
            rule = f"is looked at more than {MOST_LOOKS:,} times in the {until:,.0f} s of the requests"
            remedy = f"use {math.ceil(until / MOST_LOOKS)}s or more, or fewer requests"
            problems.add("scale_interval", self.rule.interval_seconds, rule, remedy)
            problems.raise_if_any()

    @staticmethod
    def _over(one: _ScaledWorker, end: float) -> float:
        """Return when a replica is not paid for any more: stopped, and done with its last request."""
        ends = (r.end for group in one.engine.groups for r in group.trace.finished)
        return max(one.stopped, max(ends, default=0.0)) if one.stopped < end else end

    def _scale(self, now: float) -> None:
        """Start or stop replicas at a time."""
        for one in self.live:
            one.engine.advance(now)
        wanted = self._desired(now)
        self.wanted.append((now, wanted))
        while self.wanted[0][0] < now - self.rule.keep_seconds:
            self.wanted.popleft()
        have = len(self.live)
        if wanted > have:
            self._start(wanted - have, now)
        else:
            self._stop(have - max(count for _, count in self.wanted), now)
        if len(self.live) != have:
            self.counts.append((now, len(self.live)))
        ready = [one.engine for one in self.live if one.ready <= now]
        self.routing.over(ready)
        self.tick, self.arrived = now + self.rule.interval_seconds, 0

    def _desired(self, now: float) -> int:
        """Return the replicas that bring the metric to its target; as many as there are where it is near."""
        rule, groups = self.rule, self.pool.groups
        if rule.metric == "load":
            carried = float(self.pool.form.capacity[0]) * groups
            value = self.arrived / rule.interval_seconds / carried
        else:
            of = _OF[rule.metric]
            value = sum(of(one.engine) for one in self.live)
        have = len(self.live)
        near = abs(value / (have * rule.target) - 1) <= _TOLERANCE
        wanted = have if near else math.ceil(value / rule.target - 1e-9)
        return min(max(wanted, rule.least), self.most)

    def _start(self, count: int, now: float) -> None:
        for _ in range(count):
            worker = _ScaledWorker(self.pool.replica(), now, now + self.rule.start_seconds)
            worker.engine.now = worker.ready
            self.live.append(worker)
            self.every.append(worker)

    def _stop(self, count: int, now: float) -> None:
        """Stop replicas: those that still start first, then those with the fewest requests; one always stays."""
        order = sorted(self.live, key=lambda one: (one.ready <= now, one.outstanding))
        for one in order[: max(count, 0)]:
            if one.ready <= now and sum(other.ready <= now for other in self.live) == 1:
                continue
            one.stopped = now
            self.live.remove(one)


def scaling_problems(rule: Autoscale, most: int, workload: Workload, prefill: object) -> Problems:
    """Return why replicas of a deployment, of which there are at most so many, cannot follow the load so."""
    problems = rule.problems()
    if rule.least > most:
        problems.add(
            "min_replicas", rule.least, f"is more than the {most} replicas that fill the devices", f"use {most}"
        )
    if workload.arrivals.kind in ("closed", "burst"):
        what = "users stay with their replica" if workload.arrivals.kind == "closed" else "all requests come at once"
        problems.add("autoscale", rule.metric, f"has nothing to follow: {what}", "give --rate or --trace")
    if prefill is not None:
        problems.add("autoscale", rule.metric, "is of one pool of replicas", "leave out --prefill-workers")
    return problems
