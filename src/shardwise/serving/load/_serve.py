"""A deployment under load: from a model, a cluster, a plan and a workload to a report."""

from __future__ import annotations

import math
from dataclasses import field
from functools import lru_cache

from shardwise.errors import InputError, Problems
from shardwise.field_types import typed
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Arrivals, Plan, Serving, Workload
from shardwise.records import dataclass, replace
from shardwise.serving._cache import keeps_states
from shardwise.serving._capacity import state_block
from shardwise.serving._captured import padding_notes
from shardwise.serving._case import ServingCase, ServingQuestion, complete
from shardwise.serving._host import schedules_serially
from shardwise.serving._policy import Policy, limits_of, most_speculating, policy_of
from shardwise.serving._report import InferReport, infer
from shardwise.serving._speculation import tokens_per_step
from shardwise.serving.load._api_server import server_notes, server_waits
from shardwise.serving.load._autoscale import Autoscaler, scaling_problems
from shardwise.serving.load._batches import groups_of
from shardwise.serving.load._clients import client_note
from shardwise.serving.load._even import gathering_notes
from shardwise.serving.load._fleet import Fleet, Pool, Router, Transfer, attention_groups
from shardwise.serving.load._forms import replicas_of
from shardwise.serving.load._means import Steady
from shardwise.serving.load._moments import moments_of
from shardwise.serving.load._options import LoadOptions
from shardwise.serving.load._prefill_report import PrefillReport, pools_of
from shardwise.serving.load._replica import LimitWatch, uncollected
from shardwise.serving.load._report import ServeReport
from shardwise.serving.load._sample import REQUESTS, requests_of, sample_of, sample_of_pools
from shardwise.serving.load._state import Stage
from shardwise.serving.load._steps import MOST_STEP_TOKENS, StepTable


def request_problems(model: Model, workload: Workload) -> Problems:
    """Return why a model cannot take the requests of a workload, whatever it runs on."""
    problems, (prompt, made) = Problems(), workload.longest
    if not model.generates:
        problems.add("model", model.name, "generates no tokens, and a load is of requests that do", "use infer")
    elif model.max_context and prompt + made > model.max_context:
        rule = f"and {made} tokens of output are more than the context of {model.name}, {model.max_context}"
        problems.add("input_tokens", prompt, rule, f"use at most {max(model.max_context - made, 1)}")
    return problems


def _problems(base: InferReport, workload: Workload, options: LoadOptions) -> Problems:
    """Return what the deployment cannot take of the workload."""
    problems = workload.problems()
    prompt, made = workload.longest
    model = base.case.model
    problems.items += request_problems(model, workload).items
    if model.generates and base.fits and prompt + made > base.held_tokens(prompt + made):
        rule = f"and {made} tokens of output are more than the {base.kv_cache_tokens:,} tokens of a replica's cache"
        problems.add("input_tokens", prompt, rule, "use more devices a replica (--tp), or a narrower --kv-cache")
    if (tokens := base.job.max_batched_tokens) > MOST_STEP_TOKENS:
        rule = f"is more than {MOST_STEP_TOKENS:,}, the largest step that is timed"
        problems.add("max_batched_tokens", tokens, rule, "use for example 8192")
    if options.receive_steps is not None and options.receive_steps < 1:
        problems.add("receive_steps", options.receive_steps, "must be at least 1", "use 1 to look after every step")
    if not 0 <= (options.api_server_seconds or 0.0) < math.inf:
        rule = "must be a finite number of seconds of at least 0"
        problems.add("api_server_seconds", options.api_server_seconds, rule, "use for example 0.001, or None")
    if not 0 <= options.risk < 1:
        problems.add("risk", options.risk, "must be a chance below 1", "use 0 for none, or for example 0.9")
    most, share = options.batch_wait
    if most < 0 or not 0 <= share <= 1:
        rule = "must be steps of at least 0 and a share between 0 and 1"
        problems.add("batch_wait", f"{most}, {share:g}", rule, "use (0, 0) to start prompts at once")
    if options.autoscale:
        most = base.plan.dp // attention_groups(base)
        problems.items.extend(scaling_problems(options.autoscale, most, workload, options.prefill).items)
    for limit in options.limits:
        if wrong := limit.problems(workload).items:
            problems.items.extend(wrong)
            continue
        needed = limit.needed_of(workload)
        if workload.count < needed:
            rule = f"are too few for a {limit.quantile}{f' of {limit.of}' if limit.of else ''}: {needed} are needed"
            problems.add("requests", workload.count, rule, f"use {needed} or more")
    return problems


