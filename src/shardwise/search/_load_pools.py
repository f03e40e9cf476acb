"""Deployments of two pools for a load: one computes prompts, the other decodes, by the closed forms of each.

The first token waits for both pools, a token for the second alone, so that workers of each are counted apart: from as
many as carry the load and would keep the limits if the other pool took no time, of which every sum is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import product
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
    early_first_token,
    handed_over,
    limits_of,
    load_prices,
    moments_of,
    most_running,
)

# Numbers of workers that are tried of each layout, the fewest and those after it: few first, and more where these
# may miss the fewest devices, each pool alone barely keeping a limit of first tokens. Where all devices may be used
# they lie between the fewest and all, a step apart at first and a sixteenth of the way at last.
_FEW, _MORE = 8, 32
# Pairs of layouts of a group that are handed on.
_KEPT = 12
# Groups over those that carry the load, where each is almost empty.
_EMPTY = 1000.0


@dataclass(frozen=True, kw_only=True)
class PoolForms:
    """The layouts of one stage that hold its longest request, with their closed form."""

    plans: tuple[Plan, ...]
    form: Replicas
    stage: Stage

    @cached_property
    def empty(self) -> Steady[Any]:
        """What a worker of each layout takes that nobody else uses."""
        return self.form.at(0.0)

    def alone(self, steady: Steady[Any]) -> Steady[Any]:
        """Return what the pool takes behind, or before, one that takes no time."""
        early = self.stage == "decode" and self.form.policy.early_first_token
        return early_first_token(steady, self.form.moments) if early else steady

    def fewest(self, search: LoadSearch, case: ServingCase) -> Any:
        """Return the fewest workers of each layout that keep the limits alone, infinite where none do."""
        arrivals, groups = search.workload.arrivals, self.form.batches.groups
        low = np.maximum(np.ceil(arrivals.rate / (FULLEST * groups * self.form.capacity)), 1.0)
        limits = [one for one in search.options.limits if self.stage == "decode" or one.metric in ("ttft", "e2e")]
        if not limits:
            return low
        empty = self.alone(self.empty)

        def keeps(workers: Any) -> Any:
            steady = self.alone(_row(self.at((workers * groups)[:, None], search), np.s_[:, 0]))
            kept = np.isfinite(steady.e2e_seconds)
            for limit in limits:
                kept = kept & (least(steady, empty, limit) * search.margin(case, limit) <= limit.seconds)
            return kept

        first, high, step = low, low, 1.0
        kept = keeps(low)
        while not kept.all() and step < _EMPTY:
            step *= 2
            low, high = np.where(kept, low, high + 1), np.where(kept, high, np.ceil(step * first))
            kept = kept | keeps(high)
        low = np.where(kept, low, high)
        while (low < high).any():
            middle = np.floor((low + high) / 2)
            fine = keeps(middle)
            low, high = np.where(fine, low, np.minimum(middle + 1, high)), np.where(fine, middle, high)
        return np.where(kept, high, np.inf)

    def counts(self, search: LoadSearch, case: ServingCase) -> Any:
        """Return groups of each layout, in whole workers, from the fewest on, which may be infinite: [layout, more]."""
        groups, few, more = self.form.batches.groups, self.fewest(search, case), np.arange(_MORE)
        if search.sparing:
            return (few[:, None] + more) * groups[:, None]
        each = np.array([plan.tp * plan.pp for plan in self.plans]) * groups
        left = np.maximum(search.cluster.num_devices // each - few, 0.0)[:, None]
        return (few[:, None] + np.maximum(more, np.round(left * (more / more[-1]) ** 2))) * groups[:, None]

    def at(self, counts: Any, search: LoadSearch) -> Steady[Any]:
        """Return the closed form of so many groups of each layout: columns of [layout, more]."""
        turns, rate = search.options.router == "round-robin", search.workload.arrivals.rate
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
    return PoolForms(plans=plans, form=form, stage=stage)


def _sent(search: LoadSearch, group: LoadGroup, plans: tuple[Plan, Plan], devices: Any) -> Any:
    """Return seconds of sending the cache of a mean prompt between two layouts that have so many devices together."""
    (first, last), policy, case = plans, group.policy, group.case
    mean = search.workload.input_tokens.mean
    ranks, seconds = min(first.tp * first.pp, last.tp * last.pp), np.zeros(devices.shape)
    # The tier that holds both pools joins them.
    tiers = [*(tier.size for tier in search.cluster.tiers[:-1]), np.inf]
    for low, high in zip([0, *tiers], tiers, strict=False):
        among = (low < devices) & (devices <= high)
        if not among.any():
            continue
        key = (low, ranks, last.tp, last.pp, policy.sent_tokens(mean), case.cache_element_bytes)
        if key not in search.sent:
            part = part_of(search.cluster, min(search.cluster.num_devices, int(devices[among].min())))
            link = Transfer(part, replace(case, plan=first), replace(case, plan=last), policy)
            search.sent[key] = link.seconds(mean)
        seconds[among] = search.sent[key]
    return seconds


@dataclass(frozen=True, kw_only=True)
class _Pools:
    """The layouts of both pools with their numbers of groups: [layout, more]."""

    search: LoadSearch
    group: LoadGroup
    forms: tuple[PoolForms, PoolForms]
    counts: tuple[Any, Any]

    @cached_property
    def few(self) -> tuple[Steady[Any], Steady[Any]]:
        """What the closed form says of few groups of each layout of either pool."""
        first, last = (
            form.at(counts[:, :_FEW], self.search) for form, counts in zip(self.forms, self.counts, strict=True)
        )
        return first, last

    @cached_property
    def more(self) -> tuple[Steady[Any], Steady[Any]]:
        """What it says of more of them."""
        first, last = (form.at(counts, self.search) for form, counts in zip(self.forms, self.counts, strict=True))
        return first, last

    def of(self, i: int, rows: Any, many: int) -> tuple[Any, Steady[Any], Any]:
        """Return the devices of a layout for prompts before some that decode, infinite where a limit is missed.

        And what the closed form says of them, [groups for prompts, layout, groups that decode], and which layouts keep
        the limits where nobody else asks.
        """
        search, (first, last) = self.search, self.forms
        one, before, after = first.plans[i], self.counts[0][i, :many, None, None], self.counts[1][None, rows, :many]
        each = np.array([last.plans[j].tp * last.plans[j].pp for j in rows])[:, None]
        devices = before * (one.tp * one.pp) + after * each
        pairs = [(one, last.plans[j]) for j in rows]
        sent = np.stack([_sent(search, self.group, pair, devices[:, j]) for j, pair in enumerate(pairs)], 1)
        policy, moments = last.form.policy, last.form.moments
        prompts, tokens = self.few if many == _FEW else self.more
        pools = _row(prompts, np.s_[i, :, None, None]), _row(tokens, np.s_[None, rows])
        both = handed_over(pools, sent, before / after, policy, moments)
        nobody = _row(first.empty, i), _row(last.empty, np.s_[None, rows, None])
        alone = handed_over(nobody, sent, 1.0, policy, moments)
        kept, ever = np.isfinite(both.e2e_seconds), np.isfinite(alone.e2e_seconds)
        for limit in search.options.limits:
            margin = search.margin(self.group.case, limit)
            kept = kept & (least(both, alone, limit) * margin <= limit.seconds)
            ever = ever & (least(alone, alone, limit) * margin <= limit.seconds)
        return np.where(kept, devices, np.inf), both, ever.any(axis=(0, 2))

    def best(self, i: int, rows: Any, many: int = _FEW) -> Iterator[tuple[int, _Ranked | None, float]]:
        """Yield layouts that decode, with their best pair within the cluster, and the fewest devices that they need."""
        if not len(rows):
            return
        search, uncertain = self.search, []
        devices, steady, ever = self.of(i, rows, many if search.sparing else _MORE)
        first, last = (counts[at] for counts, at in zip(self.counts, (i, rows), strict=True))
        one, least_of = self.forms[0].plans[i], devices.min(axis=(0, 2))
        for k, j in enumerate(rows.tolist()):
            each = self.forms[1].plans[j]
            ends = (first[many % _MORE], last[k, 0]), (first[0], last[k, many % _MORE])
            beyond = min(a * one.tp * one.pp + b * each.tp * each.pp for a, b in ends)
            if search.sparing and many < _MORE and ever[k] and least_of[k] > beyond:
                uncertain.append(j)
            elif least_of[k] > search.cluster.num_devices:
                yield j, None, float(least_of[k])
            else:
                yield j, _best(search, devices[:, k], _row(steady, np.s_[:, k], devices.shape)), float(least_of[k])
        yield from self.best(i, np.array(uncertain, int), _MORE)


def pooled(search: LoadSearch, group: LoadGroup, case: ServingCase) -> Iterator[Candidate]:
    """Yield the best pairs of layouts of a group that keep the limits, with their workers."""
    first, last = (forms_of(search, group, case, stage) for stage in ("prefill", "decode"))
    if first is None or last is None:
        return
    counts = first.counts(search, case), last.counts(search, case)
    some = tuple(np.flatnonzero(np.isfinite(each[:, 0])) for each in counts)
    for i, j in product(range(len(first.plans)), range(len(last.plans))):
        search.pairs[id(group), i, j] = np.inf
    pools = _Pools(search=search, group=group, forms=(first, last), counts=counts)
    pairs: list[tuple[_Ranked, int, int]] = []
    for i in some[0].tolist():
        for j, ranked, few in pools.best(i, some[1]):
            search.pairs[id(group), i, j] = few
            if ranked is not None:
                search.pairs.pop((id(group), i, j))
                pairs.append((ranked, i, j))
    for ranked, i, j in sorted(pairs, key=lambda one: one[0].rank)[:_KEPT]:
        (a, b), plan = ranked.place, last.plans[j]
        yield Candidate(
            plan=plan, job=group.job, engine=group.engine, replicas=int(counts[1][j, b]) // plan.dp,
            steady=ranked.steady, prefill=replace(first.plans[i], dp=int(counts[0][i, a])),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ranked:
    """What is sought of the best numbers of groups of a pair, their places, and what the closed form says of them."""

    rank: tuple[float, float]
    place: tuple[int, int]
    steady: Steady[float]


def _best(search: LoadSearch, devices: Any, steady: Steady[Any]) -> _Ranked:
    """Return the best numbers of groups of a pair, whose devices are infinite where a limit is missed."""
    first, second = devices, steady.e2e_seconds
    if not search.sparing:
        within = devices <= search.cluster.num_devices
        first, second = np.where(within, getattr(steady, f"{search.objective}_seconds"), np.inf), devices
    second = np.where(first == first.min(), second, np.inf)
    place = divmod(int(np.argmin(second)), devices.shape[1])
    one = Steady(**{name: float(getattr(steady, name)[place]) for name in Steady.__dataclass_fields__})
    return _Ranked(rank=(float(first[place]), float(second[place])), place=place, steady=one)


def _row(steady: Steady[Any], at: Any, shape: tuple[int, ...] = ()) -> Steady[Any]:
    """Return some layouts or counts of a closed form, of one that is as wide as a shape where that is given."""
    values = {name: getattr(steady, name) for name in Steady.__dataclass_fields__}
    if shape:
        return Steady(**{name: np.broadcast_to(value, shape)[at] for name, value in values.items()})
    return Steady(**{name: value[at] for name, value in values.items()})
