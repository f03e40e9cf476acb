"""Seconds of collectives over the tiers of a cluster.

n ranks of a group, m_i of them inside one domain of tier i (m_-1 = 1, the last is n). Each tier that the group
crosses carries its share over as many links as ranks sit in a domain below, at once (multi-ring form of
transformer-perf-estimates, with its missing factor of two put right); the slowest tier binds and every step costs a
latency. docs/formulas.md, collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from shardwise.cost._copies import Copies, copied_seconds, leaving_share
from shardwise.cost._imposed import Efficiencies
from shardwise.cost._records import CollectiveFit
from shardwise.cost._tables import constants, family_of
from shardwise.cost._torus import Packages, Torus, torus_of
from shardwise.hardware import Cluster, Tier, find_link
from shardwise.ledger.number import X, above, is_plain, log2, maximum, minimum, power
from shardwise.ledger.op import Verb
from shardwise.ledger.traced import leaf, named
from shardwise.records import dataclass, replace

RINGS: tuple[Verb, ...] = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tree:
    """NCCL's double binary tree of an all-reduce between nodes: latency grows with the logarithm of the nodes."""

    step_seconds: float
    chunk_bytes: float
    chunk_bytes_per_second: float
    long_step_seconds: float
    rate_share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectiveRates(Generic[X]):
    """What one kind of collective gets of one tier of a cluster."""

    bytes_per_second: X
    """Achieved bytes a second of a device in one direction."""
    start_seconds: X
    step_seconds: X
    half_bytes: X
    """Size at which half of the rate is reached."""
    own_share: float = 0.0
    """Share of a rank's own part that is moved too, by a copy inside the device."""
    crowding: float = 0.0
    """Power of the number of ranks by which devices on one host bridge slow each other."""
    peers: int = 0
    """Links of a device of a mesh to others of it (0: it is no mesh)."""
    peers_a_rank: float = 1.0
    """Links that a further rank of a group brings, where a pair has one of them."""
    torus: Torus | Packages | None = None
    low_bytes_per_second: float = 0.0
    """Rate of NCCL's protocol with short steps, where it changes between two (0: it does not)."""
    long_step_seconds: float = 0.0
    """What a step of the other protocol takes more."""
    inner_step_share: float = 0.0
    """What a hop inside a node takes more in that protocol, over what one between nodes does."""
    inner_low_share: float = 0.0
    """What bytes take on a hop inside a node in the protocol with short steps, over one between nodes."""
    lone_share: float = 1.0
    """Share of the full rate that an adapter reaches where one rank of its node sends."""
    tree: Tree | None = None
    """NCCL's double binary tree, where it may be quicker than the ring."""
    copied: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Kernels that send a token once to each rank with one of its experts: bytes a second (0: not measured), what a
    copy takes for each rank of a domain, and in queues."""

    def full_rate(self, below: X) -> X:
        """Return the full rate of an adapter of a node with so many ranks of the group."""
        rate = self.bytes_per_second
        return rate if self.lone_share == 1 else above(below, 1, rate, self.lone_share * rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkLink(Generic[X]):
    """One tier as the collectives see it; what has no constants of its own takes those of an all-gather."""

    name: str
    collectives: Mapping[str, CollectiveRates[X]]
    in_network: bool
    nominal_bytes_per_second: float = 0.0
    trees_bytes_per_second: float = 0.0
    """Rate of NCCL's NVLS trees over several domains, where one has several hosts (0: not measured)."""

    def wire(self, verb: Verb) -> CollectiveRates[X]:
        """Return what a collective gets of this tier."""
        return self.collectives.get(verb) or self.collectives["all_gather"]

    @property
    def bytes_per_second(self) -> X:
        """Achieved bytes per second of a device in one direction."""
        return self.collectives["all_gather"].bytes_per_second


@dataclass(frozen=True, kw_only=True, slots=True)
class Network(Generic[X]):
    """The links of a cluster, fastest tier first."""

    links: tuple[NetworkLink[X], ...]
    assumptions: tuple[str, ...] = ()


