"""The layouts of a search for a deployment under load, answered by the closed form."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np

from shardwise.cost import band_of, family_of
from shardwise.hardware import Cluster, part_of
from shardwise.plans import Limit, Plan, Serving, Workload
from shardwise.records import dataclass, replace
from shardwise.search._load_bounds import SHARES, least, rows_of, stacked, with_rows, with_users
from shardwise.search._serving_grid import ServingGrid
from shardwise.search._serving_space import ServingSpace
from shardwise.search._space import IntRanges
from shardwise.serving import ServingCase, conditions_of, held_tokens_of, take_rows, tokens_per_step
from shardwise.serving.load import (
    FULLEST,
    HEADLINES,
    LoadOptions,
    Policy,
    Replicas,
    ServeReport,
    Steady,
    batches_of,
    groups_of,
    load_prices,
    moments_of,
    most_running,
    policy_for,
    serve,
    think_of,
    with_tail,
)

POOLS = ("aggregated", "disaggregated", "both")
LOAD_OBJECTIVES = ("devices", "cost", "ttft", "tpot", "e2e")
# Devices of one replica that are tried unless the space says otherwise.
REPLICA_DEVICES = IntRanges(ranges=((1, 16), (24, 24), (32, 32), (64, 64)))
# Replicas for each that a load fills, where it does not matter how many there are.
_EMPTY = 1000.0
# Of fewer layouts than this share of those that are asked together a closed form of their own is quicker.
FEW = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSpace:
    """What is searched: layouts and formats of a serving space, step tokens and sequences (0: the engine's own)."""

    layouts: ServingSpace = ServingSpace(devices=REPLICA_DEVICES)
    step_tokens: tuple[int, ...] = (0, 2048, 16384)
    max_sequences: tuple[int, ...] = (0, 64, 256)
    pools: str = "aggregated"
    """Whether one pool does both ("aggregated"), prompts have a pool of their own ("disaggregated"), or "both"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A layout with its batch limits and replicas, and what the closed form says of it."""

    plan: Plan
    """One replica, whose groups of attention are its `dp`."""
    job: Serving
    engine: Any
    replicas: int
    steady: Steady[float]
    prefill: Plan | None = None
    """All workers that compute prompts, where another pool decodes."""

    @property
    def devices(self) -> int:
        """Devices of all replicas."""
        return self.plan.num_devices * self.replicas + (self.prefill.num_devices if self.prefill else 0)

    @property
    def first_groups(self) -> int:
        """Groups of attention of a replica that computes prompts."""
        return groups_of(self.prefill, True) if self.prefill else 1

    def more(self, metrics: Collection[str]) -> Candidate:
        """Return a candidate with a worker or so more of the pool that metrics which missed a limit are about."""
        if self.prefill is not None and "ttft" in metrics and "tpot" not in metrics:
            many, each = self.prefill.dp // self.first_groups, self.first_groups
            return replace(self, prefill=replace(self.prefill, dp=each * (many + max(many // 16, 1))))
        return replace(self, replicas=self.replicas + max(self.replicas // 16, 1))

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells two deployments apart but for replicas and batch limits."""
        p, job, first = self.plan, self.job, self.prefill
        apart = (first.tp, first.pp, first.ep) if first else ()
        return apart, str(self.engine), p.tp, p.pp, p.ep, p.etp, job.weights, job.kv_cache, job.compute


@dataclass(frozen=True, kw_only=True)
class LoadGroup:
    """The layouts of one engine, format and batch limit that hold the longest request, with their closed form."""

    job: Serving
    engine: Any
    plans: tuple[Plan, ...]
    form: Replicas | None
    short: int
    policy: Policy
    case: ServingCase

    @cached_property
    def empty(self) -> Steady[Any]:
        """What a replica of each layout takes that nobody else uses."""
        if self.form is None:
            raise LookupError(self)
        return self.form.at(0.0)

    @cached_property
    def shares(self) -> Steady[Any]:
        """What a replica of each layout takes at shares of its capacity, as rows."""
        if self.form is None:
            raise LookupError(self)
        return stacked([self.form.at(share * self.form.capacity) for share in SHARES])

    @cached_property
    def devices(self) -> Any:
        """Devices of one replica of each layout."""
        return np.array([plan.num_devices for plan in self.plans])

    def some(self, rows: Any) -> LoadGroup:
        """Return some of the layouts, by their rows in order, with what is known of all."""
        if self.form is None:
            raise LookupError(self)
        plans = tuple(self.plans[row] for row in rows.tolist())
        part = replace(self, plans=plans, form=self.form.some(rows))
        vars(part)["empty"] = rows_of(self.empty, rows)
        return part


@dataclass(frozen=True, kw_only=True)
class LoadSearch:
    """The question, and its layouts by group."""

    grid: ServingGrid
    space: LoadSpace
    workload: Workload
    options: LoadOptions
    objective: str
    cluster: Cluster
    """All devices that replicas may fill."""
    sent: dict[tuple[Any, ...], float] = field(default_factory=dict)
    """Seconds of sending a cache that are known."""
    fewest_known: dict[tuple[int, float], tuple[Any, Steady[Any]]] = field(default_factory=dict)
    """Fewest replicas of groups that are known, and what the closed form says of as many."""
    likely: dict[Plan, float] = field(default_factory=dict)
    """The same of layouts, with any batch limits."""
    pairs: dict[tuple[int, int, int], float] = field(default_factory=dict)
    """Devices of pairs of pools that are more than there are, infinite of those that miss a limit."""

    @cached_property
    def groups(self) -> tuple[LoadGroup, ...]:
        """Every group of layouts, whatever the rate and the limits: those of an earlier question where they agree."""
        workload = replace(self.workload, arrivals=replace(self.workload.arrivals, rate=1.0))
        return _groups(self.grid, self.space, workload, replace(self.options, limits=(), risk=0.0))

    def made(self) -> tuple[LoadGroup, ...]:
        """Return every group of layouts; those whose engine schedules alike count once."""
        groups, seen = [], set()
        for (word, case), step, sequences in product(
            self.grid.setups if self.kinds else (), self.space.step_tokens, self.space.max_sequences
        ):
            engine, weights, kv_cache, compute = word
            words = {"weights": weights, "kv_cache": kv_cache, "compute": compute}
            job = replace(
                self.grid.job, **words, max_batched_tokens=step or self.grid.job.max_batched_tokens,
                max_sequences=sequences or self.grid.job.max_sequences,
            )  # fmt: skip
            policy = policy_for(case, job, self.workload, self.options)
            key = word, policy
            if key not in seen:
                seen.add(key)
                groups.append(self._group(case, job, engine, policy))
        return tuple(groups)

    @cached_property
    def kinds(self) -> tuple[Plan, ...]:
        return tuple(self.grid.layouts.plan(row) for row in self.grid.kinds[0].tolist())

    def _group(self, case: ServingCase, job: Serving, engine: Any, policy: Policy) -> LoadGroup:
        prompt, made = self.workload.longest
        asked = replace(
            job, batch=1, input_tokens=prompt, output_tokens=made, max_batched_tokens=policy.pass_tokens,
            max_sequences=policy.max_sequences,
        )  # fmt: skip
        limited = replace(case, job=asked)
        sizes = self.grid.sizes(case.model)
        moments = moments_of(self.workload, policy, step_makes=tokens_per_step(job))
        tokens = self.room(limited, moments.context)
        rows = np.flatnonzero(tokens >= prompt + made)
        plans = tuple(self.kinds[row] for row in rows.tolist())
        short = int(np.isfinite(tokens).sum()) - len(plans)
        if not plans:
            return LoadGroup(job=job, engine=engine, plans=(), form=None, short=short, policy=policy, case=case)
        batches, runs = batches_of(plans, case.model.has_experts, policy.one_batch), policy.of_answers(moments.steps)
        most = most_running(runs, moments, tokens[rows], batches.lanes)
        prices = load_prices(limited, take_rows(sizes, rows), runs, moments, most, batches)
        form = Replicas(prices=prices, policy=runs, moments=moments, cache_tokens=tokens[rows], batches=batches)
        return LoadGroup(job=job, engine=engine, plans=plans, form=form, short=short, policy=policy, case=case)

    def room(self, case: ServingCase, context: float) -> Any:
        """Return the tokens of cache of every layout, for a mean context; less than none where it is not launched."""
        tokens = np.array(held_tokens_of(case, self.grid.sizes(case.model), context), float)
        return np.where(self.grid.launches(case), tokens, -np.inf)

    def steady(self, group: LoadGroup, replicas: Any) -> Steady[Any]:
        """Return the closed form of so many replicas of each layout, as of one of their groups of attention."""
        if group.form is None:
            raise LookupError(group)
        groups = group.form.batches.groups
        if users := self.workload.arrivals.users:
            return with_users(group.shares, users / (replicas * groups), think_of(self.workload))
        turns = replicas if self.options.router == "round-robin" else 1.0
        return group.form.at(self.workload.arrivals.rate / (replicas * groups), np.maximum(turns, 1.0))

    def keeps(self, group: LoadGroup, replicas: Any) -> tuple[Any, Steady[Any]]:
        """Return which layouts keep every limit on so many replicas, by the closed form, and what it says of them."""
        steady, closed = self.steady(group, replicas), self.workload.arrivals.users > 0
        # A closed loop asks no more than is carried.
        kept = closed | (steady.rate <= FULLEST * steady.capacity)
        for limit in self.options.limits:
            kept = kept & (least(steady, group.empty, limit, closed) * self.margin(group.case, limit) <= limit.seconds)
        return kept, steady

    def margin(self, case: ServingCase, limit: Limit) -> float:
        """Return how far a prediction has to lie below a limit, at least, for the chance that was asked."""
        if not self.options.risk:
            return 1.0
        known = conditions_of(replace(case, plan=Plan()), family_of(case.cluster.device))
        bands = (band_of(part, with_tail(known, limit.quantile)) for part in HEADLINES[limit.metric])
        return max(min(band.at(self.options.risk) for band in bands), 1.0)

    def fewest(self, group: LoadGroup, devices: float) -> Any:
        """Return the fewest replicas of each layout that keep the limits on so many devices, infinite where none do."""
        return self.answered(group, devices)[0]

    def answered(self, group: LoadGroup, devices: float) -> tuple[Any, Steady[Any]]:
        """Return the same, and what the closed form says of as many where any do.

        Of endless devices as many are tried as leave each almost empty; first those that carry the load, or few more.
        """
        known = self.fewest_known.get((id(group), devices))
        if known is not None:
            return known
        (low, high, kept), steady = self._sought(group, devices)
        part, rows, more = group, np.arange(len(low)), 0.0
        # As many as with other batch limits are often enough, and one less is not.
        likely = np.array([self.likely.get(plan, 0) for plan in group.plans], float)
        turn = 0
        while (sought := kept & (low < high)).any():
            # What is known, or is never enough, is not tried again.
            if not self.workload.arrivals.users and np.count_nonzero(sought) < FEW * len(rows):
                rows = np.flatnonzero(sought)
                part = group.some(rows)
            at, until, near = low[rows], high[rows], likely[rows]
            tried = np.minimum(at + more, np.floor((at + until) / 2))
            if turn < 2:
                near = np.where(until == near, near - 1, near)
                tried = np.where((at <= near) & (near < until), near, tried)
            tried, turn = np.where(sought[rows], tried, until), turn + 1
            (fine, means), more = self.keeps(part, tried), 4 * more + 3
            steady = with_rows(steady, rows[fine], rows_of(means, fine))
            low[rows], high[rows] = np.where(fine, at, np.minimum(tried + 1, until)), np.where(fine, tried, until)
        replicas = np.where(kept, high, np.inf)
        self.fewest_known[id(group), devices] = replicas, steady
        self.likely.update(
            (plan, few) for plan, few in zip(group.plans, replicas.tolist(), strict=True) if few < np.inf
        )
        return replicas, steady

    def _sought(self, group: LoadGroup, devices: float) -> tuple[tuple[Any, Any, Any], Steady[Any]]:
        """Return between which numbers of replicas the fewest of each layout are, and which are ever enough.

        And what the closed form says of the last of these.
        """
        if group.form is None:
            raise LookupError(group)
        rate, users, have = self.workload.arrivals.rate, self.workload.arrivals.users, self.cluster.num_devices
        low = np.maximum(np.ceil(rate / (FULLEST * group.form.batches.groups * group.form.capacity)), 1.0)
        most = devices // group.devices if np.isfinite(devices) else _EMPTY * low
        most = np.minimum(most, users) if users else most  # no replica is without a user
        high = np.maximum(most, low).astype(float)
        known = np.zeros(len(low), bool)
        if devices > have:
            # What is enough on all that there are is enough on more, and what is not needs more.
            (few, steady), more_than_all = self.answered(group, have), have // group.devices + 1
            known = np.isfinite(few)
            low = np.where(known, few, np.minimum(np.maximum(low, more_than_all), high))
            high = np.where(known, few, high)
        kept, rows = known.copy(), np.flatnonzero(~known)
        if users or not known.any():
            kept, steady = self.keeps(group, high)
            kept = kept & (high <= most)
        elif len(rows):
            fine, means = self.keeps(group.some(rows), high[rows])
            kept[rows] = fine & (high <= most)[rows]
            steady = with_rows(steady, rows, means)
        return (low, high, kept), steady

    def ever(self, group: LoadGroup) -> Any:
        """Return which layouts keep the limits on some number of devices."""
        return self._sought(group, np.inf)[0][2]

    @property
    def sparing(self) -> bool:
        """Whether the fewest devices are sought; else all of the cluster are used."""
        return self.objective in ("devices", "cost")

    def value(self, candidate: Candidate) -> tuple[float, ...]:
        """Return what is sought, less being better, and what decides between equals."""
        steady = candidate.steady
        if self.sparing:
            return candidate.devices, steady.e2e_seconds
        return getattr(steady, f"{self.objective}_seconds"), candidate.devices

    def simulate(self, candidate: Candidate, until_missed: bool = False) -> ServeReport:
        """Return the report of a candidate by `serve`, which may end once a limit is missed."""
        plan = replace(candidate.plan, dp=candidate.plan.dp * candidate.replicas)
        count = max(self.workload.count, min(300 * candidate.replicas, 10_000 if self.options.settled else 20_000))
        options = replace(
            self.options, serving=replace(self.options.serving, engine=candidate.engine), prefill=candidate.prefill,
            until_missed=until_missed,
        )  # fmt: skip
        cluster = part_of(self.cluster, candidate.devices)
        return serve(self.grid.model, cluster, plan, replace(self.workload, count=count), candidate.job, options)


@lru_cache(maxsize=2)
def _groups(grid: ServingGrid, space: LoadSpace, workload: Workload, options: LoadOptions) -> tuple[LoadGroup, ...]:
    asked = LoadSearch(
        grid=grid, space=space, workload=workload, options=options, objective="devices", cluster=grid.cluster
    )
    return asked.made()
