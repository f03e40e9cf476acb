"""Links that a group has in a torus, where devices are joined to neighbours on two or three axes, and among packages.

A ring over all devices runs on all axes at once, a group that lies along one axis has the links of that axis, and a
message to a neighbour has one. An axis that is not closed, and a part of one, is a line: what ends there comes over one
link.
"""

from __future__ import annotations

import math

from shardwise.hardware import Cluster, find_link
from shardwise.ledger.number import X, above, minimum
from shardwise.ledger.op import Verb
from shardwise.records import dataclass


@dataclass(frozen=True, slots=True)
class Torus:
    """A torus: its axes, the devices along one of them, the links that an axis has at a device, the shortest ring."""

    axes: int
    side: int
    axis_links: int
    ring: int = 1
    """Devices of the shortest axis that closes: fewer of them lie on a part of an axis, between two ends."""

    def slower(self, verb: Verb, at: X) -> X:
        """Return how many times longer a group of `at` devices takes than over all links of a device.

        In an all-to-all a byte takes s / 4 hops along each axis of s devices: along one axis that is a quarter of what
        gathering all would take (jax-ml.github.io/scaling-book, sharding).

        >>> whole = Torus(3, 4, 2)
        >>> [whole.slower("all_gather", at) for at in (4, 16, 64)], whole.slower("send", 2)
        ([3.0, 1.5, 1.0], 6.0)
        >>> Torus(2, 16, 2).slower("all_to_all", 256)
        8.0
        >>> Torus(3, 4, 2, ring=4).slower("all_gather", 2)
        6.0
        """
        links = 2.0 * self.axes
        if verb == "send":
            return links + 0.0 * at
        joined = above(at, self.ring - 0.5, self.axis_links + 0.0 * at, 1.0 + 0.0 * at)
        if verb == "all_to_all":
            return minimum(at, self.side) * links / (4.0 * joined)
        more = above(at, self.side, 1.0 + 0 * at, 0 * at) + above(at, self.side**2, 1.0 + 0 * at, 0 * at)
        return links / (joined * minimum(1.0 + more, float(self.axes)))


@dataclass(frozen=True, slots=True)
class Packages:
    """Dies, two a package: the shares of all links that four in two packages have, and a message between packages."""

    four_share: float
    message_share: float

    def slower(self, verb: Verb, at: X) -> X:
        """Return how many times longer a group of `at` dies takes than a whole node.

        >>> dies = Packages(0.5, 0.25)
        >>> [dies.slower("all_gather", at) for at in (2, 4, 8)], dies.slower("send", 8)
        ([1.0, 2.0, 1.0], 4.0)
        """
        if verb == "send":
            return 1 / self.message_share + 0.0 * at
        return above(at, 2, above(at, 4, 1.0 + 0 * at, 1 / self.four_share + 0 * at), 1.0 + 0 * at)


def torus_of(cluster: Cluster) -> Torus | Packages | None:
    """Return the torus that the fastest tier of a cluster is, as square as its devices allow, or packages of two dies.

    >>> torus_of(Cluster.parse("256xtpu-v5p")), torus_of(Cluster.parse("8xh100"))
    (Torus(axes=3, side=8, axis_links=2, ring=4), None)
    """
    device = cluster.device
    link = find_link(device.fast_link)
    if device.chip in link.packages:
        return Packages(*link.package_shares)
    shape = link.torus.get(device.chip)
    if shape is None:
        return None
    axes, whole = shape
    size = min(cluster.tiers[0].size, cluster.num_devices)
    side, ring = 2 ** math.ceil(math.log2(size) / axes), round(whole ** (1 / axes))
    return Torus(axes=axes, side=side, axis_links=2 if size >= whole else 1, ring=ring)
