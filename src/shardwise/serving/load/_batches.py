"""Batches that a layout has under way: groups of attention, and one a pipeline stage of each; how uneven they are.

Engines share out requests evenly: K prompts that arrive in a cycle are in min(K, B) of B batches, at most ceil(K / B)
in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from shardwise.arrays import np
from shardwise.plans import Plan
from shardwise.records import dataclass
from shardwise.serving._policy import Policy
from shardwise.serving.load._moments import LengthMoments

# The expected most of normal values, in standard deviations, by doublings of their number (Tippett 1925).
_MOST_OF = (0.0, 0.564, 1.029, 1.424, 1.766, 2.070, 2.344, 2.594)
# How far the fullest of many batches is above their mean where each request goes to that with the fewest, simulated
# with exponential to equal answers: 0.67 to 0.75 of 8 and 16 batches, 0.42 to 0.50 of 2.
_FEWEST = 0.8
# Answers are taken as equal from this overlap on (`LengthMoments.overlap`).
EQUAL = 0.999


@dataclass(frozen=True, kw_only=True)
class Batches:
    """How many batches each layout has under way: groups of attention, each with one a pipeline stage; columns."""

    groups: Any
    lanes: Any

    @property
    def many(self) -> Any:
        """Batches that go round together: groups, or one a pipeline stage, each of all groups: [layout, 1]."""
        return np.where(self.piped, self.lanes[:, None], self.groups[:, None])

    @property
    def groups_each(self) -> Any:
        """Groups that make up each of these batches and step together in it: [layout, 1]."""
        return np.where(self.piped, self.groups[:, None], 1.0)

    @property
    def every(self) -> Any:
        """Batches of a layout, those of each group apart: [layout, 1]."""
        return (self.groups * self.lanes)[:, None]

    @property
    def piped(self) -> Any:
        """Whether they follow each other through stages: [layout, 1]."""
        return (self.lanes > 1)[:, None]

    def one_list(self, policy: Policy) -> Any:
        """Return the batches of a pipeline for whose places all requests wait in one list: [layout]."""
        return self.lanes if policy.shared_waiting else 1.0 + 0 * self.lanes

    @property
    def any(self) -> bool:
        """Whether any layout has several."""
        return bool((self.many > 1).any())


def batches_of(plans: Sequence[Plan], has_experts: bool, one_batch: bool = False) -> Batches:
    """Return the batches of layouts.

    >>> batches_of([Plan(pp=4), Plan(tp=2, ep=8)], True)
    Batches(groups=array([1., 4.]), lanes=array([4., 1.]))
    """
    groups = np.array([float(groups_of(plan, has_experts)) for plan in plans])
    return Batches(groups=groups, lanes=np.array([float(lanes_of(plan, one_batch)) for plan in plans]))


def groups_of(plan: Plan, has_experts: bool) -> int:
    """Return the groups of attention data parallelism that share the experts of a replica."""
    return max(plan.ep * plan.etp // plan.tp, 1) if has_experts else 1


def workers_of(plan: Plan) -> int:
    """Return the workers of a pool for prompts, each of as many groups of attention as share its experts.

    >>> workers_of(Plan(tp=1, ep=4, dp=8)), workers_of(Plan(tp=8, dp=2))
    (2, 2)
    """
    return plan.dp // groups_of(plan, True)


def lanes_of(plan: Plan, one_batch: bool = False) -> int:
    """Return the batches that a replica has in flight, of each of its groups of attention: one a pipeline stage.

    github.com/vllm-project/vllm vllm/v1/engine/core.py, batch_queue of as many as pipeline stages. A server of
    llama.cpp has `one_batch`: it samples before it decodes again (tools/server/server-context.cpp, update_slots).
    """
    return 1 if one_batch else plan.pp


def most_running(policy: Policy, moments: LengthMoments, cache_tokens: Any, lanes: Any = 1.0) -> Any:
    """Return sequences of a batch that run at once at most: as many as the engine takes and the cache holds on average.

    Batches that are in flight at once share both.
    """
    most = np.floor((np.asarray(cache_tokens, float) / lanes - moments.shared_tokens) / moments.held_tokens)
    return np.maximum(np.minimum(np.ceil(policy.max_sequences / lanes), most), 1.0)


def fullest(mean: Any, batches: Batches, moments: LengthMoments, policy: Policy, pace: tuple[Any, Any, Any]) -> Any:
    """Return the sequences of the fullest of some batches; in turns they spread as far as answers differ.

    Batches that take from one waiting list as it is their turn have Poisson numbers of those who come. Where one finds
    those who came during its own step it has more of them the longer that is: where a step grows by a share (the first
    of `pace`) of what its sequences do, numbers are 1 / (1 - growth) times as far spread. Where a batch is made ahead
    they came during the step of another. Of few some batches have none (`batches_going`, by the second of `pace`).
    """
    many, every = batches.many, batches.every
    apart = 1 - 1 / every
    if policy.balances != "turns":
        even = np.maximum(mean + _FEWEST * apart, 1.0)
    else:
        even = np.maximum(mean + apart / 2 + _most_of(every) * np.sqrt(mean * apart * (1 - moments.overlap)), 1.0)
    if not policy.shared_waiting:
        return even
    growth, host, short = 0.0 if policy.batches_ahead else pace[0], pace[1], pace[2]
    spread = mean + _most_of(every) * np.sqrt(mean * apart / np.maximum(1 - growth, 0.1))
    going = batches_going(mean * short * batches.groups_each, batches, policy, host)
    if not policy.batches_ahead:  # the mean of what each of those has, each of the others being one so often
        often = np.maximum((going - 1) / np.maximum(many - 1, 1.0), 1e-9)
        going = many * often / (1 - (1 - often) ** many)
    most = mean * many / going
    full = np.maximum(np.minimum(spread, mean * many), most)
    return np.where(batches.piped, np.maximum(full, 1.0), even)


def batches_going(mean: Any, batches: Batches, policy: Policy, host: Any) -> Any:
    """Return how many batches of a pipeline run anything while any does, of so many sequences each in the mean.

    Where one is made ahead of those in the stages, who comes goes to the next, whether or not it runs anything. Else to
    the one that has ended: to one that has none only while the host launches another's step, `host` of its seconds. It
    goes on as long as a busy period of so many in the mean (M/G/infinity): exp(mean) - 1 gaps between its arrivals.
    """
    lanes = batches.lanes[:, None]
    if policy.batches_ahead:
        return lanes * np.expm1(-mean) / np.minimum(np.expm1(-lanes * mean), -1e-12)
    busy = np.expm1(np.minimum(mean, 50.0)) * lanes * host
    return 1 + (lanes - 1) * busy / (1 + busy)


def _most_of(batches: Any) -> Any:
    return np.interp(np.log2(batches), range(len(_MOST_OF)), _MOST_OF)


def crowded(prompts: int, batches: Batches, policy: Policy, apart: float | None) -> tuple[Any, Any]:
    """Return the prompts of the batch with most of them, and how many batches have any: [layout, 1].

    Those that arrive (`apart` None) go to one batch after another, where these are alike (`piled` has the others).
    From a queue B batches take every B-th in turns; else more where they have fewer sequences, `_FEWEST` of which they
    are apart, as do prompts that are held. Where they take the places of sequences that ended apart from each other
    they are in any batch.
    """
    many = batches.many
    even = np.ceil(prompts / many)
    if policy.balances != "turns" and not (apart is None and piles_up(policy, batches)):
        even = np.where(batches.piped, even, np.maximum(prompts / many + _FEWEST * (1 - 1 / many), 1.0))
    if not apart:
        return even, np.minimum(prompts, many)
    random, some = _in_any(prompts, many)
    return even + apart * (random - even), np.minimum(prompts, many) * (1 - apart) + apart * some


def after_hold(prompts: int, batches: Batches, all_have: bool) -> tuple[Any, Any]:
    """Return the same where prompts were held: each went where a sequence had ended, to any batch.

    Until every batch has one it is one of the ways in which each has, where there are as many prompts.
    """
    many = batches.many
    most, some = _in_any(prompts, many)
    for row, count in enumerate(many[:, 0]):
        if all_have and count <= prompts:
            most[row], some[row] = most_of_any(prompts, int(count), 1), count
    even = np.ceil(prompts / many)
    return np.where(batches.piped, even, most), np.where(batches.piped, np.minimum(prompts, many), some)


def _in_any(prompts: int, many: Any) -> tuple[Any, Any]:
    """Return the same where each prompt is in any batch."""
    most = np.array([[most_of_any(prompts, int(some))] for some in many[:, 0]])
    return most, many * (1 - (1 - 1 / many) ** prompts)


def piles_up(policy: Policy, batches: Batches) -> bool:
    """Return whether prompts pile up in some groups; where they are held until all have one they do not."""
    return policy.balances != "turns" and not policy.balance_steps and bool((batches.groups > 1).any())


def piled(prompts: int, batches: Batches, policy: Policy) -> tuple[Any, Any]:
    """Return the same where sequences have ended in some batches, or prompts wait in some: [layout, 1].

    Where requests go to the batch with the fewest sequences, they go where those ended: to any. Where one that waits
    counts as several, prompts of one cycle fill up those before (`unevenness`).
    """
    many = batches.many
    if policy.balances == "loads":
        return _in_any(prompts, many)
    share = prompts / many
    return np.maximum(share + _most_of(many) * unevenness(share), 1.0), np.minimum(prompts, many)


def piled_chance(prompts: int, means: Any, batches: Batches, policy: Policy) -> Any:
    """Return how likely cycles with so many prompts are as `piled` says: [mean, layout].

    Where one that waits counts as several only who does not find a batch where none waits piles up, and batches are as
    uneven as the mean of all cycles makes them: by so much more or less than prompts of this one.
    """
    if policy.balances != "queues":
        return np.ones((len(means), len(batches.many)))
    many = batches.many[:, 0]
    return waiting_chance(prompts, means, batches) * unevenness(means[:, None] / many) / unevenness(prompts / many)


def unevenness(share: Any) -> Any:
    """Return the deviation of the prompts that a batch runs in a cycle, `share` of them in the mean.

    A request goes where w waiting and r running sequences, w + r / 4, are fewest (`policies.toml`). Let y be prompts
    of a cycle and u a quarter of the running sequences, each less the mean of all batches. Those that come next level
    y' + y + u but for rounding (variance 1 / 12), and u' = u + (y - ended) / 4 with Poisson numbers that ended. The
    variance of y that these two equations keep is (8 / 3 + share) / 7. Of few prompts a batch has one or none, of
    variance share (1 - share); between half a prompt and one lies a line.
    """
    few = np.minimum(share, 0.5)
    alone, many = np.sqrt(few * (1 - few)), np.sqrt((8 / 3 + share) / 7)
    return alone + np.clip(2 * share - 1, 0.0, 1.0) * (many - alone)


def waiting_chance(prompts: int, means: Any, batches: Batches) -> Any:
    """Return how likely so many prompts do not each find a batch where none waits: [mean, layout].

    Those of the cycle before wait, so many in the mean.
    """
    left = batches.many[:, 0] - (prompts - 1) % batches.many[:, 0] - 1
    chance = fewer = np.exp(-means[:, None]) + 0.0 * left
    for k in range(1, int(np.max(left)) + 1):
        chance = chance * means[:, None] / k
        fewer = fewer + np.where(k <= left, chance, 0.0)
    return np.clip(1 - fewer, 0.0, 1.0)


def ending_chance(counts: Any, batches: Batches, moments: LengthMoments) -> Any:
    """Return how likely a sequence has ended in a cycle, after which batches have unlike numbers: [layout, place].

    Of equal answers those end together that came together: half of them where they were even.
    """
    chance = -np.expm1(-counts * batches.many / max(moments.steps, 1e-9))
    return chance / 2 if moments.overlap > EQUAL else chance


@cache
def most_of_any(prompts: int, batches: int, least: int = 0) -> float:
    """Return the mean of the most of so many prompts that fall in one of some batches, each in any.

    Of all ways in which each batch has so many at least.

    >>> round(most_of_any(2, 2), 6), round(most_of_any(3, 2), 6), round(most_of_any(4, 2, 1), 6)
    (1.5, 2.25, 2.571429)
    """
    terms = [math.exp(-math.lgamma(i + 1) - i * math.log(batches)) * (i >= least) for i in range(prompts + 1)]
    whole = math.exp(-math.lgamma(prompts + 1)) if not least else _ways(terms, batches, prompts)
    mean = 1.0
    for most in range(1, prompts):
        fewer = _ways(terms[: most + 1], batches, prompts) / whole
        mean += 1 - fewer
        if fewer > 1 - 1e-6:
            break
    return mean


def _ways(terms: list[float], batches: int, prompts: int) -> float:
    """Return the coefficient of x^prompts of a polynomial to the power of batches."""
    # Numbers of balls in boxes have the generating function (sum of x^i / i!)^B, here up to the most.
    power, base, left = np.ones(1), np.array(terms), batches
    while left:
        if left % 2:
            power = np.convolve(power, base)[: prompts + 1]
        base, left = np.convolve(base, base)[: prompts + 1], left // 2
    return float(power[prompts]) if len(power) > prompts else 0.0
