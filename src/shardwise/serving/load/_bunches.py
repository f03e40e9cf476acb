"""How many requests begin together: prompts of a step, answers that end as they began, and who a full cache admits."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from shardwise.arrays import np
from shardwise.ledger.number import X, log2, maximum, minimum, raised
from shardwise.serving._policy import Policy
from shardwise.serving.load._moments import LengthMoments

_ROUNDS = 8
# Of a random walk of normal steps, in their standard deviations (Siegmund 1979): -zeta(1/2) / sqrt(2 pi).
_OVERSHOOT = 0.5826


def exponential(x: X) -> X:
    """Return e to any number."""
    return raised(math.e, x)


def bunched(ended: X, arrivals: X) -> X:
    """Return the mean of Poisson numbers of prompts that are, where there are any, as many as equal answers that end.

    Who came in a decode step, and in the prompts that followed on it, end in one step: no fewer steps have none.
    """
    size = mean = ended / (1 - exponential(-1 * arrivals))
    for _ in range(_ROUNDS):
        mean = size * (1 - exponential(-1 * mean))
    return mean


def poisson_of(some: X) -> X:
    """Return the mean of Poisson numbers that are, where they are not 0, so many in the mean (Newton's steps).

    >>> round(poisson_of(2 / (1 - math.exp(-2))), 9)
    2.0
    """
    some = maximum(some, 1 + 1e-6)
    mean = minimum(some, 2 * (some - 1))
    for _ in range(_ROUNDS):
        none = exponential(-1 * mean)
        mean = mean - (mean - some * (1 - none)) / (1 - some * none)
    return mean


@cache
def _walks() -> tuple[Any, Any]:
    """Return chances of `walk_above` by the mean of a step over its deviation."""
    means = np.arange(41) / 10
    # Of few deviations the sum is long: what it comes to (Siegmund 1979).
    near = [1 - math.sqrt(2) * mean * math.exp(-_OVERSHOOT * mean) for mean in means.tolist()[:5]]
    sums = [sum(math.erfc(mean * math.sqrt(k / 2)) / 2 / k for k in range(1, 200)) for mean in means.tolist()[5:]]
    return means, np.array([*near, *(-math.expm1(-one) for one in sums)])


def walk_above(mean: Any) -> Any:
    """Return how likely a queue is not empty that falls by so many deviations a step in the mean.

    The maximum of a walk of normal steps is 0 with exp(-sum Phi(-mean sqrt(n)) / n) (Spitzer 1956).

    >>> walk_above(np.array([0.0, 0.5, 1.0, 5.0])).round(3).tolist()
    [1.0, 0.471, 0.199, 0.0]
    """
    return np.interp(mean, *_walks())


def admitted_together(ended: X, moments: LengthMoments, policy: Policy) -> X:
    """Return the prompts that are admitted at once where the cache is full and has room promised to what runs.

    So many sequences end in a decode step. What they free, less what others take by their next tokens, adds up until
    the next prompt has room: a random walk of normal steps, over its last maximum by the mean (Siegmund 1979, Corrected
    diffusion approximations in certain random walk problems), or by what a single sequence frees beyond that.
    """
    claim_tokens = max(moments.freed_tokens - (1 - policy.reserved_share) * moments.output_tokens, 1.0)
    square = moments.freed_tokens**2 * (1 + moments.freed_cv2)
    spread = raised(2.0, log2(ended * square) / 2)
    drift = ended * claim_tokens / spread
    over = spread / math.sqrt(2) * exponential(_OVERSHOOT * minimum(drift, 1 / _OVERSHOOT))
    over = maximum(over, square / moments.freed_tokens / 2)
    return 1 / (1 - exponential(-1 * claim_tokens / over))


def begin_chance(counts: Any, moments: LengthMoments, policy: Policy, lanes: Any) -> tuple[Any, Any]:
    """Return how many sequences of so many end in a decode step, and how likely prompts take their places after it.

    Others wait. Fewer steps have prompts where the cache and not the engine says how many run: [layout, place].
    """
    ended = np.maximum(counts, 1e-3) / max(moments.steps, 1e-9)
    by_cache = counts[:, -1:] < np.ceil(policy.max_sequences / np.asarray(lanes))[:, None]
    fewer = ended / admitted_together(ended, moments, policy) if policy.reserved_share else np.inf
    chance = -np.expm1(-ended)
    return ended, np.where(by_cache, np.minimum(fewer, chance), chance)


def as_they_came(ended: X, added: X) -> X:
    """Return how many times the prompts of steps that have any, by chance, equal answers that end as they came have.

    So many end in a step in the mean; a prompt adds so many times a decode step.
    """
    size = bunched(ended, ended / (1 + ended * added))
    return size / (1 - exponential(-1 * size)) * (1 - exponential(-1 * ended)) / ended
