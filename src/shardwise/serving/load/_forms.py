"""The closed form of one deployment, from its case."""

from __future__ import annotations

from shardwise.arrays import np
from shardwise.serving._case import ServingCase
from shardwise.serving._policy import Policy
from shardwise.serving._sizes import sizes_of_columns
from shardwise.serving.load._batches import batches_of, most_running
from shardwise.serving.load._moments import LengthMoments
from shardwise.serving.load._prices import load_prices
from shardwise.serving.load._steady import Replicas


def replicas_of(
    case: ServingCase, policy: Policy, moments: LengthMoments, cache_tokens: float, at_once: bool = False
) -> Replicas:
    """Return the closed form of one case."""
    capacity, policy = np.array([float(cache_tokens)]), policy.of_answers(moments.steps)
    batches = batches_of([case.plan], case.model.has_experts, policy.one_batch)
    sizes = sizes_of_columns(case.model, [case.plan], [1], case.domains, case.job)
    most = most_running(policy, moments, capacity, batches.lanes)
    prices = load_prices(case, sizes, policy, moments, most, batches)
    return Replicas(
        prices=prices, policy=policy, moments=moments, cache_tokens=capacity, batches=batches, at_once=at_once
    )