def collective_rates_of(
    tier: Tier, row: CollectiveFit, imposed: Efficiencies, fast: bool, extra_hop_seconds: float
) -> CollectiveRates[Any]:
    """Return what a collective achieves on a tier, as named numbers.

    `extra_hop_seconds` is what a hop takes more than one of the link that was measured.
    """
    fraction = imposed.fast_link if fast else imposed.slow_link
    rate = imposed.fast_bytes_per_second if fast else imposed.slow_bytes_per_second
    efficiency = fraction or (1.0 if imposed.ideal else row.efficiency)
    scale, plain = 0.0 if imposed.ideal else 1.0, bool(imposed.ideal or fraction or rate)
    reached = rate or efficiency * tier.bytes_per_second
    # What is imposed is a rate: the kernels that send a token once to each rank stay those that run.
    copied = reached if plain and row.copied_efficiency else row.copied_efficiency * tier.bytes_per_second
    peers, peers_a_rank = tier.mesh_links
    step = scale * (row.step_seconds + extra_hop_seconds)
    tree = Tree(
        step_seconds=row.tree_step_seconds + extra_hop_seconds,
        chunk_bytes=row.tree_chunk_bytes,
        chunk_bytes_per_second=row.tree_chunk_efficiency * tier.bytes_per_second,
        long_step_seconds=row.tree_long_ratio * (row.step_seconds + row.long_step_seconds + extra_hop_seconds),
        rate_share=row.tree_rate_share,
    )
    return CollectiveRates(
        bytes_per_second=leaf(f"{tier.name} bytes/s", reached, row.source),
        start_seconds=leaf(f"{tier.name} start", scale * row.start_seconds, row.source),
        step_seconds=leaf(f"{tier.name} step", step, row.source),
        half_bytes=leaf(f"{tier.name} half-rate size", 0.0 if plain else row.half_bytes, row.source),
        own_share=0.0 if plain else row.own_share,
        crowding=0.0 if plain else row.crowding,
        peers=0 if plain else peers,
        peers_a_rank=peers_a_rank,
        low_bytes_per_second=0.0 if plain else row.low_efficiency * tier.bytes_per_second,
        long_step_seconds=scale * row.long_step_seconds,
        inner_step_share=row.inner_step_share,
        inner_low_share=0.0 if plain else row.inner_low_share,
        lone_share=1.0 if plain else row.lone_share,
        tree=None if plain or not row.tree_step_seconds else tree,
        copied=(copied, scale * row.copied_rank_seconds, scale * row.queued_seconds),
    )


def measured_on(row: CollectiveFit, tier: Tier) -> CollectiveFit:
    """Return the constants of a verb over a network, those of rate and hops inside nodes on the one that was measured.

    >>> from dataclasses import replace
    >>> tier = Cluster.parse("16xa100-sxm-80gb").tiers[-1]
    >>> row = constants().network["all_reduce"]
    >>> measured_on(row, tier).efficiency, round(measured_on(row, replace(tier, name="slingshot-11")).efficiency, 2)
    (0.85, 0.68)
    """
    if row.measured_on == tier.name:
        return replace(row, efficiency=row.measured_efficiency)
    return replace(row, lone_share=1.0, inner_step_share=0.0, inner_low_share=0.0)


def link_of(cluster: Cluster, tier: Tier, imposed: Efficiencies) -> NetworkLink[Any]:
    """Return one tier of a cluster as the collectives see it."""
    # Nodes of one device have no fast tier: the network is their first.
    across = constants().network
    fast = tier is cluster.tiers[0] and tier.name not in ("network", *(row.measured_on for row in across.values()))
    family = constants().families[family_of(cluster.device)]
    rows = family.fast if fast else {verb: measured_on(row, tier) for verb, row in across.items()}
    nominal = find_link(cluster.device.fast_link if fast else "network").latency_seconds
    extra = max(tier.latency_seconds - nominal, 0.0)
    wires = {verb: collective_rates_of(tier, row, imposed, fast, extra) for verb, row in rows.items()}
    rate, trees = tier.bytes_per_second, 0.0
    if fast and not (imposed.ideal or imposed.fast_link or imposed.fast_bytes_per_second):
        wires = {verb: replace(wire, torus=torus_of(cluster)) for verb, wire in wires.items()}
        share = rows.get("all_reduce", rows["all_gather"]).trees_efficiency if tier.in_network else 0.0
        if share and tier.size > cluster.devices_per_node:
            trees = leaf(f"{tier.name} bytes/s of trees", share * rate)
    return NetworkLink(name=tier.name, collectives=wires, in_network=tier.in_network, nominal_bytes_per_second=rate,
                       trees_bytes_per_second=trees)  # fmt: skip


def network_of(cluster: Cluster, imposed: Efficiencies) -> Network[Any]:
    """Return the achieved rates of a cluster's tiers, as named numbers."""
    links = tuple(link_of(cluster, tier, imposed) for tier in cluster.tiers)
    families = constants().families
    generic = families[family_of(cluster.device)].fast == families["generic"].fast and cluster.num_devices > 1
    notes = ("links use generic efficiencies",) if generic else ()  # one alone sends nothing
    return Network(links=links, assumptions=notes)


