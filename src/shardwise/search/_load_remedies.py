"""What would shorten the latencies of a deployment under load: changes of one field, each simulated."""

from __future__ import annotations

import math
from dataclasses import field as dc_field
from typing import Any

from shardwise.errors import InputError
from shardwise.hardware import Cluster
from shardwise.plans import Limit
from shardwise.records import dataclass, replace
from shardwise.serving import infer
from shardwise.serving.load import FULLEST, ServeReport, serve

_LEAST_STEP = 128
"""Tokens of the shortest step that is tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadRemedy:
    """One change of a deployment, simulated: the field, its new value, and what it does."""

    field: str
    value: int | str
    report: ServeReport
    limit: Limit
    seconds: float
    """The metric that misses its limit by most, or the p99 of TTFT; infinite where the queue still grows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    field: str
    value: int | str
    plan: dict[str, Any] = dc_field(default_factory=dict)
    job: dict[str, Any] = dc_field(default_factory=dict)


def grown(cluster: Cluster, devices: int) -> Cluster:
    """Return a cluster of at least so many devices: nodes of the device where it is some of them as they are usual.

    Of another cluster more of the kind that the outermost tier joins.
    """
    if devices <= cluster.num_devices:
        return cluster
    usual = Cluster.parse(f"{devices}x{cluster.device.name}")
    if Cluster.parse(f"{cluster.num_devices}x{cluster.device.name}").tiers == cluster.tiers:
        # Of a part of a node the whole node is what more of them come in.
        return replace(cluster, num_devices=devices, tiers=usual.tiers, devices_per_node=usual.devices_per_node)
    *inner, last = cluster.tiers
    return replace(cluster, num_devices=devices, tiers=(*inner, replace(last, size=devices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pool:
    """Workers of one kind: the field that counts them, how many there are and in a group, and requests they carry."""

    field: str
    have: int
    each: int
    carried: float

    def least(self, report: ServeReport) -> int:
        """Return the fewest groups, more than there are, that carry the load as full as `plan serve` has them."""
        have = self.have // self.each
        if not (report.open_loop and math.isfinite(self.carried) and self.carried > 0):
            return have + 1
        return max(have + 1, math.ceil(report.workload.arrivals.rate / (FULLEST * self.carried) * have))


def _pools(report: ServeReport) -> list[_Pool]:
    """Return the pools of a deployment, that of prompts first where they have one."""
    have, fleet, first = report.base.plan.dp, report.fleet, report.options.prefill
    if first is None or fleet.prefill is None:
        return [_Pool(field="dp", have=have, each=report.groups, carried=report.capacity_per_second)]
    # Either may carry more than both.
    prompts, tokens = (float(pool.form.capacity[0]) * pool.many for pool in (fleet.prefill, fleet.decode))
    return [
        _Pool(field="prefill_workers", have=first.dp, each=fleet.prefill.groups, carried=prompts),
        _Pool(field="dp", have=have, each=report.groups, carried=tokens),
    ]


def _more_of(report: ServeReport, pool: _Pool) -> list[LoadRemedy]:
    """Return the fewest groups that meet the limits, to 2 %; where a half more do not either, both if they help.

    More of them never lengthen a percentile, so that the fewest are found by halves.
    """

    def tried(groups: int) -> LoadRemedy | None:
        count = groups * pool.each
        named = groups if pool.field == "prefill_workers" else count
        return _remedy(report, _Change(field=pool.field, value=named, plan={"dp": count}))

    low = pool.least(report)
    first = tried(low)
    if first is not None and first.report.meets:
        return [first]
    high = math.ceil(1.5 * low)
    best = tried(high)
    if best is None or not best.report.meets:
        return [one for one in (first, best) if one is not None]
    while high - low > max(1, high // 50):
        middle = (low + high) // 2
        one = tried(middle)
        if one is not None and one.report.meets:
            high, best = middle, one
        else:
            low = middle
    return [best]


def _step_of(tokens: int) -> _Change:
    return _Change(field="max_batched_tokens", value=tokens, job={"max_batched_tokens": tokens})


def _shorter_steps(report: ServeReport) -> list[LoadRemedy]:
    """Return the longest of steps halved again and again that meets the limits, or else the one that helps most.

    Shorter steps hold back running sequences less, and new prompts more. Those that hold any prompt are much alike.
    """
    best: LoadRemedy | None = None
    longest = report.base.case.job.input_tokens
    tokens = report.policy.pass_tokens // 2
    while tokens >= _LEAST_STEP:
        one = _remedy(report, _step_of(tokens))
        if one is not None and one.report.meets:
            return [one]
        if tokens < longest and (one is None or (best is not None and one.seconds >= best.seconds)):
            break
        best = one if best is None or (one is not None and one.seconds < best.seconds) else best
        tokens //= 2
    return [] if best is None else [best]


def _changes(report: ServeReport) -> list[_Change]:
    """Return the changes of one field that may help, whatever they cost."""
    plan, job, policy = report.base.plan, report.base.case.job, report.policy
    changes = [_step_of(2 * policy.pass_tokens)]
    if any(trace.most_running >= policy.max_sequences for trace in report.traces):
        # Twice as many, and a place for every user of a closed loop.
        users = -(-report.workload.arrivals.users // plan.dp)
        for most in sorted({2 * policy.max_sequences, max(users, 2 * policy.max_sequences)}):
            changes.append(_Change(field="max_sequences", value=most, job={"max_sequences": most}))
    if report.base.case.profiled.step_tokens and report.base.max_concurrency < policy.max_sequences:
        # The cache binds first: what is set aside to sample more sequences than it can hold is free for it.
        case, options = report.base.case, report.options.serving
        room = infer(case.model, case.cluster, plan, replace(job, max_sequences=1), options).max_concurrency
        most = 2 ** round(math.log2(max(room, 1)))
        if most < policy.max_sequences:
            changes.append(_Change(field="max_sequences", value=most, job={"max_sequences": most}))
    if not job.kv_cache and report.base.kv_cache_bytes_per_gpu:
        changes.append(_Change(field="kv_cache", value="fp8", job={"kv_cache": "fp8"}))
    if report.prefill is not None:
        return changes
    if report.groups == 1 and plan.dp % 2 == 0:
        changes.append(_Change(field="tp", value=2 * plan.tp, plan={"tp": 2 * plan.tp, "dp": plan.dp // 2}))
    if report.replicas > 1 and report.options.router != "least-loaded":
        changes.append(_Change(field="router", value="least-loaded"))
    return changes


def _tried(report: ServeReport, change: _Change) -> ServeReport | None:
    """Return the deployment with a change, None where the model, the engine or the device does not take it."""
    case = report.base.case
    options, first, more = report.options, report.options.prefill, change.plan
    if first is not None and change.field == "prefill_workers":
        first, more = replace(first, **more), {}
    plan = replace(case.plan, **{"stage_layers": (), **more})
    devices = plan.num_devices + (first.num_devices if first else 0)
    router = "least-loaded" if change.field == "router" else options.router
    options = replace(options, router=router, prefill=first)
    cluster = grown(report.fleet.link.cluster if report.fleet.link else case.cluster, devices)
    try:
        return serve(case.model, cluster, plan, report.workload, replace(case.job, **change.job), options)
    except InputError:
        return None


def _remedy(report: ServeReport, change: _Change) -> LoadRemedy | None:
    """Return what a change does, None where it is not taken, does not fit or shortens nothing that misses its limit."""
    limit, tried = report.focus, _tried(report, change)
    if tried is None or not tried.fits:
        return None
    seconds = tried.value(limit)
    if not tried.meets and seconds >= report.value(limit):
        return None
    return LoadRemedy(field=change.field, value=change.value, report=tried, limit=limit, seconds=seconds)


def load_remedies(report: ServeReport) -> tuple[LoadRemedy, ...]:
    """Return changes of one field that shorten what misses its limit, each simulated; those that meet all come first.

    Then the fewest devices, then the shortest. Of numbers of replicas the fewest that meet the limits are named.
    """
    remedies = [one for change in _changes(report) if (one := _remedy(report, change)) is not None]
    remedies += _shorter_steps(report)
    remedies += [one for pool in _pools(report) for one in _more_of(report, pool)]
    return tuple(sorted(remedies, key=lambda one: (not one.report.meets, one.report.devices, one.seconds)))
