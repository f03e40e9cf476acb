"""Deployments of two pools for a load: one computes prompts, the other decodes, by the closed forms of each.

The first token waits for both pools, a token for the second alone, so that workers of each are counted apart: as many
as carry the load, and up to `_MORE` beyond, of which every sum is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shardwise.hardware import part_of
from shardwise.plans import Plan, Serving
from shardwise.records import dataclass, replace
from shardwise.search._load_bounds import least
from shardwise.search._load_groups import Candidate, LoadGroup, LoadSearch
from shardwise.serving import ServingCase, take_rows, tokens_per_step
from shardwise.serving.load import (
    FULLEST,
    Policy,
    Replicas,
    Stage,
    Steady,
    Transfer,
    batches_of,
    in_tandem,
    limits_of,
    load_prices,
    moments_of,
    most_running,
)

_MORE = 12
# Pairs of layouts of a group that are handed on.
_KEPT = 12


@dataclass(frozen=True, kw_only=True)
class PoolForms:
    """The layouts of one stage that hold its longest request, with their closed form."""

    plans: tuple[Plan, ...]
    form: Replicas

    def counts(self, rate: float) -> Any:
        """Return workers of each layout, in whole replicas, from those that carry a rate on: [layout, more]."""
        groups = self.form.batches.groups
        least = np.maximum(np.ceil(rate / (FULLEST * groups * self.form.capacity)), 1.0)
        return (least[:, None] + np.arange(_MORE)) * groups[:, None]

    def at(self, counts: Any, rate: float, turns: bool) -> Steady[Any]:
        """Return the closed form of so many workers of each layout: columns of [layout, more]."""
        workers = np.maximum(counts / self.form.batches.groups[:, None], 1.0) if turns else 1.0 + 0 * counts
        every = [self.form.at(rate / counts[:, k], workers[:, k]) for k in range(counts.shape[1])]
        names = Steady.__dataclass_fields__
        return Steady(**{name: np.stack([getattr(one, name) for one in every], axis=1) for name in names})


def candidates(search: LoadSearch) -> Iterator[Candidate]:
    """Yield every layout that keeps the limits, with its replicas: the fewest, or all that fill the cluster."""
    if search.space.pools != "aggregated":
        for group in search.groups:
            yield from pooled(search, group, group.case)
    for group in search.groups if search.space.pools != "disaggregated" else ():
        if group.form is None:
            continue
        replicas, steady = search.answered(group, search.cluster.num_devices)
        kept = np.isfinite(replicas)
        if not search.sparing:
            replicas = search.cluster.num_devices // group.devices
            steady = search.steady(group, np.where(kept, replicas, 1.0))
        for row in np.flatnonzero(kept).tolist():
            yield Candidate(
                plan=group.plans[row], job=group.job, engine=group.engine, replicas=int(replicas[row]),
                steady=steady.row(row),
            )  # fmt: skip


def forms_of(search: LoadSearch, group: LoadGroup, case: ServingCase, stage: Stage) -> PoolForms | None:
    """Return the closed forms of one stage of a group's layouts; None where the model fits on none."""
    prompt, made = search.workload.longest
    policy: Policy = group.policy
    usual = limits_of(case.engine.name, case.cluster.device)
    prompts = stage == "prefill"
    asked: Serving = replace(
        group.job, batch=1, input_tokens=prompt, output_tokens=1 if prompts else made,
        max_batched_tokens=policy.pass_tokens,
        max_sequences=policy.of_prompts_set_aside(usual) if prompts else policy.max_sequences,
    )  # fmt: skip
    limited = replace(case, job=asked)
    if prompts:
        policy = policy.of_prompts(usual)
    moments = moments_of(search.workload, policy, stage, tokens_per_step(group.job))
    policy = policy.of_answers(moments.steps)
    cache_tokens = search.room(limited, moments.context)
    rows = np.flatnonzero(cache_tokens >= asked.total_tokens)
    if not len(rows):
        return None
    sizes = take_rows(search.grid.sizes(limited.model), rows)
    plans = tuple(search.kinds[row] for row in rows.tolist())
    batches = batches_of(plans, case.model.has_experts, policy.one_batch)
    most = most_running(policy, moments, cache_tokens[rows], batches.lanes)
    prices = load_prices(limited, sizes, policy, moments, most, batches)
    form = Replicas(prices=prices, policy=policy, moments=moments, cache_tokens=cache_tokens[rows], batches=batches)
    return PoolForms(plans=plans, form=form)


