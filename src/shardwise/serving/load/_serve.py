"""A deployment under load: from a model, a cluster, a plan and a workload to a report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random
from typing import Any

from shardwise.errors import InputError, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Serving, Workload
from shardwise.serving._case import ServingCase
from shardwise.serving._report import InferReport, infer
from shardwise.serving.load._policy import Policy, policy_of
from shardwise.serving.load._report import LoadOptions, Router, ServeReport
from shardwise.serving.load._requests import moments_of
from shardwise.serving.load._simulate import Replica, Request, Trace
from shardwise.serving.load._steady import replicas_of
from shardwise.serving.load._steps import StepTable


def requests_of(workload: Workload, count: int) -> Iterator[Request]:
    """Yield the requests of an open loop or a burst, by arrival."""
    times = workload.arrivals.seconds(count, Random(f"arrivals {workload.seed}"))
    for at, (tokens, made, cached) in zip(times, workload.draws(), strict=False):
        yield Request(at, tokens, made, cached)


def _shares(requests: Iterator[Request], replicas: int, router: Router, seed: int) -> list[list[Request]]:
    """Return the requests of each replica."""
    random = Random(f"router {seed}")
    found: list[list[Request]] = [[] for _ in range(replicas)]
    for index, request in enumerate(requests):
        found[random.randrange(replicas) if router == "random" else index % replicas].append(request)
    return found


def _routed(requests: Iterator[Request], engines: list[Replica]) -> list[Trace]:
    """Return what replicas do where each request goes to the one with the fewest that have not ended.

    vLLM production stack and SGLang's router call it least loaded; ties go to the first.
    """
    for request in requests:
        for engine in engines:
            engine.advance(request.arrival)
        least = min(engines, key=lambda engine: engine.outstanding)
        least.pending.append(request)
    return [engine.run(()) for engine in engines]


def _closed(workload: Workload, users: int, count: int, replica: int) -> tuple[list[Request], Any]:
    """Return the first requests of a replica's users, and what gives a user's next one."""
    draws, think = replace(workload, seed=workload.seed * 1009 + replica).draws(), workload.arrivals.think_seconds
    issued = min(users, count)

    def made(at: float, user: int) -> Request:
        tokens, out, cached = next(draws)
        return Request(at, tokens, out, cached, user)

    def follow(ended: Request) -> Request | None:
        nonlocal issued
        if issued >= count:
            return None
        issued += 1
        return made(ended.end + think, ended.user)

    return [made(0.0, user) for user in range(issued)], follow


def _problems(base: InferReport, workload: Workload, options: LoadOptions) -> Problems:
    """Return what the deployment cannot take of the workload."""
    found = workload.problems()
    prompt, made = workload.longest
    model = base.case.model
    if model.max_context and prompt + made > model.max_context:
        rule = f"and {made} tokens of output are more than the context of {model.name}, {model.max_context}"
        found.add("input_tokens", prompt, rule, f"use at most {max(model.max_context - made, 1)}")
    if base.fits and prompt + made > base.kv_cache_tokens:
        rule = f"and {made} tokens of output are more than the {base.kv_cache_tokens:,} tokens of a replica's cache"
        found.add("input_tokens", prompt, rule, "use more devices a replica (--tp), or a narrower --kv-cache")
    for limit in options.limits:
        found.items.extend(limit.problems().items)
        if workload.count < limit.needed_requests:
            rule = f"are too few for a {limit.quantile}: {limit.needed_requests} are needed"
            found.add("requests", workload.count, rule, f"use {limit.needed_requests} or more")
    return found


def policy_for(case: ServingCase, job: Serving, workload: Workload, options: LoadOptions) -> Policy:
    """Return how the engine of a case schedules a workload: its defaults, and what the job and the options say."""
    prompt, made = workload.longest
    engine = case.engine
    policy = policy_of(engine.name, case.cluster.device, int(engine.memory.block_tokens), prompt + made)
    policy = replace(
        policy,
        step_tokens=job.max_batched_tokens or policy.step_tokens,
        max_sequences=job.max_sequences or policy.max_sequences,
    )
    if options.async_scheduling is not None:
        policy = replace(policy, async_scheduling=options.async_scheduling)
    if not policy.chunked:
        # A prompt that fills a step beside none that decode would never start beside some.
        least = prompt + made + (policy.max_sequences if policy.mixed else 0)
        policy = replace(policy, step_tokens=max(policy.step_tokens, least))
    return policy


def serve(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    workload: Workload,
    job: Serving | None = None,
    options: LoadOptions | None = None,
) -> ServeReport:
    """Return what a deployment does under a workload; raises `InputError` with every problem.

    Each replica is simulated iteration by iteration with prices of the ledger; a load above the capacity of the closed
    form is not simulated, since its queue grows without end. `job` says formats and memory as for `infer`.
    """
    options, job = options or LoadOptions(), job or Serving()
    problems = workload.problems()
    if problems.items:
        raise InputError(dict.fromkeys(problems.items))
    prompt, made = workload.longest
    asked = replace(job, batch=1, input_tokens=prompt, output_tokens=made)
    base = infer(model, cluster, plan, asked, options.serving)
    policy = policy_for(base.case, job, workload, options)
    limits = replace(asked, max_batched_tokens=policy.step_tokens, max_sequences=policy.max_sequences)
    base = infer(model, cluster, plan, limits, options.serving)
    problems = _problems(base, workload, options)
    if problems.items:
        raise InputError(dict.fromkeys(problems.items))
    return _answer(base, workload, policy, options)


# Up to this share of the capacity of the closed form nobody doubts that a load is carried.
_NEAR = 0.7


def _saturated(table: StepTable, policy: Policy, cache: float, workload: Workload, most: int) -> float:
    """Return requests a second of a replica with a full queue, of which `most` run at once.

    Four times as many requests as run at once, so that the middle half has neither the filling nor the draining.
    """
    drawn = islice(workload.draws(), min(max(4 * most, 400), 20_000))
    requests = [Request(0.0, tokens, made, cached) for tokens, made, cached in drawn]
    ends = sorted(request.end for request in Replica(table, policy, cache).run(requests).finished)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    return (last - first) / max(ends[last] - ends[first], 1e-12)


def _answer(base: InferReport, workload: Workload, policy: Policy, options: LoadOptions) -> ServeReport:
    """Return the report of a deployment that can take the workload's requests one by one."""
    arrivals, replicas, cache = workload.arrivals, base.plan.dp, float(base.kv_cache_tokens)
    prompt, made = workload.longest
    most = max(min(policy.max_sequences, int(cache // policy.block_tokens)), 1)
    # Who was sent away runs prompt and output again, in one step where prompts are not cut.
    step = policy.step_tokens if policy.chunked else max(policy.step_tokens, prompt + made)
    table = StepTable(base.case, most, step, prompt + made)
    notes = (
        f"{base.case.engine.title}: up to {policy.step_tokens:,} tokens and {policy.max_sequences:,} sequences a step",
        "latencies are the server's: no network, no tokenizer of the client",
    )
    unknown = [f"{base.case.engine.title}'s scheduler is {policy.source}"] if policy.source.startswith("taken") else []
    policy = replace(policy, max_sequences=min(policy.max_sequences, table.max_sequences))
    form = replicas_of(base.case, policy, moments_of(workload, policy), cache)
    rate = len(arrivals.times) / max(arrivals.times[-1], 1e-9) if arrivals.kind == "trace" else arrivals.rate
    steady = form.at(rate / replicas).row(0)
    report = ServeReport(
        base=base, workload=workload, policy=policy, steady=steady,
        empty=form.at(0.0).row(0), saturated=None, traces=(), options=options,
        assumptions=tuple(dict.fromkeys((*base.assumptions, *notes, *unknown))),
    )  # fmt: skip
    if base.fits and report.open_loop and steady.utilisation > _NEAR:
        report = replace(report, saturated=_saturated(table, policy, cache, workload, int(form.prices.counts.max())))
    if report.saturated is not None and not report.hopeless:
        said = f"near what is carried: latencies of these {workload.count:,} requests, later ones may wait longer"
        report = replace(report, assumptions=(*report.assumptions, said))
    if not base.fits or report.hopeless:
        return report
    traces = []
    if arrivals.kind == "closed":
        for index in range(replicas):
            users = arrivals.users // replicas + (index < arrivals.users % replicas)
            if users:
                first, follow = _closed(workload, users, workload.count * users // arrivals.users, index)
                traces.append(Replica(table, policy, cache, follow).run(first))
    elif options.router == "least-loaded":
        engines = [Replica(table, policy, cache) for _ in range(replicas)]
        traces += _routed(requests_of(workload, workload.count), engines)
    else:
        for share in _shares(requests_of(workload, workload.count), replicas, options.router, workload.seed):
            traces.append(Replica(table, policy, cache).run(share))
    return replace(report, traces=tuple(traces))
