"""All replicas of a deployment: routers before them, and pools that compute prompts apart from answers.

A pool of prefill workers computes prompts and sends their cache to a decode pool (arXiv:2401.09670, arXiv:2311.18677);
what of it is sent after the prompt, and whose the first token is, are fields of a `Policy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from itertools import islice
from random import Random
from typing import Any, Literal

from shardwise.cost import Network, collective_seconds, network_of, with_peers
from shardwise.hardware import Cluster
from shardwise.ledger.opened import called
from shardwise.plans import Workload
from shardwise.records import dataclass, replace
from shardwise.serving._case import ServingCase
from shardwise.serving._memory import caches_of, stage_cache
from shardwise.serving._policy import Policy
from shardwise.serving._report import InferReport
from shardwise.serving._sizes import PipelineStage, sizes_of
from shardwise.serving.load._api_server import ServerWaits
from shardwise.serving.load._batches import groups_of, lanes_of
from shardwise.serving.load._clients import closed_loop
from shardwise.serving.load._clock import EngineQueue
from shardwise.serving.load._means import Steady, handed_over
from shardwise.serving.load._replica import LimitMissed, LimitWatch, Replica
from shardwise.serving.load._requests import Request, Trace, ended_rate, request_of
from shardwise.serving.load._sample import Sample, requests_of
from shardwise.serving.load._simulate import Scheduler
from shardwise.serving.load._state import Follow, Stage
from shardwise.serving.load._steady import Replicas
from shardwise.serving.load._steps import StepTable

Router = Literal["round-robin", "random", "least-loaded", "prefix"]
# github.com/sgl-project/sglang sgl-router, cache_aware with the defaults of sglang_router/router_args.py: loads are
# balanced where they differ by more requests and a greater ratio than this; else more of a prompt must match than this.
_APART, _RATIO, _MATCHED = 64, 1.5, 0.3


def attention_groups(base: InferReport) -> int:
    """Return the groups of attention data parallelism that share the experts of a replica."""
    return groups_of(base.plan, base.case.model.has_experts)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Replicas of one engine and layout: what prices their steps, how they schedule, and what they run of a request."""

    base: InferReport
    policy: Policy
    table: StepTable
    form: Replicas
    stage: Stage = "both"
    known: dict[Workload, float] = field(default_factory=dict, compare=False)
    """Requests a second with full queues that are known, by workload whatever its rate."""

    @property
    def groups(self) -> int:
        """Groups of attention that share the experts of a replica."""
        return attention_groups(self.base)

    @property
    def cache_tokens(self) -> float:
        """Tokens that requests of the mean context hold on a replica together."""
        return float(self.form.cache_tokens[0])

    @property
    def many(self) -> int:
        """Groups of all replicas."""
        return self.base.plan.dp

    def saturated(self, workload: Workload) -> float:
        """Return requests a second of all replicas with full queues.

        Four times as many requests as run at once, so that the middle half has neither the filling nor the draining.
        """
        asked = replace(workload, arrivals=replace(workload.arrivals, rate=1.0))
        if asked not in self.known:
            self.known[asked] = self._saturated(workload)
        return self.known[asked]

    def _saturated(self, workload: Workload) -> float:
        most, queues = int(self.form.prices.counts.max()), self.groups * lanes_of(self.base.plan, self.policy.one_batch)
        count = min(max(4 * most, 400) * queues, max(20_000, 400 * queues))
        requests = [request_of(0.0, drawn) for drawn in islice(workload.draws(), count)]
        for request in requests:
            request.remote = self.stage == "decode"
        traces = self.start(workload, simulated=1)[0].run(requests)
        ends = sorted(request.end for trace in traces for request in trace.finished)
        return ended_rate(ends[len(ends) // 4 : 3 * len(ends) // 4 + 1]) * self.many / self.groups

    def start(self, workload: Workload, follow: Follow | None = None, simulated: int = 0) -> list[Replica]:
        """Return the replicas, or as many of them, idle; of a server that runs on, with the shared prefixes."""
        replicas = [self.replica(follow) for _ in range(simulated or max(self.base.plan.dp // self.groups, 1))]
        if not workload.finite and self.policy.prefix_cache:
            for group in (group for engine in replicas for group in engine.groups):
                group.prefixes.warm(workload.prefixes)
        return replicas

    def replica(self, follow: Follow | None = None) -> Replica:
        """Return one replica, idle."""
        policy, lanes = self.policy, lanes_of(self.base.plan, self.policy.one_batch)
        cache = self.cache_tokens / (1 if policy.shared_waiting else lanes)
        own = policy if policy.shared_places else replace(policy, max_sequences=-(-policy.max_sequences // lanes))
        engine = Replica(self.table, own, cache, self.groups * lanes, follow, self.stage)
        return engine.through_stages(policy, self.groups) if lanes > 1 else engine


class Routing:
    """Sends requests to groups of replicas; where it is `clocked` others run them, in the order of their clocks."""

    def __init__(self, engines: list[Replica], router: Router, seed: int, clocked: bool = False) -> None:
        self.router, self.sent, self.clocked = router, 0, clocked
        self.random = Random(f"router {seed}")
        self.over(engines)

    def over(self, engines: list[Replica]) -> None:
        """Send to these replicas from here on."""
        self.engines = engines
        self.every = [group for engine in engines for group in engine.entries]

    def group(self, request: Request, at: float) -> Scheduler:
        """Return the group that a request goes to; to look at loads all that happens before is simulated first.

        vLLM production stack and SGLang's router call it least loaded; ties go to the first. With prefixes it is the
        least loaded of those whose cache has most of the prompt, unless loads are far apart. Behind the router a
        replica gives a request to one of its groups as its engine does.
        """
        self.sent += 1
        if self.router in ("random", "round-robin"):
            turn, index = divmod(self.sent - 1, len(self.engines))
            if self.router == "random":
                index = self.random.randrange(len(self.engines))
            return self._within(self.engines[index], turn, at)
        self._advance(self.engines, at)
        follows = bool(request.blocks) and request.blocks[0][0] >= 0
        among = self._matching(request) if self.router == "prefix" and follows else self.every
        return min(among, key=lambda one: one.outstanding)

    def _advance(self, engines: list[Replica], at: float) -> None:
        """Simulate what happens before a time, where nobody else does."""
        for engine in () if self.clocked else engines:
            engine.advance(at)

    def _within(self, engine: Replica, turn: int, at: float) -> Scheduler:
        """Return the group of a replica that its engine gives a request to."""
        groups, balances = engine.entries, engine.balances
        if len(groups) == 1 or balances == "turns" or engine.queues is not None:
            return groups[turn % len(groups)]
        self._advance([engine], at)
        if balances == "loads":
            return min(groups, key=lambda one: one.outstanding)
        return min(groups, key=lambda one: one.outstanding + 3 * (len(one.waiting) + len(one.pending)))

    def _matching(self, request: Request) -> list[Scheduler]:
        """Return the groups with most of a prompt in their cache; all where that is little, or loads are far apart."""
        loads = [one.outstanding for one in self.every]
        if max(loads) - min(loads) > _APART and max(loads) > _RATIO * min(loads):
            return self.every
        hits = [one.prefixes.hits(request.blocks)[1] for one in self.every]
        if max(hits) <= _MATCHED * request.input_tokens:
            return self.every
        return [one for one, hit in zip(self.every, hits, strict=True) if hit == max(hits)]

    def send(self, request: Request) -> Scheduler:
        """Give a request to a group, which is returned."""
        (group := self.group(request, request.ready)).expect(request)
        return group


@dataclass(frozen=True)
class Transfer:
    """The way of a cache from the workers of one pool to those of another, over the network of a cluster."""

    cluster: Cluster
    source: ServingCase
    target: ServingCase
    policy: Policy

    @cached_property
    def _stages(self) -> tuple[Any, tuple[PipelineStage[float], ...]]:
        sizes = sizes_of(self.target.model, self.target.plan, self.target.job, self.target.domains)
        # Of recurrent layers the state after the prompt, not one for each guess to come.
        one = tuple(tuple(replace(kept, states=1) for kept in layer) for layer in caches_of(self.target, sizes))
        return one, sizes.stages

    def size_bytes(self, tokens: float) -> float:
        """Return bytes that are sent of a prompt: what all ranks of a worker of the decode pool keep of it.

        Heads that ranks share and latents, of which every rank has all, are sent to each.
        """
        caches, stages = self._stages
        return self.target.plan.tp * sum(float(stage_cache(caches, one, tokens)) for one in stages)

    def seconds(self, tokens: float) -> float:
        """Return seconds from the end of a prompt to the arrival of its cache where links are idle.

        Every rank of the pool with the smaller workers sends or takes an equal part. Lengths between powers of two lie
        on a line.
        """
        tokens = max(self.policy.sent_tokens(tokens), 1.0)
        low = math.floor(math.log2(tokens))
        first, last = self._at(low), self._at(low + 1)
        return first + (last - first) * (tokens / 2.0**low - 1)

    def _at(self, power: int) -> float:
        """Return the seconds of a cache of 2 to a power tokens."""
        if power not in self._known:
            ranks = min(plan.tp * plan.pp for plan in (self.source.plan, self.target.plan))
            size = self.size_bytes(2.0**power) / ranks
            self._known[power] = float(collective_seconds(self._network, "send", size, self._span))
        return self._known[power]

    @cached_property
    def _known(self) -> dict[int, float]:
        return {}

    @cached_property
    def _network(self) -> Network[Any]:
        return with_peers(network_of(self.cluster, self.source.efficiencies))

    @cached_property
    def _span(self) -> tuple[int, ...]:
        """Two devices that only the tier joins which holds both pools."""
        return tuple(1 if tier.size < self.cluster.num_devices else 2 for tier in self.cluster.tiers)


class Pools:
    """A prefill and a decode pool under one clock: `run` takes them to the end of their requests."""

    def __init__(
        self,
        pools: tuple[list[Replica], list[Replica]],
        link: Transfer,
        routing: tuple[Router, int],
        follow: Follow | None,
    ) -> None:
        self.link, self.follow, (router, seed) = link, follow, routing
        self.prefill, self.decode = pools
        # A decode worker is sent the whole cache of a prompt: what it has of it does not matter.
        after: Router = "least-loaded" if router == "prefix" else router
        # An answer that ends asks a prefill worker, which may be in the very step that hands a cache over.
        closed = follow is not None
        self.entry = Routing(self.prefill, router, seed, closed)
        self.exit = Routing(self.decode, after, seed + 1, closed)
        self.clocks = EngineQueue(self.prefill), EngineQueue(self.decode)
        self.free: dict[int, float] = {}
        """When the links of a worker are idle again."""
        for engine in self.prefill:
            for group in engine.groups:
                group.follow = self._sent_by(engine)
        for engine in self.decode:
            for group in engine.groups:
                group.follow = self._asked_after(engine) if follow else None

    def _sent_by(self, engine: Replica) -> Follow:
        def hand_over(request: Request) -> None:
            group = self.exit.group(request, request.prefilled)
            taker = id(self.clocks[1].of(group))
            prompted = request.prefilled + group.place_seconds(request.queue_seconds)
            start = max(prompted, self.free.get(id(engine), 0.0), self.free.get(taker, 0.0))
            request.ready = self.free[id(engine)] = self.free[taker] = start + self.link.seconds(request.input_tokens)
            request.remote, request.past, request.target = True, 0, request.input_tokens
            group.expect(request)
            self.clocks[1].look_again(group)

        return hand_over

    def _asked_after(self, engine: Replica) -> Follow:
        def ask(ended: Request) -> None:
            after = self.follow(ended) if self.follow else None
            if after is not None:
                engine.horizon = ended.end
                self.clocks[0].look_again(self.entry.send(after))

        return ask

    def run(self, requests: Iterable[Request]) -> tuple[list[Trace], list[Trace]]:
        """Return what the groups of both pools did; whichever engine is next takes a step."""
        for request in requests:
            self.entry.send(request)
        self.clocks = EngineQueue(self.prefill), EngineQueue(self.decode)
        while True:
            (start, first), (after, last) = (clock.first() for clock in self.clocks)
            if start <= after:
                if start == math.inf:
                    break
                first.advance(math.nextafter(start, math.inf))
                continue
            until = start
            if self.follow is not None:
                until = min(until, *(one.next_end for one in self.decode if one is not last), math.inf)
            last.advance(max(until, math.nextafter(after, math.inf)))
        every = [[trace for engine in pool for trace in engine.finish()] for pool in (self.prefill, self.decode)]
        return every[0], every[1]


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """All replicas of a deployment: one pool, or one that computes prompts before one that decodes."""

    decode: Pool
    prefill: Pool | None = None
    link: Transfer | None = None
    router: Router = "round-robin"
    sample: Sample | None = None
    """The part in an open loop that is simulated; None: all."""
    server: ServerWaits = ServerWaits()

    def at(self, rate: float) -> Steady[float]:
        """Return the closed form at requests a second of all replicas, as of one group of the pool that decodes."""
        many, turns = self.decode.many, self.router == "round-robin"
        steady = self.decode.form.at(rate / many, many / self.decode.groups if turns else 1.0).row(0)
        if self.prefill is None or self.link is None:
            return steady
        workers = self.prefill.many / self.prefill.groups
        first = self.prefill.form.at(rate / self.prefill.many, workers if turns else 1.0).row(0)
        sent = called(self.link.seconds(self.prefill.form.moments.input_tokens), "transfer of the cache")
        return handed_over(
            (first, steady), sent, self.prefill.many / many, self.decode.policy, self.decode.form.moments
        )

    def saturated(self, workload: Workload) -> float:
        """Return requests a second of a group of the pool that decodes, where the queue before it is full."""
        served = (pool.saturated(workload) for pool in (self.decode, self.prefill) if pool)
        return min(served) / self.decode.many

    def run(
        self, workload: Workload, router: Router, watch: LimitWatch | None = None
    ) -> tuple[list[Trace], list[Trace]]:
        """Return what the groups of both pools did under a workload; none computes prompts apart in one pool.

        One pool in an open loop ends where what is watched is missed.
        """
        closed = workload.arrivals.kind == "closed"
        if self.prefill is None or self.link is None:
            return [], self._together(workload, router, watch)
        requests, follow = requests_of(workload, workload.count, self.sample, self.server.first), None
        if closed:
            carried = self.at(0.0).capacity * self.decode.many
            first, follow = closed_loop(workload, workload.arrivals.users, workload.count, 0, carried, self.server)
            requests = iter(first)
        some = (self.sample.simulated, self.sample.behind) if self.sample else (0, 0)
        pools = self.prefill.start(workload, None, some[0]), self.decode.start(workload, None, some[1])
        return Pools(pools, self.link, (router, workload.seed), follow).run(requests)

    def _together(self, workload: Workload, router: Router, watch: LimitWatch | None) -> list[Trace]:
        """Return what the groups of one pool did; users of a closed loop stay with their group."""
        simulated, arrivals = self.sample.simulated if self.sample else 0, workload.arrivals
        engines = self.decode.start(workload, watch, simulated)
        if arrivals.kind == "closed":
            every = [group for engine in engines for group in engine.entries]
            carried = self.at(0.0).capacity * self.decode.many / len(every)
            for index, group in enumerate(every):
                users = arrivals.users // len(every) + (index < arrivals.users % len(every))
                if users:
                    count = workload.count * users // arrivals.users
                    group.begin(*closed_loop(workload, users, count, index, carried, self.server))
        else:
            routing = Routing(engines, router, workload.seed)
            try:
                for request in requests_of(workload, workload.count, self.sample, self.server.first):
                    routing.send(request)
                return [trace for engine in engines for trace in engine.finish()]
            except LimitMissed:
                return [group.trace for engine in engines for group in engine.groups]
        return [trace for engine in engines for trace in engine.finish()]