def with_peers(network: Network[X]) -> Network[X]:
    """Return a network whose devices reach each other over their host bridge, as servers and trainers are set up.

    Some tables were measured on nodes without peer access, where ranks slow each other far more (priors.toml,
    passes.peer_access).
    """
    most = constants().rules.peer_access.crowding

    def joined(link: NetworkLink[X]) -> NetworkLink[X]:
        wires = {verb: replace(wire, crowding=min(wire.crowding, most)) for verb, wire in link.collectives.items()}
        return replace(link, collectives=wires)

    return replace(network, links=tuple(map(joined, network.links)))


def _wire(wire: CollectiveRates[X], verb: Verb, volume: X, hops: tuple[X, X], ranks: tuple[X, X]) -> X:
    """Return seconds for a volume on one device's link; `hops` are over faster links and over it, `ranks` in a domain.

    Over a network NCCL takes the faster of a protocol with short steps, whose bytes hold up hops inside nodes too, and
    one with full rate, in whose rings the longer of bytes and steps hides most of the other. Elsewhere mid sizes pay
    for the change of protocol by X/b * (1 + sqrt(s0/x)).
    """
    (inner, between), (below, at) = hops, ranks
    if not is_plain(wire.low_bytes_per_second, 0):
        long_hops = between + wire.inner_step_share * inner
        moved, stepped = volume / wire.full_rate(below), long_hops * wire.long_step_seconds
        full = power(moved * moved + stepped * stepped, 0.5) if verb in RINGS else moved + stepped
        low = volume / wire.low_bytes_per_second
        return minimum(low * (1 + wire.inner_low_share * (below - 1)), full)
    if wire.peers:
        volume = volume * unlinked(wire, 2 + 0 * at if verb == "send" else at)
    if wire.torus:
        volume = volume * wire.torus.slower(verb, at)
    seconds = (volume + power(wire.half_bytes * volume, 0.5)) / wire.bytes_per_second
    return seconds * power(maximum(at / 2, 1), wire.crowding) if wire.crowding else seconds


def unlinked(wire: CollectiveRates[X], at: X) -> X:
    """Return how many times longer a group of a mesh takes than all of it would: it has only the links inside.

    >>> from shardwise.hardware import Cluster
    >>> wire = network_of(Cluster.parse("8xmi300x"), Efficiencies()).links[0].wire("all_reduce")
    >>> [round(unlinked(wire, at), 2) for at in (2, 4, 8)]
    [7.0, 2.33, 1.0]
    >>> wire = network_of(Cluster.parse("8xv100-sxm-32gb"), Efficiencies()).links[0].wire("all_reduce")
    >>> [round(unlinked(wire, at), 2) for at in (2, 4, 8)]
    [6.0, 1.5, 1]
    """
    return maximum(wire.peers / (1 + wire.peers_a_rank * maximum(at - 2, 0)), 1)


def _tree_seconds(wire: CollectiveRates[X], tree: Tree, size: X, below: X, levels: X) -> X:
    """Return seconds of an all-reduce of `size` bytes, up and down `levels` levels of a double binary tree.

    NCCL takes the faster of its two protocols (src/graph/tuning.cc, ncclTopoGetAlgoTime). The one with short steps is
    that of small messages, which take few channels: the `below` devices of a node do not share them among their links.
    A level passes a chunk on when it has all of it (src/device/all_reduce.h, runTreeUpDown).
    """
    chunk = minimum(size, tree.chunk_bytes)
    low = levels * (tree.step_seconds + chunk / tree.chunk_bytes_per_second)
    low = low + 2 * (size - chunk) / wire.low_bytes_per_second
    high = 2 * size / below / (tree.rate_share * wire.full_rate(below)) + levels * tree.long_step_seconds
    return minimum(low, high)


def sent_bytes(verb: Verb, n: X, size: X) -> X:
    """Return the bytes that each of n ranks sends, on the mean, in a collective on a tensor of `size` bytes.

    Rings send (n - 1) / n of the tensor, an all-reduce twice that; in an all-to-all `size` is what one rank has. A
    broadcast and a reduction pass the tensor along n - 1 hops, so that the mean over the ranks is the same share.

    >>> sent_bytes("all_reduce", 4, 100), sent_bytes("all_gather", 4, 100), sent_bytes("send", 4, 100)
    (150.0, 75.0, 100)
    """
    share = (n - 1) / n * size
    if verb == "all_reduce":
        return 2 * share
    return size if verb == "send" else share


def _volume(verb: Verb, n: X, size: X) -> X:
    """Return the bytes that the busiest link of a ring moves: in a broadcast or reduction all of the tensor."""
    return size if verb in ("broadcast", "reduce") else sent_bytes(verb, n, size)


