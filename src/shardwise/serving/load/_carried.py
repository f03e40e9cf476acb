"""What is carried where a simulation showed a queue that the closed form did not expect."""

from __future__ import annotations

from shardwise.plans import Workload
from shardwise.records import replace
from shardwise.serving.load._fleet import Fleet, Router
from shardwise.serving.load._replica import uncollected
from shardwise.serving.load._requests import queue_growth

# Halvings between what a queue that grows is served at and what comes.
_TRIES = 3


def carried_at_most(fleet: Fleet, workload: Workload, router: Router, growth_per_second: float) -> float:
    """Return the most requests a second that simulations carry of a load whose queue grows.

    What a queue that grows is served at may be less: prompts that came together come one by one once it is there.
    """
    high = workload.arrivals.rate
    low, share = high - growth_per_second, fleet.sample.share if fleet.sample else 1.0
    for _ in range(_TRIES):
        rate = (low + high) / 2
        with uncollected():
            traces = fleet.run(replace(workload, arrivals=replace(workload.arrivals, rate=rate)), router)[1]
        grows = queue_growth([r for trace in traces for r in trace.finished], rate * share)
        low, high = (low, rate) if grows else (rate, high)
    return low
