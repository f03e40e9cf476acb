"""What a deployment does under a workload, as a report: percentiles, capacity, cost, and where the seconds go."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from shardwise.cost import Band, Conditions
from shardwise.notebook import Card, CardLine, show
from shardwise.plans import Limit, Metric, Workload
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving._report import InferReport
from shardwise.serving.load._autoscale import Scaling
from shardwise.serving.load._bands import around, band_of_parts, parts_of, with_tail
from shardwise.serving.load._carried import carried_at_most
from shardwise.serving.load._fleet import Fleet, attention_groups
from shardwise.serving.load._means import Steady
from shardwise.serving.load._options import LoadOptions
from shardwise.serving.load._prefill_report import AXES, PrefillReport
from shardwise.serving.load._requests import PERCENTILES, Request, Trace, gaps_of, latencies_of, queue_growth, with_unit
from shardwise.serving.load._why import EXPLAINED, causes_of
from shardwise.units import show_seconds

# Loads over the capacity of the closed form beyond which latencies follow how requests happen to come.
_NEAR_CAPACITY = 0.85


@dataclass(frozen=True, kw_only=True, repr=False)
class ServeReport(Card):
    """What a deployment does under a workload. Build one with `serve`."""

    base: InferReport
    """The deployment with its longest request alone: memory, weights, room of the cache."""
    workload: Workload
    policy: Policy
    fleet: Fleet
    """What was simulated, with its closed form."""
    steady: Steady[float]
    """Closed form of one replica at its share of the load (of a closed loop: at its capacity)."""
    empty: Steady[float]
    """Closed form of a replica that nobody else uses: no load brings means below these."""
    saturated: float | None
    """Requests a second of one replica with a full queue, simulated where the form carries no more; None elsewhere."""
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
        """Yield what is carried, latencies with the band of their p99, and how full replicas are."""
        most, rate, bands = self.capacity_per_second, self.requests_per_second, self.interval
        band = " to ".join(show("", bands["capacity"]["requests_per_second"][end]) for end in ("low", "high"))
        yield CardLine("requests a second", f"{show('', rate)} of {show('', most)}", band, rate / (most or 1.0))
        for name, spread in self.latencies.items():
            tail = bands.get(name, {}).get("p99_seconds", {})
            band = " to ".join(show_seconds(tail[end]) for end in ("low", "high") if tail)
            ranks = (f"{rank} {show_seconds(spread[rank])}" for rank in PERCENTILES if rank in spread)
            yield CardLine(name, ", ".join(ranks), f"p99 {band}" if band else "")
        used = max((t.most_cache_tokens for t in self.traces), default=0.0)
        yield CardLine("cache of a replica", f"{used:,.0f} tokens", "", used / (self.fleet.decode.cache_tokens or 1))

    @property
    def groups(self) -> int:
        """Groups of attention data parallelism in a replica, whose experts they share."""
        return attention_groups(self.base)

    @property
    def replicas(self) -> int:
        """Copies of the model that share the load."""
        return self.base.plan.dp // self.groups

    @property
    def share(self) -> float:
        """Part of the replicas that was simulated."""
        return self.fleet.sample.share if self.fleet.sample else 1.0

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
        # A full queue preempts more than a load that the cache just holds, and batches more prompts.
        most = max(self.steady.capacity, self.saturated or 0.0)
        return self.open_loop and self.saturated is not None and self.steady.rate >= most

    @cached_property
    def growth_per_second(self) -> float:
        """Requests a second by which the queue grows; 0 where the load is carried."""
        if not self.open_loop:
            return 0.0
        if self.overloaded:
            return (self.steady.rate - self.steady.capacity) * self.base.plan.dp
        requests = [r for t in self.traces for r in t.finished]
        rate = self.workload.arrivals.rate * self.share
        return queue_growth(requests, rate, float(self.steady.utilisation)) / self.share

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
        stages = latencies_of(self.requests)
        return {"ttft": stages["ttft"], "tpot": stages["tpot"], "itl": gaps_of(self.traces), **stages}

    @cached_property
    def by_class(self) -> dict[str, tuple[list[Request], dict[str, dict[str, float]]]]:
        """Requests of each class, and mean and percentiles of their ttft, tpot, e2e and queue in seconds."""
        classes = self.workload.classes if self.requests else ()
        parts = {one.name: [r for r in self.requests if r.kind == i] for i, one in enumerate(classes)}
        return {name: (part, latencies_of(part)) for name, part in parts.items()}

    def value(self, limit: Limit) -> float:
        """Return the seconds that a limit is about, infinite where the load is not carried."""
        latencies = self.by_class.get(limit.of, ([], {}))[1] if limit.of else self.latencies
        return latencies.get(limit.metric, {}).get(limit.quantile, math.inf)

    def floor(self, limit: Limit) -> float:
        """Return the mean seconds of what a limit is about on an empty replica; 0, which is no bound, of a class."""
        if limit.of:
            return 0.0
        return float(getattr(self.empty, f"{'tpot' if limit.metric == 'itl' else limit.metric}_seconds"))

    def conditions(self, quantile: str = "") -> Conditions:
        """Return what decides how far published runs under a load like this were off, in a percentile."""
        arrivals, base = self.workload.arrivals, self.base.conditions
        holds = {
            "two pools": self.prefill is not None,
            "attention groups": self.groups > 1,
            "closed loop": arrivals.kind == "closed",
            "near capacity": arrivals.kind == "burst" or bool(self.steady.utilisation > _NEAR_CAPACITY),
        }
        words = (*base.words, *(word for word, true in holds.items() if true))
        return with_tail(replace(base, words=words), quantile)

    def band(self, metric: str, quantile: str = "", of: str = "") -> Band:
        """Return the band of what is carried ("capacity"), or of a percentile of a latency, of all or of a class."""
        latencies = self.by_class[of][1] if of else self.latencies
        return band_of_parts(parts_of(metric, quantile, latencies), self.conditions(quantile))

    @property
    def interval(self) -> dict[str, dict[str, dict[str, float]]]:
        """Low, typical and high of percentiles and of what is carried: 8 of 10 published runs lie between."""
        latencies = {
            m: {f"{name}_seconds": around(self.band(m, name), value) for name, value in spread.items()}
            for m, spread in self.latencies.items()
            if m != "queue"
        }
        return {
            **latencies,
            "capacity": {"requests_per_second": around(self.band("capacity"), self.capacity_per_second)},
        }

    def chance_of(self, limit: Limit) -> float:
        """Return the chance that a limit is kept, by how far published runs were from predictions."""
        value = self.value(limit)
        if not value or not math.isfinite(value):
            return float(value == 0)
        return self.band(limit.metric, limit.quantile, limit.of).chance(limit.seconds / value)

    @cached_property
    def chance_to_meet(self) -> float:
        """The chance that the model fits, the load is carried and every limit is kept, by published runs.

        Of limits on one latency the least likely counts. Memory, load and latencies are taken as independent, so where
        their errors go together the chance is higher.
        """
        if not self.fits or not self.stable:
            return 0.0
        chances = [self.base.chance_to_fit]
        if self.open_loop:
            chances.append(1.0 - self.band("capacity").chance(self.workload.arrivals.rate / self.capacity_per_second))
        by_metric: dict[str, float] = {}
        for limit in self.options.limits:
            by_metric[limit.metric] = min(by_metric.get(limit.metric, 1.0), self.chance_of(limit))
        return math.prod((*chances, *by_metric.values()))

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
        return (seconds.get(limit.metric) or 0.0) <= limit.seconds

    @property
    def utilisation(self) -> float:
        """Requests that arrive over those that are carried at most."""
        return float(self.steady.rate * self.base.plan.dp / self.capacity_per_second)

    @property
    def requests_per_second(self) -> float:
        """Requests a second that the deployment ends."""
        return len(self.requests) / self.span_seconds / self.share if self.requests else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens a second of the whole deployment."""
        made = sum(r.output_tokens for r in self.requests)
        return made / self.span_seconds / self.share if self.requests else 0.0

    @cached_property
    def capacity_per_second(self) -> float:
        """Requests a second that all replicas carry at most: by the closed form, or what a simulation showed."""
        # While replicas start a queue grows that all of them would carry.
        if self.growth_per_second and not self.overloaded and self.options.autoscale is None:
            return carried_at_most(self.fleet, self.workload, self.options.router, self.growth_per_second)
        # A few requests find room at any rate.
        places = float(self.fleet.decode.form.prices.counts.max()) * self.base.plan.dp * self.share
        many = sum(len(trace.finished) for trace in self.traces) >= 4 * places
        full = many and self.saturated is not None and not self.growth_per_second
        served = self.requests_per_second if many and self.workload.arrivals.kind == "closed" else 0.0
        return max(self.base.plan.dp * max(self.steady.capacity, full * self.steady.rate), served)

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
        decode = self.fleet.decode
        return causes_of(self.requests, ((self.fleet.prefill or decode).table, decode.table), metric, name)

    def own_values(self) -> dict[str, Any]:
        """Return what follows from the report alone as plain values; None where one is not known.

        `running`, `waiting` and `kv` are of one replica, of one of its queues where attention is data
        parallel or pipeline stages have several batches in flight.
        """
        traces, requests = self.all_traces, self.requests
        offered = self.workload.arrivals.rate or (self.requests_per_second if requests else None)
        total = sum(t.prompt_tokens + t.hit_tokens for t in traces)
        return {
            "meets": self.meets,
            "chance_to_meet": self.chance_to_meet,
            "risk": self.options.risk or None,
            "fits": self.fits,
            "stable": self.stable,
            "model": self.base.case.model.name,
            "plan": {axis: getattr(self.base.plan, axis) for axis in AXES},
            "engine": self.base.case.engine.name,
            "load": {"requests_per_second": offered, "growth_per_second": self.growth_per_second},
            "served": {
                "requests_per_second": self.requests_per_second if requests else None,
                "output_tokens_per_second": self.output_tokens_per_second if requests else None,
            },
            "goodput": {
                "share": self.goodput_share if requests else None,
                "requests_per_second": self.goodput_share * self.requests_per_second if requests else None,
            },
            "capacity": {"requests_per_second": self.capacity_per_second},
            "utilization": self.utilisation if self.open_loop else None,
            **with_unit(self.latencies),
            "interval": self.interval,
            **self._of_a_replica(),
            "preemptions": sum(t.preemptions for t in traces),
            "recomputed_tokens": sum(t.recomputed_tokens for t in traces),
            "prefix_hit_share": sum(t.hit_tokens for t in traces) / total if total else None,
            "replicas": self.replicas,
            "attention_dp": self.groups,
            "devices": self.devices,
            "prefill": self.prefill.to_dict(requests) if self.prefill else None,
            "autoscale": self.scaling.to_dict(self.devices // self.replicas) if self.scaling else None,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_output_tokens": self.usd_per_million_output_tokens,
            "limits": self._limits(),
            **self._of_classes(),
            "why": {m: [{"part": part, "seconds": seconds} for part, seconds in self.why(m)] for m in EXPLAINED},
            "method": {
                "name": "simulated" if traces else "steady",
                "requests": len(requests),
                "iterations": sum(t.iterations for t in traces),
                "seed": self.workload.seed,
            },
            "assumptions": list(self.assumptions),
        }

    def _of_a_replica(self) -> dict[str, dict[str, float | None]]:
        """Return what runs, what waits and what the cache holds, on average over the run and at most."""
        traces = self.traces
        groups = self.scaling.mean_replicas * self.groups if self.scaling else self.base.plan.dp * self.share

        def mean(seconds: float) -> float | None:
            return seconds / (self.span_seconds * groups) if self.span_seconds else None

        return {
            "running": {
                "mean": mean(sum(t.running_seconds for t in traces)),
                "max": max((t.most_running for t in traces), default=None),
            },
            "waiting": {
                "mean": mean(sum(self._waited(r) for r in self.requests)),
                "max": max((t.most_waiting for t in traces), default=None),
            },
            "kv": {
                "capacity_tokens": int(self.fleet.decode.cache_tokens),
                "used_mean": mean(sum(t.cache_token_seconds for t in traces)),
                "used_max": max((t.most_cache_tokens for t in traces), default=None),
            },
        }

    def _waited(self, request: Request) -> float:
        """Return the seconds in the queue of a replica: of one that decodes from the coming of the cache."""
        if not self.prefill:
            return request.queue_seconds
        return request.joined - request.ready if request.joined >= 0 else 0.0

    def _limits(self, of: str = "") -> list[dict[str, Any]]:
        """Return the limits on all requests, or on those of a class, and whether each is kept."""
        return [
            {"metric": one.metric, "quantile": one.quantile, "seconds": one.seconds,
             "kept": one not in self.broken, "chance": self.chance_of(one)}
            for one in self.options.limits if one.of == of
        ]  # fmt: skip

    def _of_classes(self) -> dict[str, list[dict[str, Any]]]:
        """Return what happened to the requests of each class, nothing where there are none."""
        records = []
        for one in self.workload.classes:
            part, latencies = self.by_class.get(one.name, ([], {}))
            head = {"name": one.name, "share": one.share, "requests": len(part), "limits": self._limits(one.name)}
            records.append(head | with_unit(latencies))
        return {"classes": records} if records else {}
