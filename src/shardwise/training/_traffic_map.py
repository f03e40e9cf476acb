"""Where the messages of a plan travel: bytes from rank to rank, by tier of the cluster and between nodes.

A collective on a ring hands each rank's bytes to the next one of its group, an all-to-all spreads them over the others,
a send goes to the neighbour. NCCL may choose trees or the network's own reduction; the bytes that enter and leave a
node are those of the ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from shardwise.cost import leaving_share
from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.plans import Plan, named_groups
from shardwise.records import dataclass
from shardwise.training._traffic import Flow

MOST_DEVICES, MOST_PAIRS = 2_000_000, 50_000_000


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
    """Bytes of a step from node to node, columns of one length: only pairs that talk, each once, in order."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    bytes: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TrafficMap:
    """Bytes of a step by kind of group and tier over the cluster, between nodes, into each rank, the busiest link."""

    by_tier: dict[str, tuple[float, ...]]
    between_nodes: NodeTraffic
    received: Sequence[float]
    sent: Sequence[float]
    busiest: BusiestLink | None


def talking_groups(plan: Plan, name: str) -> list[tuple[int, ...]]:
    """Return the groups of a kind; of a shared table only the pairs."""
    groups = list(named_groups(plan, name))
    most = max(map(len, groups))
    return [g for g in groups if len(g) == most]


def stage_of_ranks(plan: Plan) -> list[int]:
    """Return the pipeline stage of every rank."""
    stages = [0] * plan.num_devices
    for line in talking_groups(plan, "pp"):
        for stage, rank in enumerate(line):
            stages[rank] = stage
    return stages


def _patterns(flows: Sequence[Flow]) -> dict[tuple[str, str, int], float]:
    """Return bytes that a device sends in a step by (group, pattern, fanout or direction)."""
    patterns: dict[tuple[str, str, int], float] = {}
    for flow in flows:
        message = flow.message
        key = (message.group, "ring", 1)
        if message.verb == "all_to_all":
            key = (message.group, "exchange", message.fanout)
        elif message.group == "pp":
            key = (message.group, "send", message.toward)
        patterns[key] = patterns.get(key, 0.0) + flow.sent_per_step
    return patterns


def check_devices(plan: Plan) -> None:
    """Raise `InputError` where the ranks of a plan are more than can be listed group by group."""
    if plan.num_devices > MOST_DEVICES:
        rule = f"must be at most {MOST_DEVICES:,} for a map of its communication"
        raise InputError([Problem("num_devices", plan.num_devices, rule, "ask for fewer devices")])


def _check_count(plan: Plan, keys: Iterable[tuple[str, str, int]]) -> None:
    """Raise `InputError` where the pairs of ranks that talk are more than can be listed."""
    # Of a shared table, whose groups differ, the first is a pair.
    sizes = {name: len(next(named_groups(plan, name))) for name, _, _ in keys}
    pairs = plan.num_devices * sum(sizes[name] - 1 if pattern == "exchange" else 1 for name, pattern, _ in keys)
    if pairs > MOST_PAIRS:
        rule = f"has {pairs:,} pairs of ranks that talk, at most {MOST_PAIRS:,} are followed"
        raise InputError([Problem("num_devices", plan.num_devices, rule, "ask for fewer devices or smaller groups")])


