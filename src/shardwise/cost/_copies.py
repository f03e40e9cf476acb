"""Copies of tokens on their way to experts: what leaves a domain, and kernels that send a token once to each rank."""

from __future__ import annotations

from typing import Generic

from shardwise.ledger.number import X, above, power
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Copies(Generic[X]):
    """Of an exchange that sends a token once to each domain: copies of a token, and bytes of one.

    `beside_bytes` go with each copy in a domain that holds all experts, in parts of those in one that does not.
    """

    fanout: int
    copy_bytes: X | float
    beside_bytes: X | float
    queued: bool = False
    """They pass through queues of messages on both sides."""


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


def exchanged_bytes(group: tuple[X, ...], size: X, fanout: int) -> X:
    """Return the bytes that each rank of a group sends in an all-to-all of `size` bytes a rank.

    Copies for one domain of the fastest tier that travel once are handed on inside it; without such a domain they are
    not made.

    >>> exchanged_bytes((8, 64), 64.0, 8), exchanged_bytes((1, 2), 2.0, 2)
    (63.0, 0.75)
    """
    n = group[-1]
    return above(group[0], 1, (n - 1) / n * size, leaving_share(n, 0 * n + 1, fanout) * size)


def copied_seconds(size: X, copies: Copies[X], ranks: tuple[X, X], rates: tuple[float, float, float]) -> X:
    """Return seconds of a kernel that sends a token once to each of n ranks that has one of its experts.

    `ranks` are n and those of a domain, `rates` bytes a second, what a copy takes for each rank of a domain, whose map
    of the token is searched (DeepEP csrc/hybrid_ep/backend/hybrid_ep_backend.cuh, sparse_to_dense_map), and what it
    takes in queues.

    >>> one = Copies(fanout=8, copy_bytes=14336.0, beside_bytes=256.0)
    >>> round(copied_seconds(4096 * 8 * 14336.0, one, (8, 8), (792e9, 1.08e-10, 0.0)) * 1e6)
    415
    """
    n, at = ranks
    sent = n * (1 - power(1 - 1 / n, copies.fanout)) / copies.fanout * size
    extra = copies.beside_bytes * at / n / copies.copy_bytes
    each = at * rates[1] + (rates[2] if copies.queued else 0.0)
    return sent * (1 + extra) / rates[0] + sent / copies.copy_bytes * each
