"""What a client takes between an answer and its next request, beside what its user thinks."""

from __future__ import annotations

from shardwise.plans import Workload
from shardwise.serving._policy import client_seconds
from shardwise.units import show_seconds


def think_of(workload: Workload) -> float:
    """Return the seconds from an answer to the user's next request in the engine.

    However few they are, the step behind the answer has begun by then: users whose answers end in one step, or in steps
    behind each other, are answered together again, in engines that mix prompts with decode steps too.
    """
    stated = workload.arrivals.think_seconds
    return client_seconds(workload.input_tokens.mean) if stated is None else stated


def client_note(workload: Workload) -> str:
    """Return what is assumed of clients."""
    server = "latencies are the server's: no network, no tokenizer of the client"
    if workload.arrivals.kind != "closed" or workload.arrivals.think_seconds is not None:
        return server
    return f"{server}; users ask again after the {show_seconds(think_of(workload))} that these take"
