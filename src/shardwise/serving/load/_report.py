"""What a deployment does under a workload, as a report: percentiles, capacity, cost, and where the seconds go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from shardwise.cost import Band, band_of
from shardwise.notebook import Card, CardLine, show
from shardwise.plans import Limit, Metric, Plan, Workload
from shardwise.records import dataclass
from shardwise.serving._policy import Policy
from shardwise.serving._report import InferReport, ServingOptions
from shardwise.serving.load._autoscale import Autoscale, Scaling
from shardwise.serving.load._bands import chance_to_meet, conditions_of, interval_of
from shardwise.serving.load._fleet import Router, attention_groups
from shardwise.serving.load._requests import PERCENTILES, Request, Trace, latencies_of
from shardwise.serving.load._steady import Steady
from shardwise.serving.load._steps import StepTable
from shardwise.serving.load._tree import tree_of
from shardwise.serving.load._why import causes_of
from shardwise.units import show_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a deployment takes its load, and the limits that it should keep."""

    limits: tuple[Limit, ...] = ()
    router: Router = "round-robin"
    prefill: Plan | None = None
    """The pool that computes prompts and sends their cache to that of the plan; None: one pool does both."""
    async_scheduling: bool | None = None
    """Whether a step is scheduled while the one before it runs; None: as the engine's present release does."""
    balance_steps: int | None = None
    """Steps that prompts wait until every group of attention has one; None: as the engine does unless it is told."""
    receive_steps: int | None = None
    """Decode steps after which the scheduler looks for new requests, SGLang's --scheduler-recv-interval; None: one."""
    batch_wait: tuple[int, float] = (0, 0.0)
    """Decode steps that prompts wait at most until this share of a step's tokens is there, TensorRT-LLM's
    batch_wait_timeout_iters and batch_wait_max_tokens_ratio."""
    autoscale: Autoscale | None = None
    """When replicas are started and stopped; None: all of them run all the time."""
    risk: float = 0.0
    """The chance, by published runs, with which all limits are to be kept."""
    serving: ServingOptions = ServingOptions()
    until_missed: bool = False
    """Whether the simulation of one pool may end once a limit is missed: what it says then is that alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillReport:
    """The pool that computes prompts: its memory and what its workers did."""

    base: InferReport
    table: StepTable
    traces: tuple[Trace, ...]


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeReport(Card):
    """What a deployment does under a workload. Build one with `serve`."""

    base: InferReport
    """The deployment with its longest request alone: memory, weights, room of the cache."""
    workload: Workload
    policy: Policy
    table: StepTable
    steady: Steady[float]
    """Closed form of one replica at its share of the load (of a closed loop: at its capacity)."""
    empty: Steady[float]
    """Closed form of a replica that nobody else uses: no load brings means below these."""
    saturated: float | None
    """Requests a second of one replica with a full queue, simulated where the load comes near; None elsewhere."""
    traces: tuple[Trace, ...]
    """What each replica did; empty where the load is more than they carry."""
    options: LoadOptions
    assumptions: tuple[str, ...]
    prefill: PrefillReport | None = None
    """The pool that computes prompts, where another decodes."""
    scaling: Scaling | None = None
    """How many replicas there were, where they followed the load."""

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        name = f"{self.base.case.model.name} on {self.base.plan.num_devices} x {self.base.case.cluster.device.name}"
        return f"<ServeReport {name}: {'meets' if self.meets else 'does not meet'} its limits>"

    def _facts(self) -> Iterator[CardLine]:
        """Yield the load that is carried, and the percentiles of every latency."""
        yield CardLine(
            "requests a second", show("", self.requests_per_second), f"of {show('', self.capacity_per_second)}"
        )
        for name, found in self.latencies.items():
            yield CardLine(
                name, ", ".join(f"{rank} {show_seconds(found[rank])}" for rank in PERCENTILES if rank in found)
            )

    @property
    def groups(self) -> int:
        """Groups of attention data parallelism in a replica, whose experts they share."""
        return attention_groups(self.base)

    @property
    def replicas(self) -> int:
        """Copies of the model that share the load."""
        return self.base.plan.dp // self.groups

    @property
    def devices(self) -> int:
        """Devices of all pools."""
        return self.base.plan.num_devices + (self.prefill.base.plan.num_devices if self.prefill else 0)

    @property
    def fits(self) -> bool:
        """Whether the longest request fits on a replica, in a prefill worker too."""
        return self.base.fits and (self.prefill is None or self.prefill.base.fits)

    @property
    def all_traces(self) -> tuple[Trace, ...]:
        """What the replicas of all pools did."""
        return (*self.traces, *(self.prefill.traces if self.prefill else ()))

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive whatever the deployment does, so that its queue can grow without end."""
        return self.workload.arrivals.kind not in ("closed", "burst", "trace") and not self.workload.finite

    @property
    def stable(self) -> bool:
        """Whether the deployment carries the load: a closed loop, a burst and a trace always end."""
        return not self.growth_per_second

    @property
    def overloaded(self) -> bool:
        """Whether the load is more than a full queue is served at, and more than the closed form carries."""
        return self.open_loop and self.saturated is not None and self.steady.rate >= self._most

    @property
    def _most(self) -> float:
        """Requests a second that one replica may carry: the larger of the closed form and of a full queue.

        A full queue preempts more than a load that the cache just holds, and batches more prompts than the closed form.
        """
        return max(self.steady.capacity, self.saturated or 0.0)

    @cached_property
    def growth_per_second(self) -> float:
        """Requests a second by which the queue grows; 0 where the load is carried.

        Above what a replica may carry by what is beyond it. Below, the simulation decides: if those who arrive in the
        last quarter wait half as long again as those of the second, and a tenth of a request more, the queue grows by
        what is not done of the second half of the arrivals.
        """
        if not self.open_loop:
            return 0.0
        if self.overloaded:
            return (self.steady.rate - self._most) * self.base.plan.dp
        every = sorted((r for t in self.traces for r in t.finished), key=lambda r: r.arrival)
        quarter = len(every) // 4
        if quarter < 25:
            return 0.0
        early, late = every[quarter : 2 * quarter], every[3 * quarter :]
        before, after = (sum(r.queue_seconds for r in part) / len(part) for part in (early, late))
        usual = sum(r.e2e_seconds - r.queue_seconds for r in late) / len(late)
        if after - before <= 0.5 * before + 0.1 * usual:
            return 0.0
        start, end = every[2 * quarter].arrival, every[-1].arrival
        done = sum(start < r.end <= end for r in every) / max(end - start, 1e-9)
        return max(self.workload.arrivals.rate - done, 1e-9)

    @cached_property
    def requests(self) -> list[Request]:
        """Every simulated request, in the order of their ends on each replica; none where the queue grows."""
        return [request for trace in self.traces for request in trace.finished] if self.stable else []

    @cached_property
    def span_seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max((t.seconds for t in self.traces), default=0.0) - min((r.arrival for r in self.requests), default=0.0)

    @cached_property
    def latencies(self) -> dict[str, dict[str, float]]:
        """Mean and percentiles of ttft, tpot, itl, e2e and queue in seconds; empty where the load is not carried."""
        if not self.requests:
            return {}
        found = latencies_of(self.requests)
        return {"ttft": found["ttft"], "tpot": found["tpot"], "itl": self._itl(), **found}

    @cached_property
    def by_class(self) -> dict[str, tuple[list[Request], dict[str, dict[str, float]]]]:
        """Requests of each class, and mean and percentiles of their ttft, tpot, e2e and queue in seconds."""
        classes = self.workload.classes if self.requests else ()
        parts = {one.name: [r for r in self.requests if r.kind == i] for i, one in enumerate(classes)}
        return {name: (part, latencies_of(part)) for name, part in parts.items()}

    def _itl(self) -> dict[str, float]:
        """Return mean and percentiles of the seconds between two tokens, each token counted once."""
        gaps = sorted((gap, count) for trace in self.traces for gap, count in trace.gaps if count)
        tokens = sum(count for _, count in gaps)
        if not tokens:
            return {}
        found = {"mean": sum(gap * count for gap, count in gaps) / tokens}
        for name, share in PERCENTILES.items():
            left = share * tokens
            for gap, count in gaps:
                left -= count
                if left <= 0:
                    found[name] = gap
                    break
        return found

    def value(self, limit: Limit) -> float:
        """Return the seconds that a limit is about, infinite where the load is not carried."""
        found = self.by_class.get(limit.of, ([], {}))[1] if limit.of else self.latencies
        return found.get(limit.metric, {}).get(limit.quantile, math.inf)

    def floor(self, limit: Limit) -> float:
        """Return the mean seconds of what a limit is about on an empty replica; 0, which is no bound, of a class."""
        if limit.of:
            return 0.0
        return float(getattr(self.empty, f"{'tpot' if limit.metric == 'itl' else limit.metric}_seconds"))

    def band(self, headline: str, quantile: str = "") -> Band:
        """Return the band of a headline in a percentile, by published runs under load."""
        return band_of(headline, conditions_of(self, quantile))

    @property
    def interval(self) -> dict[str, dict[str, dict[str, float]]]:
        """Low, typical and high of percentiles and of what is carried: 8 of 10 published runs lie between."""
        return interval_of(self)

    @cached_property
    def chance_to_meet(self) -> float:
        """The chance that the model fits, the load is carried and every limit is kept, by published runs."""
        return chance_to_meet(self)

    @property
    def broken(self) -> tuple[Limit, ...]:
        """The limits that are not kept."""
        return tuple(limit for limit in self.options.limits if self.value(limit) > limit.seconds)

    @property
    def meets(self) -> bool:
        """Whether the model fits, the load is carried and every limit kept, with the chance that was asked."""
        return self.fits and self.stable and not self.broken and self.chance_to_meet >= self.options.risk

    @property
    def focus(self) -> Limit:
        """The limit that is missed by most, or nearest to that; the p99 of TTFT where there is none."""
        order = sorted(self.options.limits, key=lambda one: -self.value(one) / one.seconds)
        return order[0] if order else Limit(metric="ttft", quantile="p99", seconds=1.0)

    @property
    def goodput_share(self) -> float:
        """Share of requests that keep every limit, each taken as a limit of its own request."""
        if not self.requests:
            return 0.0
        kept = sum(all(self._kept(r, limit) for limit in self.options.limits) for r in self.requests)
        return kept / len(self.requests)

    def _kept(self, request: Request, limit: Limit) -> bool:
        if limit.of and limit.of != self.workload.classes[request.kind].name:
            return True
        seconds = {"ttft": request.ttft_seconds, "tpot": request.tpot_seconds, "e2e": request.e2e_seconds}
        found = seconds.get(limit.metric)
        return found is None or found <= limit.seconds

    @property
    def requests_per_second(self) -> float:
        """Requests a second that the deployment ends."""
        return len(self.requests) / self.span_seconds if self.requests else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens a second of the whole deployment."""
        made = sum(r.output_tokens for r in self.requests)
        return made / self.span_seconds if self.requests else 0.0

    @property
    def capacity_per_second(self) -> float:
        """Requests a second that all replicas carry at most: by the closed form, near it as the simulation showed."""
        if self.saturated is None:
            return self.steady.capacity * self.base.plan.dp
        # While replicas start a queue grows that all of them would carry.
        if self.growth_per_second and (self.overloaded or self.options.autoscale is None):
            return self.steady.rate * self.base.plan.dp - self.growth_per_second
        return max(self.saturated, self.steady.rate) * self.base.plan.dp

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars an hour of all devices that run, None without a price."""
        price = self.base.case.cluster.usd_per_device_hour
        running = self.scaling.mean_replicas / self.replicas if self.scaling else 1.0
        return None if price is None else price * self.devices * running

    @property
    def usd_per_million_output_tokens(self) -> float | None:
        """Dollars for a million output tokens at this load, None without a price or a token."""
        rate, hourly = self.output_tokens_per_second, self.usd_per_hour
        return None if hourly is None or not rate else hourly / 3600 / rate * 1e6

    def why(self, metric: Metric = "ttft", name: str = "p99") -> list[tuple[str, float]]:
        """Return the parts of the ttft, tpot or e2e around a percentile, in seconds, largest first."""
        return causes_of(self, metric, name)

    def to_dict(self) -> dict[str, Any]:
        """Return the record that `--json` prints; seconds, requests a second, None where a value is not known."""
        return tree_of(self)
