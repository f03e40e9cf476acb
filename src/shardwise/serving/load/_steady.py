"""Replicas in steady state under Poisson arrivals, in closed form: what they carry, and mean latencies below that.

The sequences that decode are a processor-sharing queue whose speed depends on their number n (Kleinrock, Queueing
Systems vol. 2, 4.4): with lam requests a second, G decode steps a request and steps of S(n) seconds, the probability
of n grows by lam G S(n) / n. S holds the decode step d and the prompts of those who arrive in it, each D seconds, of
which more arrive: d / (1 - lam D). Prompts arrive in bunches, the number of whose members is that of a busy period
(Borel), which widens the distribution by 1 / (1 - lam D)^2. First tokens wait for the step under way, for prompts that
came before, and for a place among the sequences (an M/G/m queue). Held against the simulation in
tests/serving/test_steady.py. Formulas of one n are generic over numbers, so that `explain` opens them.
"""

from __future__ import annotations

import math
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Generic, cast

import numpy as np

from shardwise.ledger.number import X, above, log2, maximum, minimum, raised
from shardwise.records import dataclass
from shardwise.serving._case import ServingCase
from shardwise.serving._policy import Policy
from shardwise.serving._sizes import sizes_of_columns
from shardwise.serving.load._prices import PROMPTS, LoadPrices, groups_of, in_step, lanes_of, load_prices
from shardwise.serving.load._requests import LengthMoments

# Loads of prompts beyond this are taken as this: every mean below has 1 - load beneath it.
_FULL = 0.97
_ROUNDS = 6
# Answers are taken as equal from this overlap on (`LengthMoments.overlap`).
_EQUAL = 0.999


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoad(Generic[X]):
    """A replica while a number of sequences decode, at a rate of requests: seconds unless said otherwise."""

    rate: X
    decode: X
    """A decode step without prompts."""
    prompt: X
    """What a prompt adds, where as many share a step as arrive in one."""
    first_prompt: X
    """The same in the first step after a decode step, where prompts run in steps of their own."""
    own: X
    """What its own prompt adds for a request, without those of other groups of attention."""
    spread: X
    """Mean square of what a prompt adds over the square of its mean."""
    pieces: X
    together: X
    """Prompts that a step has room for."""

    @property
    def load(self) -> X:
        """Share of the time that prompts take."""
        return minimum(self.rate * self.prompt, _FULL)


def step_seconds(b: BatchLoad[X], policy: Policy) -> X:
    """Return seconds of a decode step with the prompts of those who arrive in it, and of those who arrive in theirs."""
    if policy.mixed:
        return b.decode / (1 - b.load)
    return b.decode + b.decode * (b.rate * b.first_prompt) / (1 - b.load)


def _batch_seconds(b: BatchLoad[X]) -> X:
    """Return the mean seconds of a step of prompts alone, as who arrives in one sees it."""
    return b.prompt * (1 + b.rate * b.decode * (1 - b.load)) / (1 - b.load * b.load)


def _backlogged(b: BatchLoad[X]) -> X:
    """Return seconds a prompt where every step is full of them."""
    return b.decode / b.together + b.own


def _own_batch(b: BatchLoad[X]) -> X:
    """Return the prompts that share a step of prompts alone, as one of them sees it."""
    arrived = b.rate * ((1 - b.load) * b.decode + b.load * _batch_seconds(b))
    return minimum(maximum(b.together, 1.0), 1 + arrived)


def exponential(x: X) -> X:
    """Return e to any number."""
    return raised(math.e, x)