def _tier_volume(net: Network[X], link: NetworkLink[X], verb: Verb, size: X, ranks: tuple[X, X], fanout: int) -> X:
    """Return the bytes that a collective of n ranks, `below` of them in a domain, moves over one tier's link."""
    n, below = ranks
    first = link is net.links[0]
    if verb == "send":
        return size + 0 * n
    if verb == "all_to_all":
        # What leaves a domain does so over each rank's own link.
        volume = size * ((n - 1) / n if first else leaving_share(n, below, fanout))
    else:
        volume = _volume(verb, n, size) / below
    if verb == "all_reduce" and link.in_network and first:
        volume = minimum(volume, (1 + 1 / n) * size)
    own = link.collectives[verb].own_share if first and verb in link.collectives else 0.0
    return volume + own * (size / n) if own else volume


def collective_seconds(
    net: Network[X], verb: Verb, size: X, group: tuple[X, ...], copies: Copies[X] | None = None
) -> X:
    """Return seconds of one collective of `size` bytes (the gathered tensor; for `send` one message).

    `group` is how many ranks of the group sit in one domain of each tier, the last the whole group. A group of one is
    free. Switches that reduce send 1 + 1/n of a tensor instead of 2 (n - 1) / n. `copies` go once to each domain.
    """
    n, fanout = group[-1], copies.fanout if copies else 0
    if is_plain(n, 1) or is_plain(size, 0):
        return 0 * size * 1.0
    wires: list[X] = []
    steps, chains, inner = 0 * n, 0 * n, 0 * n
    below = 0 * n + 1
    for link, at in zip(net.links, group, strict=True):
        wire, crosses = link.wire(verb), at - below
        volume = _tier_volume(net, link, verb, size, (n, below), fanout)
        rounds = 2.0 if verb == "all_reduce" else 1.0
        hops = minimum(crosses, 1) if verb == "send" else rounds * (n / below - n / at)
        ring, latency = _wire(wire, verb, volume, (inner, hops), (below, at)), hops * wire.step_seconds
        if copies and fanout > 1 and wire.copied[0] and link is net.links[0]:
            ring = copied_seconds(size, copies, (n, at), wire.copied) * (unlinked(wire, at) if wire.peers else 1)
        if verb == "all_reduce" and not is_plain(link.trees_bytes_per_second, 0):
            # A domain of d is a node of trees that passes 2 (d - 1) / d of a tensor up, and as much down.
            ring = maximum(ring, 2 * (1 - at / n) * size / link.trees_bytes_per_second)
        if wire.tree is not None:
            # The faster algorithm; a tree's seconds count as those of its wire. Inside each domain its ranks are a
            # chain, passed twice (NCCL src/graph/tuning.cc: 2 ((ranks / nodes - 1) within + log2(nodes) between)).
            tree = _tree_seconds(wire, wire.tree, size, below, rounds * log2(at / below))
            quicker = ring + latency + steps - tree - chains
            ring, latency = above(quicker, 0, tree, ring), above(quicker, 0, 0 * latency, latency)
            steps = above(quicker, 0, chains, steps)
        start = above(crosses, 0, wire.start_seconds, 0 * wire.start_seconds)
        wires.append(above(crosses, 0, ring, 0 * volume))
        chain = latency if wire.tree is not None else rounds * (at / below - 1) * wire.step_seconds
        steps, chains, inner = steps + latency + start, chains + chain + start, inner + hops
        below = at
    slowest = wires[0]
    for wire_seconds in wires[1:]:
        slowest = maximum(slowest, wire_seconds)
    seconds = named(slowest, "wire") + named(steps, "latency")
    return above(n, 1, above(size, 0, seconds, 0 * seconds), 0 * seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRates:
    """What a device reaches of its host: the link in one direction, and what its update streams in the memory."""

    link_bytes_per_second: float
    memory_bytes_per_second: float


def host_of(cluster: Cluster, update_bytes_per_second: float = 0.0) -> HostRates:
    """Return what each device of a cluster reaches of its host; raises `InputError` where its link is not known.

    An update streams what its rank's threads do, where that is stated, else a share of what the memory gives a node.

    >>> host_of(Cluster.parse("1xrtx-4090")).link_bytes_per_second
    25600000000.0
    """
    host = constants().rules.host
    devices = min(cluster.devices_per_node, cluster.num_devices)
    return HostRates(
        link_bytes_per_second=host.link_share * cluster.device.host_bytes_per_second,
        memory_bytes_per_second=update_bytes_per_second or host.memory_bytes_per_second / devices,
    )
