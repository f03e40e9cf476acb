"""Seconds of collectives over the tiers of a cluster.

n ranks of a group, m_i of them inside one domain of tier i (m_-1 = 1, the last is n). Each tier that the group
crosses carries its share over as many links as ranks sit in a domain below, at once (multi-ring form of
transformer-perf-estimates, with its missing factor of two put right); the slowest tier binds and every step costs a
latency. docs/formulas.md, collectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from shardwise.cost._rates import Efficiencies, constants, family_of
from shardwise.hardware import Cluster
from shardwise.ledger.number import X, above, maximum, minimum, power, total
from shardwise.ledger.op import Verb
from shardwise.ledger.traced import leaf, named


@dataclass(frozen=True, kw_only=True, slots=True)
class Link(Generic[X]):
    """What one tier gives a device: achieved bytes per second in one direction, start.

    Step and the size at half rate.
    """

    name: str
    bytes_per_second: X
    start_seconds: X
    step_seconds: X
    half_bytes: X
    in_network: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Network(Generic[X]):
    """The links of a cluster, fastest tier first."""

    links: tuple[Link[X], ...]
    assumptions: tuple[str, ...] = ()


def network_of(cluster: Cluster, imposed: Efficiencies) -> Network[Any]:
    """Return the achieved rates of a cluster's tiers, as named numbers."""
    table, family = constants(), family_of(cluster.device)
    links = []
    for i, tier in enumerate(cluster.tiers):
        # Nodes of one device have no fast tier: the network is their first.
        fast = i == 0 and tier.name != "network"
        row = table[family]["fast"] if fast else table["network"]
        fraction = imposed.fast_link if fast else imposed.slow_link
        rate = imposed.fast_bytes_per_second if fast else imposed.slow_bytes_per_second
        efficiency = fraction or (1.0 if imposed.ideal else row["efficiency"])
        scale = 0.0 if imposed.ideal else 1.0
        plain_rate = bool(imposed.ideal or fraction or rate)
        links.append(
            Link(
                name=tier.name,
                in_network=tier.in_network,
                bytes_per_second=leaf(
                    f"{tier.name} bytes/s", rate or efficiency * tier.bytes_per_second, row["source"]
                ),
                start_seconds=leaf(f"{tier.name} start", scale * row["start_seconds"], row["source"]),
                step_seconds=leaf(
                    f"{tier.name} step",
                    scale * max(row["step_seconds"], tier.latency_seconds),
                    row["source"],
                ),
                half_bytes=leaf(f"{tier.name} half-rate size", 0.0 if plain_rate else row["half_bytes"], row["source"]),
            )
        )
    notes = ("links use generic efficiencies",) if family == "generic" and len(links) else ()
    return Network(links=tuple(links), assumptions=notes)


def _wire(link: Link[X], volume: X) -> X:
    """Return seconds for a volume on one device's link.

    X/b * (1 + sqrt(s0/x)), mid sizes pay for the change of protocol.
    """
    return (volume + power(link.half_bytes * volume, 0.5)) / link.bytes_per_second


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


def leaving_share(n: X, below: X, fanout: int) -> X:
    """Return the share of an all-to-all's bytes that leaves a domain of `below` of its n ranks.

    Without a fanout every copy travels: (n - below) / n. A token with k copies over d domains of equal chance reaches
    d * (1 - (1 - 1/d)^k) of them, and is sent once to each but its own.

    >>> leaving_share(64, 8, 0), round(leaving_share(64, 8, 8), 3)
    (0.875, 0.574)
    """
    if not fanout:
        return (n - below) / n
    domains = n / below
    reached = domains * (1 - power(1 - 1 / domains, fanout))
    return reached * (1 - 1 / domains) / fanout


def collective_seconds(net: Network[X], verb: Verb, size: X, group: tuple[X, ...], fanout: int = 0) -> X:
    """Return seconds of one collective of `size` bytes (the gathered tensor; for `send` one message).

    `group` is how many ranks of the group sit in one domain of each tier, the last the whole group. A group of one is
    free. In-network reduction (NVLS, SHARP) inside the fastest tier sends 1 + 1/n of the tensor instead of 2 (n - 1)
    / n.
    """
    n = group[-1]
    wires: list[X] = []
    steps: list[X] = []
    below = 0 * n + 1
    for link, at in zip(net.links, group, strict=True):
        crosses = at - below
        if verb == "all_to_all":
            # What leaves a domain does so over each rank's own link.
            volume = size * (leaving_share(n, below, fanout) if link is not net.links[0] else (n - 1) / n)
        elif verb == "send":
            volume = size + 0 * n
        else:
            volume = _volume(verb, n, size) / below
        if verb == "all_reduce" and link.in_network and link is net.links[0]:
            volume = minimum(volume, (1 + 1 / n) * size)
        wires.append(above(crosses, 0, _wire(link, volume), 0 * volume))
        hops = crosses if verb == "send" else n / below - n / at
        rounds = 2.0 if verb == "all_reduce" else 1.0
        once = minimum(hops, 1) if verb == "send" else hops
        steps.append(rounds * once * link.step_seconds + above(crosses, 0, link.start_seconds, 0 * link.start_seconds))
        below = at
    slowest = wires[0]
    for wire in wires[1:]:
        slowest = maximum(slowest, wire)
    seconds = named(slowest, "wire") + named(total(steps), "latency")
    return above(n, 1, above(size, 0, seconds, 0 * seconds), 0 * seconds)