def _sent(search: LoadSearch, case: ServingCase, plans: tuple[Plan, Plan], policy: Policy) -> float:
    """Return seconds of sending the cache of a mean prompt between two layouts."""
    first, last = plans
    devices = min(search.cluster.num_devices, first.num_devices + last.num_devices)
    tokens = policy.sent_tokens(search.workload.input_tokens.mean)
    ranks = min(first.tp * first.pp, last.tp * last.pp)
    key = (devices, ranks, last.tp, last.pp, tokens, case.cache_element_bytes)
    if key not in search.sent:
        link = Transfer(part_of(search.cluster, devices), replace(case, plan=first), replace(case, plan=last), policy)
        search.sent[key] = link.seconds(search.workload.input_tokens.mean)
    return search.sent[key]


def pooled(search: LoadSearch, group: LoadGroup, case: ServingCase) -> Iterator[Candidate]:
    """Yield the best pairs of layouts of a group that keep the limits, with their workers."""
    rate = search.workload.arrivals.rate
    first, last = (forms_of(search, group, case, stage) for stage in ("prefill", "decode"))
    if first is None or last is None:
        return
    counts = first.counts(rate), last.counts(rate)
    turns = search.options.router == "round-robin"
    prompts, tokens = first.at(counts[0], rate, turns), last.at(counts[1], rate, turns)
    empty = first.form.at(0.0), last.form.at(0.0)
    pairs: list[tuple[float, int, tuple[int, int, int], Steady[float]]] = []
    each = np.array([plan.tp * plan.pp for plan in last.plans])
    for i, one in enumerate(first.plans):
        # Workers of this layout for prompts, the other layouts, and their workers.
        sent = np.array([_sent(search, case, (one, other), group.policy) for other in last.plans])[None, :, None]
        share = counts[0][i][:, None, None] / counts[1][None]
        both = in_tandem(_row(prompts, np.s_[i, :, None, None]), _row(tokens, np.s_[None]), sent, share)
        alone = in_tandem(_row(empty[0], i), _row(empty[1], np.s_[None, :, None]), sent, 1.0)
        kept = np.isfinite(both.e2e_seconds)
        for limit in search.options.limits:
            kept = kept & (least(both, alone, limit) * search.margin(case, limit) <= limit.seconds)
        devices = counts[0][i][:, None, None] * (one.tp * one.pp) + (counts[1] * each[:, None])[None]
        devices = np.where(kept, devices, np.inf)
        for j in range(len(each)):
            a, b = divmod(int(np.argmin(devices[:, j])), devices.shape[2])
            at = a, j, b
            if devices[at] <= search.cluster.num_devices:
                pairs.append((float(devices[at]), i, at, _row(both, at, devices.shape)))
            else:
                search.pairs.append(float(devices[at]))
    for _, i, (a, j, b), steady in sorted(pairs, key=lambda one: one[0])[:_KEPT]:
        yield Candidate(
            plan=last.plans[j], job=group.job, engine=group.engine, replicas=int(counts[1][j, b]) // last.plans[j].dp,
            steady=steady,
            prefill=replace(first.plans[i], dp=int(counts[0][i, a])),
        )  # fmt: skip


def _row(steady: Steady[Any], at: Any, shape: tuple[int, ...] = ()) -> Steady[Any]:
    """Return some layouts or counts of a closed form, of one that is as wide as a shape where that is given."""
    values = {name: getattr(steady, name) for name in Steady.__dataclass_fields__}
    if shape:
        return Steady(**{name: float(np.broadcast_to(value, shape)[at]) for name, value in values.items()})
    return Steady(**{name: value[at] for name, value in values.items()})
