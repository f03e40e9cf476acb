"""Where ranks sit: a mixed radix of the axes over the tiers of a cluster.

And how much of each group stays inside a tier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from shardwise.plans._plan import Plan

Spans = dict[str, tuple[int, ...]]
# The same where degrees may be columns.
Placed = dict[str, tuple[Any, ...]]


def degrees(plan: Plan) -> dict[str, int]:
    """Return the degree of every axis of the dense part, keyed by axis.

    >>> degrees(Plan(tp=2, dp=4))["dp"]
    4
    """
    return {"tp": plan.tp, "tp2": plan.tp2, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """How whole numbers are compared: plain ones here, or columns of them where functions on columns are given."""

    gcd: Callable[[Any, Any], Any] = math.gcd
    largest: Callable[[Any, Any], Any] = max


PLAIN = Whole()


def inside(stride: Any, degree: Any, domain: int, how: Whole = PLAIN) -> Any:
    """Return how many ranks of one group sit in one domain, for a group of `degree` ranks `stride` apart.

    Groups that straddle domains unevenly count the part every domain holds.

    >>> inside(1, 8, 8), inside(8, 4, 8), inside(2, 8, 8), inside(1, 6, 8)
    (8, 1, 4, 2)
    """
    return how.gcd(degree, how.largest(domain // stride, 1))


def dense_spans(size: Mapping[str, Any], order: Sequence[str], domains: Sequence[int], how: Whole = PLAIN) -> Placed:
    """Return the spans of the axes of the dense part for their degrees, plain or columns.

    >>> dense_spans({"tp": 4, "tp2": 1, "cp": 1, "dp": 8, "pp": 2}, ("tp", "dp", "pp", "cp", "tp2"), (8, 64))["dp"]
    (2, 8)
    """
    found: Placed = {}
    stride: Any = 1
    for axis in order:
        found[axis] = (*(inside(stride, size[axis], d, how) for d in domains[:-1]), size[axis])
        stride = stride * size[axis]
    return found


def with_groups(dense: Placed, sizes: Mapping[str, Any], how: Whole = PLAIN) -> Placed:
    """Return the spans of the dense axes with those of the groups made of them; `sizes` has dp, shard, ep and etp."""
    found, gcd = dict(dense), how.gcd
    found["dp_cp"] = tuple(a * b for a, b in zip(found["dp"], found["cp"], strict=True))
    shard = sizes["shard"]
    inner = tuple(gcd(d, shard) for d in found["dp"])
    found["shard"] = tuple(a * b for a, b in zip(inner, found["cp"], strict=True))
    found["replicate"] = tuple(d // a for d, a in zip(found["dp"], inner, strict=True))
    stage = [math.prod(at) for at in zip(*(found[a] for a in ("tp", "tp2", "cp", "dp")), strict=True)]
    etp = tuple(gcd(sizes["etp"], s) for s in stage)
    ep = tuple(gcd(sizes["ep"], s // e) for s, e in zip(stage, etp, strict=True))
    found["etp"], found["ep"] = etp, ep
    expert_dp = stage[-1] // (sizes["ep"] * sizes["etp"])
    found["edp"] = tuple(gcd(expert_dp, s // (a * b)) for s, a, b in zip(stage, etp, ep, strict=True))
    expert_shard = how.largest(1, expert_dp * shard // sizes["dp"])
    found["expert_shard"] = tuple(gcd(d, expert_shard) for d in found["edp"])
    found["expert_replicate"] = tuple(d // a for d, a in zip(found["edp"], found["expert_shard"], strict=True))
    return found


def spans(plan: Plan, domains: Sequence[int]) -> Spans:
    """Return for every axis how many ranks of one of its groups sit in one domain of each tier, fastest tier first.

    Experts live on the ranks of a stage in the order etp, ep, edp. Groups "dp_cp" hold the copies of dense weights,
    "edp" those of experts. The last tier spans the cluster, so the last entry is the whole degree.

    >>> spans(Plan(tp=4, dp=8, pp=2), (8, 64))["dp"]
    (2, 8)
    """
    shard = plan.shard if plan.sharding == "hsdp" else plan.dp
    sizes = {"dp": plan.dp, "shard": shard, "ep": plan.ep, "etp": plan.etp}
    return with_groups(dense_spans(degrees(plan), plan.order, domains), sizes)


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