@dataclass(slots=True)
class _Counts:
    """What is counted of the messages of a step; `below` are the sizes of the domains that each tier joins.

    `nodes` has the bytes from node a to node b at a * devices + b.
    """

    plan: Plan
    cluster: Cluster
    below: list[int]
    by_tier: dict[str, list[float]]
    nodes: defaultdict[int, float]
    received: list[float]
    sent: list[float]
    leaving: list[list[float]]

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster) -> _Counts:
        """Return nothing counted yet."""
        n, below = cluster.num_devices, [1, *(t.size for t in cluster.tiers[:-1])]
        leaving = [[0.0] * -(-n // size) for size in below]
        return cls(plan, cluster, below, {}, defaultdict(float), [0.0] * n, [0.0] * n, leaving)

    def send(self, source: int, tier: int, amount: float) -> None:
        """Count bytes that a rank sends to others over a tier.

        Its own port on the first tier carries what stays within it; outer tiers what leaves the domain.
        """
        self.sent[source] += amount
        if not tier:
            self.leaving[0][source] += amount
            return
        for i in range(1, tier + 1):
            self.leaving[i][source // self.below[i]] += amount

    def ring(self, name: str, shift: int, amounts: Sequence[float]) -> None:
        """Count what each rank of the groups of a kind, given by rank, hands to one `shift` places on."""
        by_tier = self.by_tier.setdefault(name, [0.0] * len(self.below))
        nodes, node, most = self.nodes, self.cluster.devices_per_node, self.cluster.num_devices
        fast, outer = (*self.below[1:], most)[0], self.below[2:]
        received, sent, own, first = self.received, self.sent, self.leaving[0], self.leaving[:2][-1]
        near, far, alike = by_tier[0], by_tier[-1], fast == node
        for group in talking_groups(self.plan, name):
            for source, target in zip(group, group[shift:] + group[:shift], strict=True):
                # This is the inner loop of an answer on many devices: it calls nothing for the usual two tiers, whose
                # nodes are the domains of the first.
                if amount := amounts[source]:
                    received[target] += amount
                    sent[source] += amount
                    at, to = source // node, target // node
                    nodes[at * most + to] += amount
                    domain = at if alike else source // fast
                    if domain == (to if alike else target // fast):
                        own[source] += amount
                        near += amount
                    elif not outer:
                        far += amount
                        first[domain] += amount
                    else:
                        tier = 1 + tier_of(source, target, outer)
                        by_tier[tier] += amount
                        first[domain] += amount
                        for size, leaving in zip(outer[: tier - 1], self.leaving[2:], strict=False):
                            leaving[source // size] += amount
        by_tier[0] = near
        if not outer and len(by_tier) > 1:
            by_tier[-1] = far

    def exchange(self, name: str, fanout: int, amounts: Sequence[float]) -> None:
        """Count what each rank of the groups of a kind spreads over the others, domain by domain."""
        groups, by_tier = talking_groups(self.plan, name), self.by_tier.setdefault(name, [0.0] * len(self.below))
        n = len(groups[0])
        shares = [share / (n - 1) for share in _deduplicated(groups[0], self.cluster, fanout)] if n > 1 else []
        for group in groups if n > 1 else ():
            # How many ranks of the group, and bytes of them, are in each domain: rank, domains of the tiers, cluster.
            within = [_within(group, size, amounts) for size in (*self.below, self.cluster.num_devices)]
            for source in group:
                places = [source // size for size in self.below] + [0]
                known = [members[place] for members, place in zip(within, places, strict=True)]
                for tier, ((few, less), (many, more)) in enumerate(pairwise(known)):
                    amount = amounts[source] * shares[tier] * (many - few)
                    by_tier[tier] += amount
                    self.received[source] += shares[tier] * (more - less)
                    self.send(source, tier, amount)
            self._between(group, shares, amounts)

    def _between(self, group: tuple[int, ...], shares: Sequence[float], amounts: Sequence[float]) -> None:
        """Count what nodes send to nodes where each rank of a group sends its shares to all others."""
        node, sizes = self.cluster.devices_per_node, self.below[1:]
        # Ranks that share a node and the domains of all tiers are alike to the others.
        unit = min(node, *sizes) if sizes else node
        unit = 1 if any(size % unit for size in (node, *sizes)) else unit
        alike = [(place * unit, *members) for place, members in _within(group, unit, amounts).items()]
        for source, own, amount in alike:
            for target, many, _ in alike:
                peers = own - 1 if source == target else many
                sent = amount * shares[tier_of(source, target, sizes)] * peers
                self.nodes[source // node * self.cluster.num_devices + target // node] += sent


def tier_of(source: int, target: int, sizes: Sequence[int]) -> int:
    """Return the tier over which two ranks talk, the innermost whose domain holds both; `sizes` of all but the last.

    >>> tier_of(0, 7, [8, 72]), tier_of(0, 8, [8, 72]), tier_of(0, 80, [8, 72])
    (0, 1, 2)
    """
    return sum(source // size != target // size for size in sizes)


def _within(group: tuple[int, ...], size: int, amounts: Sequence[float]) -> dict[int, tuple[int, float]]:
    """Return how many ranks of a group each domain of a size has, and the bytes that they send."""
    amounts_of: dict[int, tuple[int, float]] = {}
    for rank in group:
        many, amount = amounts_of.get(rank // size, (0, 0.0))
        amounts_of[rank // size] = many + 1, amount + amounts[rank]
    return amounts_of


def _deduplicated(group: tuple[int, ...], cluster: Cluster, fanout: int) -> list[float]:
    """Return how much more or less than its even share travels over each tier where copies travel once a domain.

    What leaves a domain is `leaving_share` of the bytes; the copies for its other experts are made behind the wire.
    """
    if not fanout:
        return [1.0] * len(cluster.tiers)
    n = float(len(group))
    together = (sum(rank // t.size == group[0] // t.size for rank in group) for t in cluster.tiers[:-1])
    below = [1, *(max(1, many) for many in together)]
    plain = [*(leaving_share(n, float(b), 0) for b in below), 0.0]
    once = [plain[0], *(leaving_share(n, float(b), fanout) for b in below[1:]), 0.0]
    pairs = zip(pairwise(plain), pairwise(once), strict=True)
    whole = plain[0] if len(below) == 1 or below[1] > 1 else once[1]
    return [(b[0] - b[1]) / (a[0] - a[1]) / (whole / plain[0]) if a[0] > a[1] else 0.0 for a, b in pairs]


def traffic_map_of(
    plan: Plan, stages: Sequence[tuple[int, Sequence[Flow]]], cluster: Cluster, rates: Mapping[str, float]
) -> TrafficMap:
    """Return where the bytes of a step travel; `stages` are runs of (count, flows of one device).

    `rates` are the achieved bytes a second of each tier by name.
    """
    each = [_patterns(flows) for _, flows in stages]
    keys = dict.fromkeys(k for counts_of in each for k in counts_of)
    _check_count(plan, keys)
    run_of = [run for run, (count, _) in enumerate(stages) for _ in range(count)]
    runs, counts = [run_of[stage] for stage in stage_of_ranks(plan)], _Counts.of(plan, cluster)
    for key in keys:
        name, pattern, how = key
        sent = [counts_of.get(key, 0.0) for counts_of in each]
        amounts = [sent[run] for run in runs]
        (counts.exchange if pattern == "exchange" else counts.ring)(name, how, amounts)
    pairs = sorted(counts.nodes.items())
    return TrafficMap(
        by_tier={group: tuple(counts_of) for group, counts_of in counts.by_tier.items()},
        between_nodes=NodeTraffic(
            source=tuple([pair // cluster.num_devices for pair, _ in pairs]),
            target=tuple([pair % cluster.num_devices for pair, _ in pairs]),
            bytes=tuple([amount for _, amount in pairs]),
        ),
        received=counts.received,
        sent=counts.sent,
        busiest=_busiest(counts.leaving, cluster, rates),
    )


def _busiest(leaving: Sequence[list[float]], cluster: Cluster, rates: Mapping[str, float]) -> BusiestLink | None:
    sizes = (1, *(t.size for t in cluster.tiers[:-1]))
    busiest = []
    for tier, size, amounts in zip(cluster.tiers, sizes, leaving, strict=True):
        domain = max(range(len(amounts)), key=amounts.__getitem__)
        ranks = min(size, cluster.num_devices - domain * size)
        amount = amounts[domain]
        seconds = amount / (ranks * rates[tier.name])
        busiest.append(BusiestLink(tier=tier.name, domain=domain, ranks=ranks, bytes_per_step=amount, seconds=seconds))
    most = max(busiest, key=lambda b: b.seconds)
    return most if most.seconds else None
