"""Where the messages of a plan travel: bytes from rank to rank, by tier of the cluster and between nodes.

A collective on a ring hands each rank's bytes to the next one of its group, an all-to-all spreads them over the others,
a send goes to the neighbour. NCCL may choose trees or the network's own reduction; the bytes that enter and leave a
node are those of the ring.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from shardwise.cost import leaving_share
from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.plans import Plan, named_groups
from shardwise.records import dataclass
from shardwise.training._traffic import Flow

MOST_DEVICES, MOST_PAIRS = 2_000_000, 50_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTraffic:
    """Bytes of a step from ranks to ranks over the groups of one kind, as arrays of one length."""

    group: str
    source: Any
    target: Any
    bytes: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BusiestLink:
    """The link that messages keep busy for longest: what leaves one domain over a tier, and its seconds at that rate.

    `domain` counts the domains of the tier below: devices on the first tier.
    """

    tier: str
    domain: int
    ranks: int
    bytes_per_step: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeTraffic:
    """Bytes of a step from node to node, as arrays of one length: only pairs that talk, each once, in order."""

    source: Any
    target: Any
    bytes: Any


@dataclass(frozen=True, kw_only=True)
class TrafficMap:
    """Bytes of a step by kind of group and tier over the cluster, between nodes, into each rank, the busiest link."""

    by_tier: dict[str, tuple[float, ...]]
    between_nodes: NodeTraffic
    received: Any
    sent: Any
    busiest: BusiestLink | None


def group_array(plan: Plan, name: str) -> Any:
    """Return the groups of a kind as rows of ranks; of a shared table only the pairs."""
    import numpy

    found = list(named_groups(plan, name))
    most = max(map(len, found))
    return numpy.array([g for g in found if len(g) == most], numpy.int64)


def stage_of_ranks(plan: Plan) -> Any:
    """Return the pipeline stage of every rank."""
    import numpy

    found = numpy.zeros(plan.num_devices, numpy.int64)
    lines = group_array(plan, "pp")
    found[lines] = numpy.arange(plan.pp)
    return found


def _patterns(flows: Sequence[Flow]) -> dict[tuple[str, str, int], float]:
    """Return bytes that a device sends in a step by (group, pattern, fanout or direction)."""
    found: dict[tuple[str, str, int], float] = {}
    for flow in flows:
        m = flow.message
        key = (m.group, "ring", 1)
        if m.verb == "all_to_all":
            key = (m.group, "exchange", m.fanout)
        elif m.group == "pp":
            key = (m.group, "send", m.toward)
        found[key] = found.get(key, 0.0) + flow.sent_per_step
    return found


def check_devices(plan: Plan) -> None:
    """Raise `InputError` where the ranks of a plan are more than can be listed group by group."""
    if plan.num_devices > MOST_DEVICES:
        rule = f"must be at most {MOST_DEVICES:,} for who talks to whom"
        raise InputError([Problem("num_devices", plan.num_devices, rule, "ask for fewer devices")])


def _check_count(plan: Plan, keys: Iterable[tuple[str, str, int]]) -> None:
    """Raise `InputError` where the pairs of ranks that talk are more than can be listed."""
    sizes = {name: max(map(len, named_groups(plan, name))) for name, _, _ in keys}
    pairs = plan.num_devices * sum(sizes[name] - 1 if pattern == "exchange" else 1 for name, pattern, _ in keys)
    if pairs > MOST_PAIRS:
        rule = f"has {pairs:,} pairs of ranks that talk, at most {MOST_PAIRS:,} are followed"
        raise InputError([Problem("num_devices", plan.num_devices, rule, "ask for fewer devices or smaller groups")])


def edges_of(plan: Plan, stages: Sequence[tuple[int, Sequence[Flow]]], cluster: Cluster) -> Iterator[RankTraffic]:
    """Yield the bytes from rank to rank of a step; `stages` are runs of (count, flows of one device)."""
    import numpy

    run_of = numpy.repeat(numpy.arange(len(stages)), [count for count, _ in stages])[stage_of_ranks(plan)]
    each = [_patterns(flows) for _, flows in stages]
    keys = dict.fromkeys(k for found in each for k in found)
    _check_count(plan, keys)
    for key in keys:
        name, pattern, how = key
        amount = numpy.array([found.get(key, 0.0) for found in each])[run_of]
        ranks = group_array(plan, name)
        n = ranks.shape[1]
        if pattern == "exchange":
            for shift in range(1, n):
                target = numpy.roll(ranks, -shift, axis=1)
                share = _deduplicated(ranks, target, cluster, how) / (n - 1)
                yield RankTraffic(group=name, source=ranks, target=target, bytes=amount[ranks] * share)
        else:
            yield RankTraffic(group=name, source=ranks, target=numpy.roll(ranks, -how, axis=1), bytes=amount[ranks])


def tier_of(source: Any, target: Any, cluster: Cluster) -> Any:
    """Return the tier over which each pair of ranks talks: the innermost whose domain holds both."""
    return sum((source // t.size != target // t.size).astype(int) for t in cluster.tiers[:-1]) + 0 * source


def _deduplicated(source: Any, target: Any, cluster: Cluster, fanout: int) -> Any:
    """Return how much more or less than its even share travels between each pair where copies travel once a domain.

    What leaves a domain is `leaving_share` of the bytes; the copies for its other experts are made behind the wire.
    """
    import numpy

    n = source.shape[1]
    if not fanout:
        return numpy.ones(source.shape)
    below = [1, *(max(1, _together(source, t.size)) for t in cluster.tiers[:-1])]
    plain = [*(leaving_share(float(n), float(b), 0) for b in below), 0.0]
    once = [plain[0], *(leaving_share(float(n), float(b), fanout) for b in below[1:]), 0.0]
    pairs = zip(pairwise(plain), pairwise(once), strict=True)
    whole = plain[0] if len(below) == 1 or below[1] > 1 else once[1]
    factors = [(b[0] - b[1]) / (a[0] - a[1]) / (whole / plain[0]) if a[0] > a[1] else 0.0 for a, b in pairs]
    return numpy.array(factors)[tier_of(source, target, cluster)]


def _together(groups: Any, size: int) -> int:
    """Return how many ranks of the first group share the domain of its first."""
    return int((groups[0] // size == groups[0][0] // size).sum())


def traffic_map_of(edges: Iterable[RankTraffic], cluster: Cluster, rates: Mapping[str, float]) -> TrafficMap:
    """Return where the bytes of a step travel; `rates` are the achieved bytes a second of each tier by name."""
    import numpy

    n, node, tiers = cluster.num_devices, cluster.devices_per_node, cluster.tiers
    nodes = NodeTraffic(source=numpy.zeros(0, numpy.int64), target=numpy.zeros(0, numpy.int64), bytes=numpy.zeros(0))
    received, sent = numpy.zeros(n), numpy.zeros(n)
    leaving = [numpy.zeros(-(-n // size)) for size in (1, *(t.size for t in tiers[:-1]))]
    by_tier: dict[str, Any] = {}
    for e in edges:
        source, target, amount = (x.ravel() for x in (e.source, e.target, e.bytes))
        crossed = tier_of(source, target, cluster)
        into = by_tier.setdefault(e.group, numpy.zeros(len(tiers)))
        into += numpy.bincount(crossed, amount, len(tiers))
        received += numpy.bincount(target, amount, n)
        sent += numpy.bincount(source, amount, n)
        nodes = _added(nodes, source // node, target // node, amount)
        for i, size in enumerate((1, *(t.size for t in tiers[:-1]))):
            # A device's own port on the first tier carries what stays within it; outer tiers what leaves the domain.
            here = crossed == 0 if i == 0 else crossed >= i
            leaving[i] += numpy.bincount(source[here] // size, amount[here], len(leaving[i]))
    return TrafficMap(
        by_tier={group: tuple(float(x) for x in found) for group, found in by_tier.items()},
        between_nodes=nodes,
        received=received,
        sent=sent,
        busiest=_busiest(leaving, cluster, rates),
    )


def _added(pairs: NodeTraffic, source: Any, target: Any, amount: Any) -> NodeTraffic:
    """Return pairs of nodes with more bytes between some; a matrix of all nodes would be their number squared."""
    import numpy

    width = 1 + max(int(each.max(initial=0)) for each in (source, target, pairs.source, pairs.target))
    keys = numpy.concatenate([pairs.source * width + pairs.target, source * width + target])
    found, place = numpy.unique(keys, return_inverse=True)
    held = numpy.bincount(place.ravel(), numpy.concatenate([pairs.bytes, amount]), len(found))
    return NodeTraffic(source=found // width, target=found % width, bytes=held)


def _busiest(leaving: Sequence[Any], cluster: Cluster, rates: Mapping[str, float]) -> BusiestLink | None:
    sizes = (1, *(t.size for t in cluster.tiers[:-1]))
    found = []
    for tier, size, amounts in zip(cluster.tiers, sizes, leaving, strict=True):
        domain = int(amounts.argmax())
        ranks = min(size, cluster.num_devices - domain * size)
        amount = float(amounts[domain])
        seconds = amount / (ranks * rates[tier.name])
        found.append(BusiestLink(tier=tier.name, domain=domain, ranks=ranks, bytes_per_step=amount, seconds=seconds))
    most = max(found, key=lambda b: b.seconds)
    return most if most.seconds else None
