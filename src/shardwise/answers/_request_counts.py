"""How many requests of a load are simulated: as stated, or as many as users, percentiles and classes need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardwise.answers._inputs import Inputs
from shardwise.plans import MOST_REQUESTS, Arrivals, Limit

_USUAL, _PER_USER, _BEYOND = 2000, 10, 10
_P99 = 100 * _BEYOND


def needed_count(inputs: Inputs, limits: Sequence[Limit], shares: Mapping[str, float]) -> int:
    """Return the requests that limits need, each of enough of its class; records a class that is too rare for one."""
    needed = 0
    for limit in limits:
        share = shares.get(limit.of, 1.0)
        count = math.ceil(limit.needed_requests / share)
        if count > MOST_REQUESTS and limit.of:
            of_it = f"{limit.needed_requests:,} requests of it"
            rule = f"is too rare for {limit.quantile} {limit.metric}, which takes {of_it}"
            rule += f": at most {MOST_REQUESTS:,} are simulated in all"
            least = limit.needed_requests / MOST_REQUESTS
            remedy = f"use a share of at least {least:g}, or limit its mean or a lower percentile"
            inputs.fail(f"{limit.of}.share", share, rule, remedy)
        needed = max(needed, min(count, MOST_REQUESTS))
    return needed


def usual_count(inputs: Inputs, arrivals: Arrivals, needed: int) -> int:
    """Return the requests that are simulated of arrivals; records users that are more than can be, each ten times."""
    users = arrivals.users
    if _PER_USER * users > MOST_REQUESTS and "requests" not in inputs.values:
        rule = f"ask {_PER_USER} times each unless told, and at most {MOST_REQUESTS:,} requests are simulated"
        most = MOST_REQUESTS // _PER_USER
        remedy = f"use at most {most:,}" + (", or state --requests" if users <= MOST_REQUESTS else "")
        inputs.fail("users", users, rule, remedy)
    elif users > MOST_REQUESTS:
        rule, remedy = f"ask at least once each, and at most {MOST_REQUESTS:,} requests are simulated", "use fewer"
        inputs.fail("users", users, rule, remedy)
    usual = len(arrivals.times) or max(_USUAL, needed, min(_PER_USER * users, MOST_REQUESTS))
    return stated_count(inputs, usual)


def stated_count(inputs: Inputs, usual: int, most: int = MOST_REQUESTS) -> int:
    """Return the requests that are stated, else the usual ones; notes what a trace lacks, and few for percentiles.

    Just these requests are what a benchmark measures, however few.
    """
    count = inputs.get("requests", usual)
    if count > most < MOST_REQUESTS:
        inputs.notes.append(f"requests {most}: all that the trace has, of the {count} that were asked")
    count = min(count, most) if most < MOST_REQUESTS else count
    if "requests" in inputs.values and count < _P99 and not inputs.get("finite", False):
        inputs.notes.append(f"requests {count}: too few for a p99, which needs {_P99:,}, {_BEYOND} beyond it")
    return int(count)
