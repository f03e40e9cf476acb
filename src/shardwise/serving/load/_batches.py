"""Batches that a layout has under way: groups of attention, or one a pipeline stage, and how uneven they are.

Engines share out requests evenly: K prompts that arrive in a cycle are in min(K, B) of B batches, at most ceil(K / B)
in one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.serving._policy import Policy
from shardwise.serving.load._moments import LengthMoments

# The expected most of normal values, in standard deviations, by doublings of their number (Tippett 1925).
_MOST_OF = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594)
# How far the fullest of many batches is above their mean where each request goes to that with the fewest, simulated
# with exponential to equal answers: 0.67 to 0.75 of 8 and 16 batches, 0.42 to 0.50 of 2.
_FEWEST = 0.8


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How many batches each layout has under way: groups of attention, or one a pipeline stage; columns."""

    groups: Any
    lanes: Any

    @property
    def many(self) -> Any:
        """Batches of a layout: [layout, 1]."""
        return (self.groups * self.lanes)[:, None]

    @property
    def piped(self) -> Any:
        """Whether they follow each other through stages: [layout, 1]."""
        return (self.lanes > 1)[:, None]

    @property
    def any(self) -> bool:
        """Whether any layout has several."""
        return bool((self.many > 1).any())


def batches_of(plans: Sequence[Plan], has_experts: bool) -> Batches:
    """Return the batches of layouts.

    >>> batches_of([Plan(pp=4), Plan(tp=2, ep=8)], True)
    Batches(groups=array([1., 4.]), lanes=array([4., 1.]))
    """
    groups = np.array([float(groups_of(plan, has_experts)) for plan in plans])
    return Batches(groups=groups, lanes=np.array([float(lanes_of(plan)) for plan in plans]))


def groups_of(plan: Plan, has_experts: bool) -> int:
    """Return the groups of attention data parallelism that share the experts of a replica."""
    return max(plan.ep * plan.etp // plan.tp, 1) if has_experts else 1


def lanes_of(plan: Plan) -> int:
    """Return the batches that a replica has in flight: one a pipeline stage; one where attention groups step together.

    github.com/vllm-project/vllm vllm/v1/engine/core.py, batch_queue of as many as pipeline stages.
    """
    return plan.pp if plan.ep * plan.etp <= plan.tp else 1


def most_running(policy: Policy, moments: LengthMoments, cache_tokens: Any, lanes: Any = 1.0) -> Any:
    """Return sequences of a batch that run at once at most: as many as the engine takes and the cache holds on average.

    Batches that are in flight at once share both.
    """
    most = np.floor((np.asarray(cache_tokens, float) / lanes - moments.shared_tokens) / moments.held_tokens)
    return np.maximum(np.minimum(np.ceil(policy.max_sequences / lanes), most), 1.0)


def fullest(mean: Any, batches: Any, moments: LengthMoments, policy: Policy) -> Any:
    """Return the sequences of the fullest of so many batches; in turns they spread as far as answers differ."""
    apart = 1 - 1 / batches
    if policy.balances != "turns":
        return np.maximum(mean + _FEWEST * apart, 1.0)
    return np.maximum(mean + apart / 2 + _most_of(batches) * np.sqrt(mean * apart * (1 - moments.overlap)), 1.0)


def _most_of(batches: Any) -> Any:
    return np.interp(np.log2(batches), range(len(_MOST_OF)), _MOST_OF)


def crowded(prompts: float, batches: Batches, policy: Policy, apart: Any = 0.0) -> tuple[Any, Any]:
    """Return the prompts of the batch with most of them, and how many batches have any: [layout, 1].

    In turns each of B takes every B-th; others take more where they have fewer sequences, `_FEWEST` of which they are
    apart. Where prompts take the places of sequences that ended apart from each other they are in any batch.
    """
    many = batches.many
    even = np.ceil(prompts / many)
    if policy.balances != "turns":
        even = np.where(batches.piped, even, np.maximum(prompts / many + _FEWEST * (1 - 1 / many), 1.0))
    share, other = prompts / many, 1 - 1 / many
    random = np.maximum(share + other / 2 + _most_of(many) * np.sqrt(share * other), 1.0)
    some = many * (1 - other**prompts)
    return even + apart * (random - even), np.minimum(prompts, many) * (1 - apart) + apart * some
