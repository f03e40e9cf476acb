"""Where ranks sit: a mixed radix of the axes over the tiers of a cluster.

And how much of each group stays inside a tier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

from shardwise.plans._plan import Plan

Spans = dict[str, tuple[int, ...]]


def degrees(plan: Plan) -> dict[str, int]:
    """Return the degree of every axis of the dense part, keyed by axis.

    >>> degrees(Plan(tp=2, dp=4))["dp"]
    4
    """
    return {"tp": plan.tp, "tp2": plan.tp2, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}


def inside(stride: int, degree: int, domain: int) -> int:
    """Return how many ranks of one group sit in one domain, for a group of `degree` ranks `stride` apart.

    Groups that straddle domains unevenly count the part every domain holds.

    >>> inside(1, 8, 8), inside(8, 4, 8), inside(2, 8, 8), inside(1, 6, 8)
    (8, 1, 4, 2)
    """
    return math.gcd(degree, domain // stride) if domain >= stride else 1


def spans(plan: Plan, domains: Sequence[int]) -> Spans:
    """Return for every axis how many ranks of one of its groups sit in one domain of each tier, fastest tier first.

    Experts live on the ranks of a stage in the order etp, ep, edp. Groups "dp_cp" hold the copies of dense weights,
    "edp" those of experts. The last tier spans the cluster, so the last entry is the whole degree.

    >>> spans(Plan(tp=4, dp=8, pp=2), (8, 64))["dp"]
    (2, 8)
    """
    size = degrees(plan)
    found: Spans = {}
    stride = 1
    for axis in plan.order:
        found[axis] = (*(inside(stride, size[axis], d) for d in domains[:-1]), size[axis])
        stride *= size[axis]
    found["dp_cp"] = tuple(a * b for a, b in zip(found["dp"], found["cp"], strict=True))
    shard = plan.shard if plan.sharding == "hsdp" else plan.dp
    inner = tuple(math.gcd(d, shard) for d in found["dp"])
    found["shard"] = tuple(a * b for a, b in zip(inner, found["cp"], strict=True))
    found["replicate"] = tuple(d // a for d, a in zip(found["dp"], inner, strict=True))
    stage = [math.prod(found[a][i] for a in ("tp", "tp2", "cp", "dp")) for i in range(len(domains))]
    etp = tuple(math.gcd(plan.etp, s) for s in stage)
    ep = tuple(math.gcd(plan.ep, s // e) for s, e in zip(stage, etp, strict=True))
    found["etp"], found["ep"] = etp, ep
    found["edp"] = tuple(math.gcd(plan.expert_dp, s // (a * b)) for s, a, b in zip(stage, etp, ep, strict=True))
    expert_shard = max(1, plan.expert_dp * shard // plan.dp)
    found["expert_shard"] = tuple(math.gcd(d, expert_shard) for d in found["edp"])
    found["expert_replicate"] = tuple(d // a for d, a in zip(found["edp"], found["expert_shard"], strict=True))
    return found


def groups(plan: Plan, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of every group over the named axes: ranks that differ in these coordinates alone.

    >>> list(groups(Plan(tp=2, dp=2), ["dp"]))
    [(0, 2), (1, 3)]
    """
    size, order = degrees(plan), [str(axis) for axis in plan.order]
    stride: dict[str, int] = {}
    step = 1
    for axis in order:
        stride[axis] = step
        step *= size[axis]
    wanted = set(axes)
    chosen = [a for a in order if a in wanted]
    others = [a for a in order if a not in wanted]

    def offsets(names: list[str]) -> list[int]:
        ranges = [range(size[a]) for a in reversed(names)]
        return [sum(i * stride[a] for i, a in zip(c, reversed(names), strict=True)) for c in product(*ranges)]

    for base in offsets(others):
        yield tuple(base + o for o in offsets(chosen))