def lingering_seconds(b: BatchLoad[X], moments: LengthMoments, policy: Policy) -> X:
    """Return seconds by which prompts delay a request beyond their mean share of its steps.

    Who has just got a first token came with others, whose prompts are still to run: the prompts left then, less those
    that are left at the end of a decode step.
    """
    if not policy.mixed:
        behind = b.rate * b.prompt * b.own * b.spread / (2 * (1 - b.load)) + b.decode / 2
        own = _own_batch(b)
        arrived = 1 + b.rate * ((1 - b.load) * b.decode + b.load * _batch_seconds(b))
        left = b.load * (own * b.prompt + (1 - own / arrived) * behind)
        return maximum((left - b.load * b.decode) / (1 - b.load), -0.9 * moments.steps * b.decode)
    joint = b.prompt * b.load / ((1 - b.load) * (1 - b.load) * (1 + b.load))
    each = _backlogged(b)
    busy = minimum(b.rate * each, _FULL)
    queue = busy * each * moments.new_cv2 / (2 * (1 - busy))
    # Ends of steps see less than a moment in time does: steps with prompts are longer.
    steps = busy / each / b.together
    seen = (b.rate * b.prompt * queue + busy * b.prompt * moments.new_cv2 / 2) * (
        steps / (steps + (1 - busy) / b.decode) / busy
    )
    left = maximum(b.rate * b.prompt * (queue + each) - seen, 0.0) / (1 - b.load)
    # A queue that outlasts a request delays it no more than others.
    lasting = moments.steps * b.decode / (1 - b.load)
    left = left * lasting / (lasting + each * moments.new_cv2 / ((1 - busy) * (1 - busy)))
    arriving = maximum(b.rate * (b.decode / (1 - b.load) + b.prompt * b.load / (1 - b.load * b.load)), 0.1)
    single = exponential((1 - maximum(b.together, 1.0)) / arriving)
    return single * left + (1 - single) * joint


def first_token_seconds(b: BatchLoad[X], moments: LengthMoments, policy: Policy) -> X:
    """Return mean seconds from arrival to the first token where a sequence has a place at once."""
    if not policy.mixed:
        # M/G/1 with vacations (Doshi 1986): the decode step, those ahead, and those of the same step.
        ahead = b.rate * b.prompt * b.own * b.spread / (2 * (1 - b.load))
        return ahead + b.decode * policy.receive_steps / 2 + b.own + b.own * (_own_batch(b) - 1) / 2
    usual, each = step_seconds(b, policy), _backlogged(b)
    busy, many = minimum(b.rate * each, _FULL), maximum(b.together, 1.0)
    prompts = b.own * many
    share = minimum(b.rate * usual / many, 0.99)
    gated = b.rate * usual * b.prompt * b.own * b.spread / (1 - b.load * b.load)
    variance = minimum(gated, prompts * prompts * share * (1 - share))
    present = usual + variance / usual
    mates = b.own * minimum(b.rate * present, many - 1)
    # Requests left over by full steps: M/D/m (Sakasegawa 1977), half of M/M/m, wider with the spread of lengths.
    left = raised(2.0, raised(2.0, log2(2 * (many + 1)) / 2) * log2(busy)) / (1 - busy) * moments.new_cv2 / 2
    whole = present / 2 + b.decode + b.own + mates + left * each
    cut = (1 - busy) * b.decode / 2 + b.decode * b.pieces + b.own
    cut = cut + busy * each * moments.new_cv2 / (2 * (1 - busy))
    found = above(b.together, 1, whole, cut)
    return found + usual if policy.async_scheduling else found


def slot_factor(busy: X, slots: X, cv2: float) -> X:
    """Return the wait for one of m servers over that of M/M/m, for service times of a squared cv.

    Cosmetatos 1975 for constant times, Bjorklund and Elldin 1964 between.
    """
    slots_4 = raised(2.0, log2(4 + 5 * slots) / 2) - 2
    constant = 0.5 * (1 + maximum(1 - busy, 0.0) * (slots - 1) * slots_4 / (16 * busy * slots))
    share = min(cv2, 1.0)
    return share * max(cv2, 1.0) + (1 - share) * constant


@dataclass(frozen=True, kw_only=True, slots=True)
class Steady(Generic[X]):
    """Means of a replica at so many requests a second; columns where there are many layouts.

    Seconds are infinite where the load is not carried.
    """

    capacity: X
    """Requests a second that are carried at most."""
    rate: X
    running: X
    ttft_seconds: X
    tpot_seconds: X
    e2e_seconds: X
    waiting_seconds: X
    """Seconds of the TTFT for a place among the sequences or in the cache."""

    @property
    def stable(self) -> bool:
        """Whether the load is carried; a column where there are many layouts."""
        return cast(bool, cast(Any, self.rate) < self.capacity)

    @property
    def utilisation(self) -> X:
        """Load over capacity."""
        return self.rate / self.capacity

    def row(self: Steady[Any], index: int) -> Steady[float]:
        """Return one layout, as plain numbers."""
        return Steady(**{f.name: float(getattr(self, f.name)[index]) for f in fields(self)})


