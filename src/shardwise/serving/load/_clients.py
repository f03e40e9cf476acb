"""Clients of a closed loop: their first requests, and what they take between an answer and their next one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat
from random import Random

from shardwise.plans import Workload
from shardwise.records import replace
from shardwise.serving._policy import client_seconds
from shardwise.serving.load._api_server import ServerWaits
from shardwise.serving.load._requests import Request, request_of
from shardwise.serving.load._state import Follow
from shardwise.units import show_seconds


def think_of(workload: Workload) -> float:
    """Return the seconds from an answer to the user's next request in the engine.

    However few they are, the step behind the answer has begun by then: users whose answers end in one step, or in steps
    behind each other, are answered together again, in engines that mix prompts with decode steps too.
    """
    stated = workload.arrivals.think_seconds
    return client_seconds(workload.input_tokens.mean) if stated is None else stated


def pauses(workload: Workload, seed: int) -> Iterator[float]:
    """Return the seconds from each answer to its user's next request.

    A benchmark's client takes what it takes. People think for exponential times, the usual terminal of a closed network
    (Lazowska and others 1984, Quantitative System Performance): with equal times and equal answers whoever is answered
    in one step asks in one step ever after, so that in the end all users ask at once.

    >>> from itertools import islice
    >>> from shardwise.plans import Arrivals, Length
    >>> tokens = Length(mean=9)
    >>> people = Workload(input_tokens=tokens, output_tokens=tokens, arrivals=Arrivals(
    ...     kind="closed", users=4, think_seconds=10.0))
    >>> round(sum(islice(pauses(people, 1), 10_000)) / 10_000)
    10
    """
    mean = think_of(workload)
    if workload.finite or not workload.arrivals.think_seconds:
        return repeat(mean)
    random = Random(seed)
    return (random.expovariate(1 / mean) for _ in repeat(None))


def closed_loop(
    workload: Workload, users: int, count: int, replica: int, carried: float, server: ServerWaits | None = None
) -> tuple[list[Request], Follow]:
    """Return the first requests of a replica's users, and what gives a user's next one.

    Users of a benchmark start at once; of a server that runs on they join at the requests a second that it carries, and
    spread over the time they think, so that what is told of them is neither that rush nor a march in step.
    """
    seed, server = workload.seed * 1009 + replica, server or ServerWaits()
    draws, think, issued = replace(workload, seed=seed).draws(), pauses(workload, seed), min(users, count)

    def made(at: float, user: int, waits: float) -> Request:
        return request_of(at, next(draws), user, waits)

    def follow(ended: Request) -> Request | None:
        nonlocal issued
        if issued >= count:
            return None
        issued += 1
        return made(ended.end + next(think), ended.user, server.later)

    gap = 0.0 if workload.finite else max(1 / carried, think_of(workload) / users)
    return [made(gap * user, user, server.first) for user in range(issued)], follow


def client_note(workload: Workload) -> str:
    """Return what is assumed of clients."""
    server = "latencies are the server's: no network, no tokenizer of the client"
    if workload.arrivals.kind != "closed" or workload.arrivals.think_seconds is not None:
        return server
    return f"{server}; users ask again after the {show_seconds(think_of(workload))} that these take"
