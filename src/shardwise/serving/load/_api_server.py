"""What requests wait in an API server before the engine may have them.

One process takes requests off the network and has their prompts read. vLLM's takes all that come together before the
first of them goes on; others hand on each as it is read, which latencies of a server do not count.
"""

from __future__ import annotations

from shardwise.plans import Workload
from shardwise.records import dataclass
from shardwise.serving._policy import Policy, rush_seconds
from shardwise.units import show_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerWaits:
    """Seconds that each of the first requests of a load waits in an API server, and each that comes later."""

    first: float = 0.0
    later: float = 0.0


def comes_together(workload: Workload) -> int:
    """Return how many requests come at one moment: all of a burst, or the first of every user of a benchmark.

    >>> from shardwise.plans import Arrivals, Length
    >>> tokens = Length(mean=9)
    >>> loads = Arrivals(kind="burst"), Arrivals(kind="closed", users=40), Arrivals(rate=2.0)
    >>> asked = (Workload(input_tokens=tokens, output_tokens=tokens, arrivals=one, finite=True) for one in loads)
    >>> [comes_together(one) for one in asked]
    [2000, 40, 1]
    """
    arrivals = workload.arrivals
    if arrivals.kind == "burst":
        return workload.count
    # Users of a server that runs on join one after another.
    return min(arrivals.users, workload.count) if arrivals.kind == "closed" and workload.finite else 1


def server_waits(workload: Workload, policy: Policy, servers: int, stated: float | None = None) -> ServerWaits:
    """Return what requests wait in API servers, of which each replica has one, in seconds.

    Pools have none (`servers` 0): a router before them, such as Dynamo's, sends their workers prompts that it has read.
    `stated` are the seconds that a server takes for each, one after another; None: what the engine's release takes.
    """
    together = -(-comes_together(workload) // max(servers, 1))
    if stated is not None:
        return ServerWaits(first=stated * together, later=stated)
    tokens, at_a_time = workload.input_tokens.mean, policy.read_together if servers else 0
    return ServerWaits(first=rush_seconds(together, tokens, at_a_time))


def server_notes(waits: ServerWaits) -> tuple[str, ...]:
    """Return what is said of an API server, nothing where nobody waits for it."""
    if not waits.first:
        return ()
    note = f"requests that come together wait {show_seconds(waits.first)} in the API server, which takes all of them"
    return (f"{note} before the engine has the first",)
