"""How a deployment takes its load: its pools, its schedulers' settings, and the limits that it should keep."""

from __future__ import annotations

from shardwise.plans import Limit, Plan
from shardwise.records import dataclass
from shardwise.serving._engine import Engine
from shardwise.serving._options import ServingOptions
from shardwise.serving.load._autoscale import Autoscale
from shardwise.serving.load._fleet import Router

FULLEST = 0.95
"""Requests a second over the capacity up to which a plan loads a replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """How a deployment takes its load, and the limits that it should keep."""

    limits: tuple[Limit, ...] = ()
    router: Router = "round-robin"
    prefill: Plan | None = None
    """The pool that computes prompts and sends their cache to that of the plan; None: one pool does both."""
    prefill_engine: Engine | str = ""
    """The engine of that pool, or its name; empty: that of the other."""
    async_scheduling: bool | None = None
    """Whether a step is scheduled while the one before it runs; None: as the engine's present release does."""
    balance_steps: int | None = None
    """Steps that prompts wait until every group of attention has one; None: as the engine does unless it is told."""
    receive_steps: int | None = None
    """Decode steps after which the scheduler looks for new requests, SGLang's --scheduler-recv-interval; None: one."""
    batch_wait: tuple[int, float] = (0, 0.0)
    """Decode steps that prompts wait at most until this share of a step's tokens is there, TensorRT-LLM's
    batch_wait_timeout_iters and batch_wait_max_tokens_ratio."""
    api_server_seconds: float | None = None
    """Seconds that an API server takes for a request, one after another, before the engine has it; None: as the
    engine's present release does, 0: requests reach the engine at once, as in a process of their own."""
    autoscale: Autoscale | None = None
    """When replicas are started and stopped; None: all of them run all the time."""
    risk: float = 0.0
    """The chance, by published runs, with which all limits are to be kept."""
    serving: ServingOptions = ServingOptions()
    settled: bool = False
    """Whether as many more requests are simulated as a deployment that starts empty takes to be as full as it will."""
    until_missed: bool = False
    """Whether the simulation of one pool may end once a limit is missed: what it says then is that alone."""
