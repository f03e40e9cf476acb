"""A part of a large fleet, simulated as its router feeds it.

Of requests in turn (round robin) each replica gets every n-th: the gaps of its requests are sums of n gaps of all, and
replicas that are evenly spaced keep the distance of their turns. Of a random router it gets a random part, the gaps a
geometric number of those of all. The least loaded of many replicas is found among fewer at the same load a replica:
loads of those that a request may go to differ by one, and a request rarely waits, in either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle, pairwise, repeat
from random import Random

from shardwise.plans import Arrivals, Workload
from shardwise.records import dataclass, replace
from shardwise.serving.load._requests import Request, request_of

# Requests that are simulated of a fleet that is too large to be simulated whole, and the fewest replicas of it whose
# least loaded is as good as that of all (p99 of the time to the first token: 16 and 200 replicas are within the noise).
REQUESTS, _FEWEST = 10_000, 16
# How far the parts of two pools may be from each other: so much more or less comes to a replica of the second.
_UNLIKE = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """So many replicas of a fleet, evenly spaced in the turns of its router."""

    simulated: int
    replicas: int
    router: str
    behind: int = 0
    """Of two pools: the replicas of the second that are simulated behind so many workers of the first."""

    @property
    def share(self) -> float:
        """Part of the fleet that is simulated."""
        return self.simulated / self.replicas

    def steps(self, seed: int) -> Iterator[int]:
        """Return for each request of the sample the how manieth of all it is after the one before.

        >>> steps = Sample(simulated=3, replicas=8, router="round-robin").steps(0)
        >>> [next(steps) for _ in range(6)]
        [2, 3, 3, 2, 3, 3]
        """
        if self.simulated == self.replicas or self.router not in ("round-robin", "random"):
            return repeat(1)
        if self.router == "random":
            random, log = Random(f"sample {seed}"), math.log1p(-self.share)
            return (1 + int(math.log1p(-random.random()) / log) for _ in repeat(None))
        turns = [index * self.replicas // self.simulated for index in range(self.simulated + 1)]
        return cycle([after - at for at, after in pairwise(turns)])

    def arrivals(self, arrivals: Arrivals) -> Arrivals:
        """Return the arrivals that steps count in: those of all, of the least loaded those of a smaller fleet."""
        if self.simulated == self.replicas or self.router in ("round-robin", "random"):
            return arrivals
        return replace(arrivals, rate=arrivals.rate * self.share)


def sample_of(workload: Workload, replicas: int, router: str, each: float, requests: int = REQUESTS) -> Sample:
    """Return the part of a fleet of replicas, each with so many requests, that is simulated; it may be all.

    Blocks that requests share are where they were sent before: such a fleet is whole.

    >>> from shardwise.plans import Length
    >>> load = Workload(input_tokens=Length(mean=9), output_tokens=Length(mean=9), arrivals=Arrivals(rate=100.0))
    >>> [sample_of(load, replicas, "round-robin", 300).simulated for replicas in (8, 48, 200)]
    [8, 34, 34]
    """
    simulated = math.ceil(max(requests, workload.count) / each) if 0 < each < math.inf else replicas
    if router not in ("round-robin", "random"):
        simulated = max(simulated, _FEWEST)
    if any(workload.blocks):
        simulated = replicas
    return Sample(simulated=min(simulated, replicas), replicas=replicas, router=router)


def sample_of_pools(workload: Workload, workers: tuple[int, int], router: str, each: float) -> Sample:
    """Return the part of two pools that is simulated, where each worker of the first has so many requests.

    It has as much of the second: what of this comes to a replica are the ends of prompts, one after another, as in all.
    Where requests go to the least loaded all is simulated: a worker computes one prompt after another, so that fewer to
    choose from wait longer (p99 of the first token at 88 %: 16 workers a third above 64).

    >>> from shardwise.plans import Length
    >>> load = Workload(input_tokens=Length(mean=9), output_tokens=Length(mean=9), arrivals=Arrivals(rate=100.0))
    >>> sample = sample_of_pools(load, (126, 92), "round-robin", 1000)
    >>> sample.simulated, sample.behind
    (26, 19)
    """
    first, last = workers
    if router not in ("round-robin", "random"):
        return Sample(simulated=first, replicas=first, router=router, behind=last)
    least = max(_FEWEST, math.ceil(_FEWEST * first / last), sample_of(workload, first, router, each).simulated)
    for simulated in range(least, first):
        behind = round(simulated * last / first)
        if abs(behind * first / (simulated * last) - 1) <= _UNLIKE:
            return Sample(simulated=simulated, replicas=first, router=router, behind=behind)
    return Sample(simulated=first, replicas=first, router=router, behind=last)


def requests_of(
    workload: Workload, count: int, sample: Sample | None = None, server_seconds: float = 0.0
) -> Iterator[Request]:
    """Yield the requests of an open loop or a burst, or of those the ones of a part of the fleet, by arrival.

    Each waits so long in an API server.
    """
    seed, arrivals = workload.seed, sample.arrivals(workload.arrivals) if sample else workload.arrivals
    first, second = (sample.steps(seed) if sample else repeat(1) for _ in range(2))
    times = arrivals.seconds(count, Random(f"arrivals {seed}"), first)
    for at, drawn in zip(times, workload.draws(second), strict=False):
        yield request_of(at, drawn, server_seconds=server_seconds)