def most_running(policy: Policy, moments: LengthMoments, cache_tokens: Any, lanes: Any = 1.0) -> Any:
    """Return sequences of a batch that run at once at most: as many as the engine takes and the cache holds on average.

    Batches that are in flight at once share both.
    """
    held = np.floor(np.asarray(cache_tokens, float) / lanes / moments.held_tokens)
    return np.maximum(np.minimum(np.ceil(policy.max_sequences / lanes), held), 1.0)


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The closed form of one replica of each layout: `at` gives its means at a rate.

    A replica of several pipeline stages runs as many batches (`lanes`), each of which is a queue of its own.
    """

    prices: LoadPrices
    policy: Policy
    moments: LengthMoments
    cache_tokens: Any
    lanes: Any = 1.0
    groups: Any = 1.0
    """Groups of attention that step together, of one of which all else is."""

    @cached_property
    def _together(self) -> Any:
        """Groups of each layout as a column, None where all have one."""
        groups = np.asarray(self.groups, float).reshape(-1, 1)
        return groups if (groups > 1).any() else None

    def _slowest(self, arrivals: Any) -> Any:
        """Return what a prompt adds to the steps of its group, where the group with most prompts decides of each.

        Prompts of a step are Poisson in every group: the most of G are at most k with the chance of one to the power of
        G. Experts take the tokens of all groups.
        """
        if self._together is None:
            return self._shared(arrivals)
        p, mean = self.prices, np.maximum(arrivals, 1e-9)
        chance = np.exp(-mean)
        below, before, whole = chance, chance**self._together, 0.0
        for k in range(PROMPTS):
            chance = chance * mean / (k + 1)
            below = np.minimum(below + chance, 1.0)
            most = below**self._together
            whole, before = whole + (most - before) * (p.added[k] - p.experts[k]), most
        beyond = (1 - before) * np.maximum(mean, PROMPTS) / PROMPTS
        return (whole + beyond * (p.added[-1] - p.experts[-1])) / mean + p.experts[0]

    def _shared(self, arrivals: Any) -> Any:
        """Return what a prompt adds where those of a step are Poisson with a mean."""
        mean = np.maximum(arrivals, 1e-9)
        chance, whole, seen = np.exp(-mean), 0.0, 0.0
        for k in range(1, PROMPTS + 1):
            chance = chance * mean / k
            whole, seen = whole + chance * self.prices.added[k - 1], seen + k * chance
        beyond = np.maximum(mean - seen, 0.0) / PROMPTS
        return (whole + beyond * self.prices.added[-1]) / mean

    @cached_property
    def _rates(self) -> Any:
        """Requests a second that end while so many sequences run and others wait.

        Equal answers end together as they began, so that a step stays as full of prompts as the first one was.
        """
        p, steps = self.prices, max(self.moments.steps, 1e-9)
        ended = p.counts / max(steps, 1.0)
        if self.moments.overlap > _EQUAL:
            ended = np.maximum(ended, np.minimum(p.together, p.counts))
        return p.counts / (steps * p.decode + p.counts * self._slowest(ended))

    @cached_property
    def capacity(self) -> Any:
        """Requests a second that a replica with a full queue is served at."""
        return self._rates[:, -1] * self.lanes

    @cached_property
    def _weights(self) -> Any:
        """How many numbers of sequences each place stands for (trapezoids), 0 where a place repeats."""
        n = self.prices.counts
        gaps = np.diff(n, axis=-1)
        zero = np.zeros_like(n[:, :1])
        below, over = np.concatenate([zero + 1, gaps], axis=1), np.concatenate([gaps, zero + 1], axis=1)
        return (below + over) / 2 * (below > 0)

    def loads(self, rate: Any) -> BatchLoad[Any]:
        """Return a replica at every number of sequences, at requests a second of each layout."""
        p, policy = self.prices, self.policy
        rate = np.broadcast_to(np.asarray(rate, float), p.counts.shape[:1])[:, None]
        arrivals = rate * p.decode
        first = self._slowest(arrivals)
        for _ in range(_ROUNDS):
            prompt = self._slowest(arrivals)
            load = np.minimum(rate * prompt, _FULL)
            more = prompt * arrivals / -np.expm1(-np.maximum(arrivals, 1e-12))
            arrivals = rate * (p.decode / (1 - load) if policy.mixed else more)
        return BatchLoad(
            rate=rate, decode=p.decode, prompt=prompt, first_prompt=prompt if policy.mixed else first,
            own=prompt if self._together is None else self._shared(arrivals),
            spread=p.spread, pieces=p.pieces, together=p.together,
        )  # fmt: skip

    def _likely(self, ratio: Any, width: Any, tail: Any) -> tuple[Any, Any]:
        """Return how likely each place is, and all that is beyond the last, up to a common factor.

        `ratio` is that of n sequences to n - 1, of a distribution `width` times as wide.
        """
        # log p(n) at the places: the sum of logs of the ratios between, by trapezoids.
        logs = np.log(ratio) / width
        logs[:, -1] = np.minimum(logs[:, -1], 1.0)
        gaps = np.diff(self.prices.counts, axis=-1)
        # Between places a and b lie the ratios of a + 1 ... b: trapezoids from a to b, shifted by half a sequence.
        rise = gaps * (logs[:, 1:] + logs[:, :-1]) / 2 + (logs[:, 1:] - logs[:, :-1]) / 2 * (gaps > 0)
        total = np.concatenate([logs[:, :1], logs[:, :1] + np.cumsum(rise, axis=-1)], axis=1)
        likely = np.exp(total - total.max(axis=-1, keepdims=True))
        return likely, likely[:, -1] * tail / (1 - tail)

    def at(self, rate: Any) -> Steady[Any]:
        """Return the means at so many requests a second of each layout."""
        with np.errstate(all="ignore"):
            asked = np.maximum(np.broadcast_to(np.asarray(rate, float), self.capacity.shape), 1e-9)
            lane = self._at(asked / self.lanes)
        return replace(lane, capacity=self.capacity, rate=asked, running=lane.running * self.lanes)

    def _at(self, rate: Any) -> Steady[Any]:
        p, moments, policy = self.prices, self.moments, self.policy
        most_served = self._rates[:, -1]
        n, steps = p.counts, max(moments.steps, 1e-9)
        b = self.loads(rate)
        lingering = lingering_seconds(b, moments, policy)
        seconds = step_seconds(b, policy) + lingering / steps
        # Bunches widen the distribution, the less the more outputs differ (M^X/G/infinity).
        width = 1 + (1 / (1 - b.load) ** 2 - 1) * moments.overlap
        tail = np.minimum(rate / most_served, 0.999)
        ratio = rate[:, None] * steps * seconds / n
        likely, beyond = self._likely(ratio, width, tail)
        weighted, most = likely * self._weights, n[:, -1]
        ended = (weighted * n / seconds).sum(axis=-1) + beyond * most / seconds[:, -1]
        held = (weighted * n).sum(axis=-1) + beyond * most
        tpot = held / ended
        scale = np.minimum(rate * steps / ended, 1 / (weighted.sum(axis=-1) + beyond))
        chance, past = scale[:, None] * weighted, scale * beyond
        empty = np.maximum(1 - chance.sum(axis=-1) - past, 0.0)
        # Prompts that run hold places too, in a stage of their own before the decode steps.
        own = b.own + (b.decode * b.pieces if policy.mixed else 0.0)
        placed = ratio + rate[:, None] * own / n
        bunches = (weighted / (1 - b.load)).sum(axis=-1) / weighted.sum(axis=-1)
        waiting = self._waiting(rate, (placed, width, tail), scale * (weighted.sum(axis=-1) + beyond), bunches)
        first = first_token_seconds(b, moments, policy)
        alone = b.own[:, 0] + b.rate[:, 0] * b.prompt[:, 0] * b.own[:, 0] * b.spread[:, 0] / (2 * (1 - b.load[:, 0]))
        ttft = (chance * first).sum(axis=-1) + past * first[:, -1] + empty * alone + waiting
        # Seconds a token as requests have it: short answers linger as long as others.
        more = (weighted * n * lingering / seconds).sum(axis=-1) / (weighted * n).sum(axis=-1) * tpot
        per_token = tpot + more * (moments.inverse_steps - 1 / steps)
        stable = rate < most_served
        found = {
            "running": (chance * n).sum(axis=-1) + past * most,
            "ttft_seconds": ttft,
            "tpot_seconds": per_token / moments.made if moments.steps else 0.0 * per_token,
            "e2e_seconds": ttft + moments.steps * tpot,
            "waiting_seconds": waiting,
        }
        return Steady(capacity=most_served, rate=rate, **{k: np.where(stable, v, math.inf) for k, v in found.items()})

    def _waiting(self, rate: Any, shape: tuple[Any, Any, Any], whole: Any, bunches: Any) -> Any:
        """Return mean seconds of a wait for a place among the sequences, of requests that come in bunches.

        Allen and Cunneen 1978: half the squared cv of arrivals, which is that of the bunches, adds to half of service.
        """
        ratio, width, tail = shape
        most = self.prices.counts[:, -1]
        # A cache is full by what requests hold, whose spread adds to that of their number.
        held = np.asarray(self.cache_tokens, float) / self.moments.held_tokens < self.policy.max_sequences
        likely, beyond = self._likely(ratio, width + (held * self.moments.held_cv2)[:, None], tail)
        chance = whole * likely[:, -1] / ((likely * self._weights).sum(axis=-1) + beyond)
        factor = slot_factor(tail, most, self.moments.output_cv2) + (bunches - 1) / 2
        return chance * tail / (1 - tail) ** 2 * factor * self._pooled / rate

    @property
    def _pooled(self) -> Any:
        """The wait for a place over that of a group alone: of all places together, or of Erlang arrivals (in turns)."""
        cv2 = self.moments.output_cv2 if self.policy.balances == "turns" else 0.0
        return (1 / np.asarray(self.groups, float) + cv2) / (1 + cv2)


def chained(prefill: Steady[Any], decode: Steady[Any], sent_seconds: Any, share: Any, form: Replicas) -> Steady[Any]:
    """Return pools one after the other, as of a group that decodes, for each of which so many compute prompts.

    Departures of a pool are taken as Poisson again. A cache that has come waits for the end of a step, and runs one of
    its own where the pool that decodes makes the first token.
    """
    policy, made = form.policy, form.moments.made
    steps = 0.5 + bool(policy.recomputed_tokens) * (1.0 + policy.async_scheduling)
    joining = decode.waiting_seconds + steps * decode.tpot_seconds * made
    ttft = prefill.ttft_seconds + sent_seconds + joining
    return replace(
        decode,
        capacity=np.minimum(prefill.capacity * share, decode.capacity),
        ttft_seconds=ttft,
        e2e_seconds=ttft + decode.e2e_seconds - decode.ttft_seconds,
        waiting_seconds=prefill.waiting_seconds + decode.waiting_seconds,
    )


def replicas_of(case: ServingCase, policy: Policy, moments: LengthMoments, cache_tokens: float) -> Replicas:
    """Return the closed form of one case."""
    held, lanes = np.array([float(cache_tokens)]), np.array([float(lanes_of(case.plan))])
    sizes = sizes_of_columns(case.model, [case.plan], [1], case.domains, case.job)
    groups = np.array([float(groups_of(case.plan, case.model.has_experts))])
    prices = load_prices(case, sizes, policy, moments, most_running(policy, moments, held, lanes))
    prices = in_step(prices, policy, moments, groups)
    return Replicas(prices=prices, policy=policy, moments=moments, cache_tokens=held, lanes=lanes, groups=groups)
