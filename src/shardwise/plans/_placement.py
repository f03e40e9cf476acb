"""Where ranks sit in a cluster, and so which links each group of ranks uses.

Ranks are numbered as a mixed radix of the axes, the first axis of a plan's order changing fastest; consecutive ranks
fill a node, consecutive nodes the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from shardwise.plans._plan import AXES, STAGE_AXES, Plan
from shardwise.records import dataclass

GroupShapes = dict[str, tuple[int, ...]]
# The same where degrees may be columns.
Placed = dict[str, tuple[Any, ...]]


def degrees(plan: Plan) -> dict[str, int]:
    """Return the degree of every axis of the dense part, keyed by axis.

    >>> degrees(Plan(tp=2, dp=4))["dp"]
    4
    """
    return {"tp": plan.tp, "tp2": plan.tp2, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeNumbers:
    """How whole numbers are compared: plain ones here, or columns of them where functions on columns are given."""

    gcd: Callable[[Any, Any], Any] = math.gcd
    largest: Callable[[Any, Any], Any] = max


PLAIN = WholeNumbers()


def inside(stride: Any, degree: Any, domain: int, how: WholeNumbers = PLAIN) -> Any:
    """Return how many ranks of one group sit in one domain, for a group of `degree` ranks `stride` apart.

    Groups that straddle domains unevenly count the part every domain holds.

    >>> inside(1, 8, 8), inside(8, 4, 8), inside(2, 8, 8), inside(1, 6, 8)
    (8, 1, 4, 2)
    """
    return how.gcd(degree, how.largest(domain // stride, 1))


def dense_group_shapes(
    size: Mapping[str, Any],
    order: Sequence[str],
    domains: Sequence[int],
    how: WholeNumbers = PLAIN,
    fast: Mapping[str, Any] | None = None,
) -> Placed:
    """Return the shapes of the groups of the axes of the dense part for their degrees, plain or columns.

    `fast` gives the ranks of each axis that fill the fastest domain before any axis goes on.

    >>> size = {"tp": 4, "tp2": 1, "cp": 1, "dp": 8, "pp": 2}
    >>> order = ("tp", "dp", "pp", "cp", "tp2")
    >>> dense_group_shapes(size, order, (8, 64))["dp"]
    (2, 8)
    >>> dense_group_shapes(size, order, (8, 64), fast={"tp": 2, "tp2": 1, "cp": 1, "dp": 4, "pp": 1})["dp"]
    (4, 8)
    """
    shapes: Placed = {}
    stride: Any = 1
    for part in radices(size, order, fast):
        for axis, degree in part.items():
            here = tuple(inside(stride, degree, d, how) for d in domains[:-1])
            known = shapes.get(axis)
            shapes[axis] = here if known is None else tuple(a * b for a, b in zip(known, here, strict=True))
            stride = stride * degree
    return {axis: (*at, size[axis]) for axis, at in shapes.items()}


def radices(
    size: Mapping[str, Any], order: Sequence[str], fast: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], ...]:
    """Return the mixed radix of the ranks, fastest first: the part of each axis in the fastest domain, then the rest.

    >>> radices({"tp": 4, "dp": 8}, ("tp", "dp"), {"tp": 2, "dp": 4})
    ({'tp': 2, 'dp': 4}, {'tp': 2, 'dp': 2})
    """
    if fast is None:
        return ({axis: size[axis] for axis in order},)
    return {axis: fast[axis] for axis in order}, {axis: size[axis] // fast[axis] for axis in order}


def fast_ranks(plan: Plan) -> dict[str, int] | None:
    """Return the ranks of each axis that fill the fastest domain, where the plan says so."""
    return dict(zip(AXES, plan.fast, strict=True)) if plan.fast else None


def steps(plan: Plan, axis: str) -> tuple[int, ...]:
    """Return for every coordinate on an axis how far its rank is from that of coordinate 0.

    >>> steps(Plan(tp=2, dp=4), "dp"), steps(Plan(tp=2, dp=4, fast=(1, 1, 1, 2, 1)), "dp")
    ((0, 2, 4, 6), (0, 1, 4, 5))
    """
    offsets, stride = [0], 1
    for part in radices(degrees(plan), plan.order, fast_ranks(plan)):
        for name, degree in part.items():
            if name == axis:
                offsets = [at + i * stride for i in range(degree) for at in offsets]
            stride *= degree
    return tuple(offsets)


def with_groups(dense: Placed, sizes: Mapping[str, Any], how: WholeNumbers = PLAIN) -> Placed:
    """Return group shapes of the dense axes with those of groups made of them; `sizes` has dp, shard, ep and etp."""
    groups, gcd = {**dense, **expert_groups(dense, sizes, how)}, how.gcd
    groups["dp_cp"] = tuple(a * b for a, b in zip(groups["dp"], groups["cp"], strict=True))
    shard = sizes["shard"]
    inner = tuple(gcd(d, shard) for d in groups["dp"])
    groups["shard"] = tuple(a * b for a, b in zip(inner, groups["cp"], strict=True))
    groups["replicate"] = tuple(d // a for d, a in zip(groups["dp"], inner, strict=True))
    stage, etp, ep = _ranks_of_stage(dense), groups["etp"], groups["ep"]
    expert_dp = stage[-1] // (sizes["ep"] * sizes["etp"])
    groups["edp"] = tuple(gcd(expert_dp, s // (a * b)) for s, a, b in zip(stage, etp, ep, strict=True))
    expert_shard = how.largest(1, expert_dp * shard // sizes["dp"])
    groups["expert_shard"] = tuple(gcd(d, expert_shard) for d in groups["edp"])
    groups["expert_replicate"] = tuple(d // a for d, a in zip(groups["edp"], groups["expert_shard"], strict=True))
    return groups


def expert_groups(dense: Placed, sizes: Mapping[str, Any], how: WholeNumbers = PLAIN) -> Placed:
    """Return group shapes of the two axes that split experts, given those of the dense axes.

    >>> expert_groups({axis: (2, 4) for axis in STAGE_AXES}, {"ep": 8, "etp": 4})
    {'etp': (4, 4), 'ep': (4, 8)}
    """
    stage, gcd = _ranks_of_stage(dense), how.gcd
    etp = tuple(gcd(sizes["etp"], s) for s in stage)
    return {"etp": etp, "ep": tuple(gcd(sizes["ep"], s // e) for s, e in zip(stage, etp, strict=True))}


def _ranks_of_stage(dense: Placed) -> list[Any]:
    """Return how many ranks of a stage sit in one domain of each tier."""
    return [math.prod(at) for at in zip(*(dense[axis] for axis in STAGE_AXES), strict=True)]


def shard_of(plan: Plan) -> int:
    """Return how many replicas share one sharded copy: all of dp unless a plan says less.

    >>> shard_of(Plan(dp=8, sharding="zero1")), shard_of(Plan(dp=8, sharding="hsdp", shard=4))
    (8, 4)
    """
    return plan.shard if plan.sharding_rules.hybrid or splits_replicas(plan) else plan.dp


def splits_replicas(plan: Plan) -> bool:
    """Return whether shards are split over groups of replicas where a plan may also split them over all."""
    return plan.sharding_rules.groups == "some" and plan.shard > 1


def group_shapes(plan: Plan, domains: Sequence[int]) -> GroupShapes:
    """Return for every axis how many ranks of one of its groups sit in one domain of each tier, fastest tier first.

    Experts live on the ranks of a stage in the order etp, ep, edp. Groups "dp_cp" hold the copies of dense weights,
    "edp" those of experts. The last tier spans the cluster, so the last entry is the whole degree.

    >>> group_shapes(Plan(tp=4, dp=8, pp=2), (8, 64))["dp"]
    (2, 8)
    """
    shard = shard_of(plan)
    sizes = {"dp": plan.dp, "shard": shard, "ep": plan.ep, "etp": plan.etp}
    return with_groups(dense_group_shapes(degrees(plan), plan.order, domains, fast=fast_ranks(plan)), sizes)


def groups(plan: Plan, axes: Iterable[str]) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of every group over the named axes: ranks that differ in these coordinates alone.

    >>> list(groups(Plan(tp=2, dp=2), ["dp"]))
    [(0, 2), (1, 3)]
    """
    wanted = set(axes)
    order = [str(axis) for axis in plan.order]

    def offsets(names: list[str]) -> list[int]:
        return [sum(places) for places in product(*(steps(plan, axis) for axis in reversed(names)))]

    chosen = offsets([axis for axis in order if axis in wanted])
    for base in offsets([axis for axis in order if axis not in wanted]):
        yield tuple([base + at for at in chosen])