def policy_for(case: ServingCase, job: Serving, workload: Workload, options: LoadOptions) -> Policy:
    """Return how the engine of a case schedules a workload: its defaults, and what the job and the options say."""
    (prompt, made), engine = workload.longest, case.engine
    policy = policy_of(engine.name, case.cluster.device, int(engine.memory.block_tokens), prompt + made)
    if engine.prefill.chunk_tokens:
        policy = policy.of_ubatches(job.max_batched_tokens or engine.prefill.chunk_tokens)
    guessing = most_speculating(engine.name, case.model.family) if job.speculative_method else 0
    guessing = guessing and max(guessing // groups_of(case.plan, case.model.has_experts), 1)
    policy = replace(
        policy,
        step_tokens=policy.step_tokens if policy.ubatch_tokens else job.max_batched_tokens or policy.step_tokens,
        max_sequences=job.max_sequences or guessing or policy.max_sequences,
    )
    if keeps_states(case.model.kinds):
        policy = policy.of_states(state_block(case))
    if engine.host.schedules_between(job.speculative_method) or schedules_serially(case):
        policy = replace(policy, async_scheduling=False)
    settings = {name: getattr(options, name) for name in ("async_scheduling", "balance_steps", "receive_steps")}
    policy = replace(policy, batch_wait=options.batch_wait, **{n: v for n, v in settings.items() if v is not None})
    policy = replace(policy, overshoots=policy.overshoots and policy.async_scheduling)
    if not policy.chunked:
        # A prompt that fills a step beside none that decode would never start beside some: no engine is set up so
        # unless somebody says it. Steps smaller than a prompt, stated or its own, are not what runs, and that is told.
        own = policy.step_tokens
        spare = made + (policy.max_sequences if policy.mixed else 0) if job.max_batched_tokens < prompt else 0
        policy = replace(policy, step_tokens=max(own, prompt + spare), raised_from=own if own < prompt else 0)
    return policy


@typed
def serve(
    model: Model,
    cluster: Cluster,
    plan: Plan,
    workload: Workload,
    job: Serving | None = None,
    options: LoadOptions | None = None,
) -> ServeReport:
    """Return what a deployment does under a workload, in seconds and requests a second; raises `InputError`.

    Each replica is simulated iteration by iteration with prices of the ledger; a load above the capacity of the closed
    form is not simulated, since its queue grows without end. `job` says formats and memory as for `infer`.

    >>> from shardwise.models import load_model
    >>> from shardwise.plans import Arrivals, Length
    >>> length = Length(mean=256)
    >>> load = Workload(input_tokens=length, output_tokens=length, arrivals=Arrivals(rate=4.0), count=200)
    >>> report = serve(load_model("llama-3.1-8b"), Cluster.parse("1xh100-sxm-80gb"), Plan(dp=0), load)
    >>> report.meets, report.latencies["ttft"]["p99"] < 0.5 < report.latencies["e2e"]["p50"]
    (True, True)
    """
    options, job = options or LoadOptions(), job or Serving()
    workload.problems().raise_if_any()
    decode, prefill = pools_of(cluster, plan, options.prefill)
    prompt, made = workload.longest
    asked = replace(job, batch=1, input_tokens=prompt, output_tokens=made)
    serving = options.serving.on(decode.device).caching(workload.repeats).scheduling(options.async_scheduling)
    options = replace(options, serving=serving)
    question = ServingQuestion(
        model=model, cluster=decode, plan=plan, job=asked, engine=serving.engine, efficiencies=serving.efficiencies
    )
    policy = policy_for(complete(question)[0], job, workload, options)
    limits = replace(asked, max_batched_tokens=policy.pass_tokens, max_sequences=policy.max_sequences)
    base = infer(model, decode, plan, limits, options.serving)
    first = None
    if prefill is not None and options.prefill is not None:
        own = policy.of_prompts_set_aside(limits_of(base.case.engine.name, cluster.device))
        alone = replace(limits, output_tokens=1, max_sequences=own)
        first = _prefill(model, prefill, options.prefill, alone, options)
    _problems(base, workload, options).raise_if_any()
    return _answer(base, first, ServeQuestion(cluster=cluster, workload=workload, policy=policy, options=options))


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeQuestion:
    """What is asked of a deployment: its requests and limits, how its engine schedules, and all of its devices."""

    cluster: Cluster
    workload: Workload
    policy: Policy
    options: LoadOptions


def prefill_plan(plan: Plan, workers: int, tp: int = 0, pp: int = 0, ep: int = 0) -> Plan:
    """Return the plan of a pool of prefill workers, each laid out as a replica of a plan where nothing is said.

    >>> prefill_plan(Plan(tp=8), 2, tp=1, ep=4).dp
    8
    """
    plan_of = replace(
        plan, tp=tp or plan.tp, pp=pp or plan.pp, ep=ep or plan.ep, stage_layers=() if pp else plan.stage_layers
    )
    etp = plan.etp if not (tp or ep) else 1
    groups = max(plan_of.ep * etp // plan_of.tp, 1)
    return replace(plan_of, etp=etp, dp=workers * groups)


def _prefill(model: Model, cluster: Cluster, plan: Plan, job: Serving, options: LoadOptions) -> InferReport:
    """Return the pool that computes prompts; its problems are those of fields of its own."""
    serving = options.serving
    if options.prefill_engine:
        serving = replace(serving, engine=options.prefill_engine).on(cluster.device).caching(serving.caches_prefixes)
        serving = serving.scheduling(options.async_scheduling)
    try:
        return infer(model, cluster, plan, job, serving)
    except InputError as error:
        named = {
            "tp": "prefill_tp",
            "pp": "prefill_pp",
            "ep": "prefill_ep",
            "etp": "prefill_ep",
            "dp": "prefill_workers",
        }
        problems = (replace(one, field=named.get(one.field, one.field)) for one in error.problems)
        raise InputError(problems) from None


MOST_REPLICAS = 100_000
"""Most replicas, each group of attention data parallelism one, that are simulated: they take 400 MB."""
# Up to this share of the capacity of the closed form nobody doubts that a load is carried.
_NEAR = 0.7
# Requests that are simulated, over those that are in the system at once: wanted, the least that needs no word (means
# are then 3 and 6 % below those of an endless run, at 87 % load), and the most that are simulated for it.
_FILLINGS, _FEW_FILLINGS, _MOST_SETTLED = 10, 5, 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class _PoolAsked:
    """What a pool is made of: those that agree in all but when requests arrive, and how many users ask, share one."""

    case: ServingCase
    policy: Policy
    workload: Workload
    stage: Stage
    base: InferReport = field(compare=False)


def _pool(base: InferReport, policy: Policy, workload: Workload, stage: Stage) -> Pool:
    """Return replicas that can take the workload's requests one by one, with their closed form."""
    workload = replace(workload, arrivals=Arrivals(kind=workload.arrivals.kind))
    return _made(_PoolAsked(case=base.case, policy=policy, workload=workload, stage=stage, base=base))


# Of benchmarks, whose numbers of requests have moments of their own, steps are those of one engine, and forms of equal
# lengths too.
_table = lru_cache(maxsize=16)(StepTable)
_form = lru_cache(maxsize=16)(replicas_of)


@lru_cache(maxsize=16)
def _made(asked: _PoolAsked) -> Pool:
    base, policy, (prompt, made) = asked.base, asked.policy, asked.workload.longest
    moments = moments_of(asked.workload, policy, asked.stage, tokens_per_step(base.case.job))
    cache = float(base.held_tokens(moments.context))
    most = max(min(policy.max_sequences, int(cache // policy.block_tokens)), 1)
    # Who was sent away runs prompt and output again, in one step where prompts are not cut.
    step = policy.step_tokens if policy.chunked else max(policy.step_tokens, prompt + made)
    table = _table(base.case, most, step, prompt + made)
    policy = replace(policy, max_sequences=min(policy.max_sequences, table.max_sequences))
    arrivals = asked.workload.arrivals
    at_once = arrivals.kind == "burst" or (arrivals.kind == "closed" and asked.workload.finite)
    form = _form(base.case, policy, moments, cache, at_once)
    return Pool(base=base, policy=policy, table=table, form=form, stage=asked.stage)


def _refuse_more_than_are_simulated(base: InferReport, prefill: InferReport | None) -> None:
    problems = Problems()
    for name, one in (("dp", base), ("prefill_workers", prefill)):
        if one and one.plan.dp > MOST_REPLICAS:
            remedy = "ask for fewer, at a rate as much smaller"
            problems.add(name, one.plan.dp, f"must be at most {MOST_REPLICAS:,} to be simulated", remedy)
    problems.raise_if_any()


def _settled(
    workload: Workload, fleet: Fleet, steady: Steady[float], options: LoadOptions
) -> tuple[Workload, Fleet, tuple[str, ...]]:
    """Return a workload of as many requests as fill what is simulated of a fleet, which is said where it is a part.

    As of users of a closed loop, each of whom asks some ten times; the first requests find an empty deployment.
    """
    together = workload.arrivals.rate * steady.e2e_seconds
    open_loop = workload.arrivals.kind in ("poisson", "constant", "gamma") and not workload.finite
    if not open_loop or options.autoscale or steady.utilisation >= 1:
        return workload, fleet, ()
    if options.settled:
        workload, fleet = _filled(workload, fleet, options.router, _FILLINGS * together)
    if fleet.sample:
        together *= fleet.sample.share
    if workload.count >= _FEW_FILLINGS * together or not math.isfinite(together):
        return workload, fleet, _sampling_notes(fleet)
    note = f"{workload.count:,} requests, {workload.count / together:.1f} times those that are there at once: many find"
    note += " the deployment as empty as it starts; ask for fewer replicas, at a rate as much smaller"
    return workload, fleet, (*_sampling_notes(fleet), note)


def _filled(
    workload: Workload, fleet: Fleet, router: Router, wanted: float, most: int = REQUESTS
) -> tuple[Workload, Fleet]:
    """Return a workload of as many requests as are wanted of a fleet, or of a part of it if those were many."""
    replicas = max(fleet.decode.many // fleet.decode.groups, 1)
    if fleet.prefill is None:
        sample = sample_of(workload, replicas, router, wanted / replicas, most)
    else:
        workers = max(fleet.prefill.many // fleet.prefill.groups, 1)
        sample = sample_of_pools(workload, (workers, replicas), router, wanted / workers)
    if sample.simulated < sample.replicas:
        fleet, wanted = replace(fleet, sample=sample), wanted * sample.share
    return replace(workload, count=max(workload.count, math.ceil(min(wanted, _MOST_SETTLED)))), fleet


def _sampling_notes(fleet: Fleet) -> tuple[str, ...]:
    """Return what is said of a fleet of which a part is simulated."""
    one = fleet.sample
    if one is None:
        return ()
    some = f"{one.simulated:,} of {one.replicas:,} "
    if fleet.prefill is not None:
        replicas = fleet.decode.many // fleet.decode.groups
        some += f"prefill workers and {one.behind:,} of {replicas:,} that decode"
    return (f"{some if one.behind else some + 'replicas'} are simulated, fed as the router feeds all",)


def _notes_of(pool: Pool, workload: Workload, options: LoadOptions) -> list[str]:
    """Return what is said of how the engine schedules, of how requests are routed and of what the cache holds."""
    base, policy = pool.base, pool.policy
    notes = [f"{base.case.engine.brand}'s scheduler is {policy.source}"] if policy.source.startswith("taken") else []
    if workload.repeats and not policy.prefix_cache:
        layers = " of recurrent layers" if keeps_states(base.case.model.kinds) else ""
        notes.append(f"{base.case.engine.brand} caches no prefixes{layers}: every prompt is computed whole")
    if options.router == "prefix" and not any(workload.blocks):
        notes.append("no blocks or conversations tell prompts apart: routed to the least loaded replica")
    if base.fits and round(pool.cache_tokens) != base.kv_cache_tokens:
        mean = round(pool.form.moments.context)
        room = f"requests of {mean:,} tokens hold {pool.cache_tokens:,.0f} together"
        notes.append(f"cache: {room}; windows and states do not grow with them")
    if workload.arrivals.kind in ("poisson", "constant", "gamma"):
        notes += gathering_notes(pool.form, pool.many)
    return notes


def _answer(base: InferReport, prefill: InferReport | None, asked: ServeQuestion) -> ServeReport:
    """Return the report of a deployment that can take the workload's requests one by one."""
    workload, options = asked.workload, asked.options
    arrivals, policy = workload.arrivals, asked.policy
    _refuse_more_than_are_simulated(base, prefill)
    pool = _pool(base, policy, workload, "decode" if prefill else "both")
    padded = padding_notes(base.case)
    unknown = _notes_of(pool, workload, options)
    rate = len(arrivals.times) / max(arrivals.times[-1], 1e-9) if arrivals.kind == "trace" else arrivals.rate
    replicas = base.plan.dp // attention_groups(base)
    waits = server_waits(workload, policy, 0 if prefill else replicas, options.api_server_seconds)
    fleet = Fleet(decode=pool, server=waits)
    if prefill:
        usual = limits_of(prefill.case.engine.name, prefill.case.cluster.device)
        first = _pool(prefill, policy.of_prompts(usual), workload, "prefill")
        link = Transfer(asked.cluster, prefill.case, base.case, policy)
        fleet = replace(fleet, prefill=first, link=link, router=options.router)
    notes = (f"{base.case.engine.brand}: up to {policy.text}", *padded, client_note(workload), *server_notes(waits))
    steady, empty = fleet.at(rate), fleet.at(0.0)
    workload, fleet, few = _settled(workload, fleet, steady, options)
    report = ServeReport(
        base=base, workload=workload, policy=pool.policy, fleet=fleet, steady=steady, empty=empty,
        saturated=None, traces=(), options=options,
        assumptions=tuple(dict.fromkeys((*base.assumptions, *notes, *unknown, *few))),
        prefill=PrefillReport(base=fleet.prefill.base, traces=()) if fleet.prefill else None,
    )  # fmt: skip
    fits = base.fits and (prefill is None or prefill.fits)
    watch = None
    if fits and options.until_missed and report.open_loop and prefill is None and options.autoscale is None:
        watch = LimitWatch(options.limits, workload.count)
        with uncollected():
            report = replace(report, traces=tuple(fleet.run(workload, options.router, watch)[1]))
        if watch.missed:
            return report
    near = fits and report.open_loop and steady.utilisation > _NEAR
    if near and steady.utilisation >= 1:
        report = replace(report, saturated=fleet.saturated(workload))
    if near and not report.overloaded:
        if options.settled and steady.utilisation >= 1:
            # The form does not say how many are there at once: as many for each replica as for one.
            workload, fleet = _filled(workload, fleet, options.router, 2000.0 * fleet.decode.many, _MOST_SETTLED)
            report = replace(
                report, workload=workload, fleet=fleet, assumptions=(*report.assumptions, *_sampling_notes(fleet))
            )
        note = f"near what is carried: latencies of these {workload.count:,} requests, later ones may wait longer"
        report = replace(report, assumptions=(*report.assumptions, note))
    if not fits or report.overloaded:
        return replace(report, traces=())
    if watch is not None:
        return report
    if options.autoscale:
        own = Autoscaler(pool, options.autoscale, (options.router, workload.seed), report.replicas)
        with uncollected():
            ran, scaling = own.run(requests_of(workload, workload.count, server_seconds=waits.later))
        return replace(report, traces=tuple(ran), scaling=scaling)
    with uncollected():
        prompts, traces = fleet.run(workload, options.router)
    if report.prefill:
        report = replace(report, prefill=replace(report.prefill, traces=tuple(prompts)))
    return replace(report, traces=tuple(traces))