# Which axes of the dense part make a group up; the others are made of the ranks of a stage (`named_groups`).
_DENSE_GROUPS: dict[str, tuple[str, ...]] = {
    **{axis: (axis,) for axis in AXES},
    "dp_cp": ("dp", "cp"),
}
GROUPS = (
    *_DENSE_GROUPS,
    *("shard", "replicate", "etp", "ep", "edp", "expert_shard", "expert_replicate", "table"),
)
"""Every kind of group that ranks form, by the name that messages and group shapes give it."""


def named_groups(plan: Plan, name: str) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of every group of a kind, one of `GROUPS`; together they hold every rank once.

    Replicas of one sharding group are neighbours along dp with all their context-parallel ranks; experts lie on the
    ranks of a stage in the order etp, ep, edp. "table" pairs the first and the last stage, which share a table; the
    other ranks are alone in it.

    >>> plan = Plan(tp=2, dp=4, ep=2)
    >>> list(named_groups(plan, "ep"))[:2], next(named_groups(plan, "edp"))
    ([(0, 1), (2, 3)], (0, 2, 4, 6))
    """
    if name in _DENSE_GROUPS:
        yield from groups(plan, _DENSE_GROUPS[name])
    elif name == "table":
        for line in groups(plan, ("pp",)):
            yield (line[0], line[-1]) if plan.pp > 1 else line[:1]
            yield from ((rank,) for rank in line[1:-1])
    elif name in ("shard", "replicate"):
        yield from _sharding_groups(plan, name)
    else:
        yield from _expert_groups(plan, name)


def _sharding_groups(plan: Plan, name: str) -> Iterator[tuple[int, ...]]:
    """Ranks of neighbouring replicas that shard one copy of the dense weights, or that hold the same shard."""
    shard = shard_of(plan)
    for line in groups(plan, ("dp",)):
        if name == "replicate":
            yield from (line[i::shard] for i in range(shard))
    if name == "shard":
        for both in groups(plan, ("dp", "cp")):
            place = {rank: i for line in _lines_within(plan, both) for i, rank in enumerate(line)}
            for start in range(0, plan.dp, shard):
                yield tuple(rank for rank in both if start <= place[rank] < start + shard)


def _lines_within(plan: Plan, both: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The data-parallel lines of the ranks that differ in dp and cp alone."""
    first = min(both)
    for c in steps(plan, "cp"):
        yield tuple(first + c + d for d in steps(plan, "dp"))


def _expert_groups(plan: Plan, name: str) -> Iterator[tuple[int, ...]]:
    """Ranks of a stage by their place in the mixed radix etp, ep, edp."""
    inner = plan.etp * plan.ep
    share = max(1, plan.expert_dp * shard_of(plan) // plan.dp)
    for stage in groups(plan, STAGE_AXES):
        ranks = sorted(stage)
        if name == "etp":
            yield from (tuple(ranks[i : i + plan.etp]) for i in range(0, len(ranks), plan.etp))
        elif name == "ep":
            starts = (a + b for a in range(0, len(ranks), inner) for b in range(plan.etp))
            yield from (tuple(ranks[i : i + inner : plan.etp]) for i in starts)
        else:
            for line in (tuple(ranks[i::inner]) for i in range(inner)):
                if name == "edp":
                    yield line
                elif name == "expert_shard":
                    yield from (line[i : i + share] for i in range(0, len(line), share))
                else:
                    yield from (line[i::share] for i in range(share))
