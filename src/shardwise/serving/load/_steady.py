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
from dataclasses import fields
from functools import cached_property
from typing import Any

from shardwise.arrays import np
from shardwise.ledger.opened import called
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._batch_times import (
    FULL,
    BatchLoad,
    BatchTimes,
    as_many_as_end,
    first_token,
    followed,
    lingering_of,
    mean_of,
    prompt_seconds,
    run_ends,
    served_cv2,
    slot_factor,
)
from shardwise.serving.load._batches import EQUAL, Batches
from shardwise.serving.load._bulk import gathered, prompts_alone
from shardwise.serving.load._bunches import as_they_came, begin_chance, bunched, poisson_of
from shardwise.serving.load._clocks import added_by, at_rate, share_when_full, when_full
from shardwise.serving.load._held_cycles import held_back
from shardwise.serving.load._idle import first_token_alone
from shardwise.serving.load._layouts import merged, parts_of, some_of
from shardwise.serving.load._longest import PROMPTS
from shardwise.serving.load._means import Steady
from shardwise.serving.load._moments import LengthMoments
from shardwise.serving.load._prices import LoadPrices
from shardwise.serving.load._why import MATES, OWN_DECODE, OWN_PROMPT, WAITS
from shardwise.serving.load._why import PROMPTS as OTHER_PROMPTS

_ROUNDS = 6


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """The closed form of one replica of each layout: `at` gives its means at a rate.

    Seconds are of each of its batches: groups of attention, those in flight through pipeline stages, or both.
    """

    prices: LoadPrices
    policy: Policy
    moments: LengthMoments
    cache_tokens: Any
    batches: Batches
    at_once: bool = False
    """All requests come at once, so that equal ones go on together for as long as there are any."""

    def _added(self, arrivals: Any) -> Any:
        """Return what a prompt adds to a step in which so many arrive on average; of several batches, to a cycle."""
        return added_by(self.prices.added, self.prices.ahead, arrivals)

    @cached_property
    def highest(self) -> Replicas | None:
        """The same with prompts at the highest clock, where that is known."""
        return None if self.prices.highest is None else replace(self, prices=self.prices.highest)

    @cached_property
    def full_share(self) -> Any:
        """Share of prompts' seconds at the highest clock, of a full queue: [layout]."""
        return share_when_full(self, np.asarray(self.lasting_seconds, float)[:, -1])

    @cached_property
    def lasting_seconds(self) -> Any:
        """Seconds for each request that ends while so many sequences run and others wait; with more of them no more.

        With prompts at the clock that these prices are of.
        """
        return self._seconds_of(self.moments.overlap > EQUAL)

    @cached_property
    def _seconds(self) -> Any:
        """The same with prompts at the clock that a full queue leaves them."""
        return when_full(self, lambda form: form.lasting_seconds)

    def _seconds_of(self, equal: bool) -> Any:
        """Return them where answers are equal and end as they began, together, or at any time."""
        p, steps = self.prices, max(self.moments.steps, 1e-9)
        # No more end in a step than begin in one, of prompts that are cut less than one.
        bunch = ended = np.minimum(p.counts / steps, p.together if self.policy.mixed else np.inf)
        for _ in range(_ROUNDS if equal and not self.policy.mixed else 0):
            bunch = bunched(ended, ended / (1 + ended * np.asarray(self._added(bunch)) / p.decode))
        if equal and self.policy.mixed:  # Between as many as end in a step and as many as fit.
            bunch = np.sqrt(ended * np.maximum(ended, np.minimum(p.together, p.counts)))
        if not equal:
            ending, chance = begin_chance(p.counts, self.moments, self.policy, self.batches.lanes)
            bunch = np.maximum(bunch, poisson_of(ending / chance))
        seconds = p.decode / ended + called(self._added(bunch), OWN_PROMPT)
        return np.where(self.batches.many > 1, self._cycle_seconds(equal), np.minimum.accumulate(seconds, axis=-1))

    @cached_property
    def full_seconds(self) -> Any:
        """Seconds of a replica with a full queue for each request, or of one of its groups of attention."""
        return called(self._seconds[:, -1] / self.batches.lanes, "each request of a full queue")

    @cached_property
    def carried_seconds(self) -> Any:
        """Seconds of a replica, or of a group, for each request of the most of them that come one by one.

        Equal answers that came one by one end so, and groups wait for each other's prompts in most of their steps.
        Those of a queue that was full at once go on in step, a gain that no load has which just fits.
        """
        if self.at_once or self.moments.overlap <= EQUAL:
            return self.full_seconds
        apart = np.where(self.batches.many[:, 0] > 1, when_full(self, lambda form: form._seconds_of(False))[:, -1], 0.0)
        longest = np.maximum(self._seconds[:, -1], apart)
        return called(longest / self.batches.lanes, "seconds of a replica a request, at capacity")

    @cached_property
    def capacity(self) -> Any:
        """Requests a second that a replica carries of those that come one by one, or one of its groups of attention."""
        with np.errstate(divide="ignore"):  # endless where answers leave nothing to decode
            return 1 / self.carried_seconds

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
        first = prompt = self._added(arrivals)
        for turn in range(_ROUNDS):
            prompt = self._added(arrivals) if turn else first
            load = np.minimum(rate * prompt, FULL)
            more = prompt * arrivals / -np.expm1(-np.maximum(arrivals, 1e-12))
            arrivals = rate * (p.decode / (1 - load) if policy.mixed else more)
        filled = 0.0 * prompt
        if policy.mixed and (p.together < 1).any():
            short, filled = run_ends(p.short, p.unfilled, rate * (p.decode / p.together + prompt))
            prompt, filled = prompt + short, np.where(p.together < 1, filled, 0.0)
        return BatchLoad(
            rate=rate, decode=p.decode, prompt=prompt, first_prompt=prompt if policy.mixed else first,
            spread=p.spread, pieces=p.pieces, behind=p.behind, together=p.together, filled=filled,
        )  # fmt: skip

    @cached_property
    def parts(self) -> tuple[tuple[Any, Replicas], ...]:
        """The rows of one batch and those of several, apart."""
        return parts_of(self)

    def some(self, rows: Any) -> Replicas:
        """Return the closed form of some layouts, by their rows in order."""
        return some_of(self, rows)

    def _tempo(self, rate: Any) -> BatchTimes[Any]:
        """Return the pace of one batch at every number of its sequences."""
        return merged([(at, part._tempo_alike(rate[at])) for at, part in self.parts], len(rate))

    def _tempo_alike(self, rate: Any) -> BatchTimes[Any]:
        """Return the pace of layouts that all have one batch, or all several."""
        if (self.batches.many > 1).all():
            return self._cycle_tempo(rate[:, None])
        p, policy, moments, b = self.prices, self.policy, self.moments, self.loads(rate)
        first, lingering = first_token(b, moments, policy), lingering_of(b, moments, policy)
        empty = p.alone + b.rate * p.alone**2 * b.spread[:, :1] / (2 * (1 - b.load[:, :1]))
        if policy.mixed:  # Prompts that are cut wait for those before them whether or not sequences decode.
            empty = np.where(p.together[:, :1] < 1, p.alone + first.others[:, :1], empty)
        times = BatchTimes(
            decode=b.decode, prompts=prompt_seconds(b, policy), lingering=lingering.seconds,
            lingering_per_step=lingering.per_step, over=lingering.over,
            load=b.load, rest=first.rest, own=first.own, others=first.others, empty=empty,
            placed=b.prompt + (b.decode * b.pieces if policy.mixed else 0.0),
        )  # fmt: skip
        other = self._cycle_tempo(b.rate)
        # A cycle has room for all who arrive: how likely a step of one batch has not, the more so as lengths differ.
        arriving = np.maximum(b.rate * other.placed / np.maximum(p.pieces, 1.0), 0.1) * moments.new_cv2**2
        full = np.exp((1 - np.maximum(p.together, 1.0)) / arriving)
        queued = full
        if not policy.mixed:
            # Prompts that cost in proportion are an M/G/1 queue; those that wait for Python cost nothing more together.
            grown = p.cycles.look("more", b.rate * (b.decode + b.prompt)) / np.maximum(b.prompt, 1e-12)
            queued = np.maximum(full, np.clip(grown, 0.0, 1.0) ** 2)
            # Where the next step is decided as one begins whole prompts run two steps later, whether or not others run
            # now: only those that are cut wait as in a queue.
            full = full * np.clip(p.pieces - 1, 0.0, 1.0) if policy.async_scheduling else queued
        both = {}
        for f in fields(BatchTimes):
            share = full if f.name in ("rest", "own", "others") else queued
            one, cycles = getattr(times, f.name), getattr(other, f.name)
            both[f.name] = np.where(share > 0, share * one, 0.0) + (1 - share) * cycles
        return BatchTimes(**both | {"empty": times.empty})

    def _prompts_alone(self, rate: Any, turns: Any) -> tuple[Any, Any]:
        """Return mean seconds to the first token where nobody decodes: of a prompt alone, and those it waits longer."""
        alone, steps = prompts_alone(self.prices, self.policy, rate)
        return alone, steps.sojourn(rate, turns) - steps.added[0]

    def _cycle_seconds(self, equal: bool) -> Any:
        """Return seconds for each request of a batch among others, while so many sequences run and others wait.

        No more begin in a step than it has room for beside those that decode.
        """
        p, pieces = self.prices, (self.prices.cycles.ends or self.prices.cycles).pieces
        going, cycle = self._ending(equal)
        # Prompts alone have no steps that decode: all of them begin, a piece a step, whatever share is left.
        share = np.maximum(going, 1e-12)
        began = p.counts * share / (self.moments.steps + pieces * share)
        full = p.decode / p.together + p.ahead / PROMPTS
        some = self.policy.mixed & ~self.batches.piped & (began > p.together * np.maximum(going, 1.0))
        # A batch runs the prompt of each in a step of its own, and decode steps between.
        apart = 0.0 if self.policy.mixed else p.decode * self.moments.steps / p.counts + p.ahead / PROMPTS
        # Nor do batches of a pipeline begin more prompts than full steps of them take.
        apart = np.where(self.policy.mixed & self.batches.piped, np.maximum(apart, full), apart)
        return np.minimum.accumulate(np.where(some, full, np.maximum(cycle / began, apart)), axis=-1)

    def _ending(self, equal: bool) -> tuple[Any, Any]:
        """Return the share of steps that decode, and seconds of a cycle, where prompts follow on sequences that end.

        Equal answers end together as they began.
        """
        p, steps, cycles = self.prices, self.moments.steps, self.prices.cycles
        ends, pieces = cycles.ends or cycles, cycles.pieces
        prompts = ends.ended(p.counts, steps)
        if equal:
            # Between as many as arrive and as many as fit: those that waited for a place came in full steps.
            fit = self.batches.every * np.maximum(np.minimum(p.together, p.counts) * pieces, 1.0)
            fit, ended = np.maximum(fit, prompts), prompts / self.batches.every
            # Where no batch waits for prompts of others, or none decodes beside them, bunches stay as they came.
            came = prompts * as_they_came(ended, np.asarray(self._added(np.maximum(ended, 1.0))) / p.decode)
            own = self.batches.piped | (not self.policy.mixed)
            bunch = np.where(own, np.minimum(came, fit), np.sqrt(prompts * fit))
            less = prompts / bunch
            cycle = ends.decode + (ends.look("mean", bunch) - ends.decode) * less
            return 1 - ends.look("share", bunch) * less, cycle
        # Prompts are held until a place is free in every group, at most so many steps, and run in fewer steps: the mean
        # of the longest of as many geometric times.
        wait, many = np.ones_like(prompts), self.batches.many
        for step in range(1, self.policy.balance_steps):
            wait = wait + np.where(self.batches.piped, 0.0, 1 - (-np.expm1(-prompts * step / many)) ** many)
        cycle = ends.decode + (ends.look("mean", prompts * wait) - ends.decode) / wait
        return 1 - ends.look("share", prompts), cycle

    def _cycle_tempo(self, rate: Any) -> BatchTimes[Any]:
        """Return the pace of batches that go round together, or of one whose steps have room for all who come."""
        p, policy, cycles, prompts = self.prices, self.policy, self.prices.cycles, rate
        at = cycles.going(rate := rate * self.batches.every * cycles.pieces)
        if policy.balance_steps:
            in_lockstep = (p.counts >= 1) & ~self.batches.piped & (self.batches.many > 1)
            steps = np.where(in_lockstep, policy.balance_steps, 1)
            at = held_back(cycles, at, rate, steps, self.moments.overlap > EQUAL)
        step = at.cycle / (1 - at.alone)
        # Each piece of a prompt runs in a cycle of its own; the last ones are shorter.
        own = at.own * cycles.pieces + (p.pieces - cycles.pieces) * cycles.decode * policy.mixed
        # Pieces follow one another through the stages of a pipeline, of batches apart in one that decodes nothing.
        idle = self.batches.piped * (1 - (policy.mixed and not policy.shared_waiting) * np.minimum(p.counts, 1.0))
        own = own * (1 - idle * (1 - p.following)) * (self.moments.new_tokens > 0)
        rest = np.asarray(at.square / at.cycle**2) * at.cycle / 2
        rest = rest + at.short * cycles.decode * (policy.receive_steps - 1) / 2
        rest = rest + at.cycle if policy.async_scheduling and self.moments.steps else rest
        # Of a pipeline's batches with waiting lists of their own one that has nothing to run waits for none.
        turn = at.turn if policy.shared_waiting else np.minimum(p.counts, 1.0) * rest
        rest = np.where(self.batches.piped, turn, rest)
        # Who comes to a group where a prompt is cut waits for the pieces that fill its steps; others go elsewhere.
        busy = np.minimum(prompts * cycles.pieces * at.own, FULL) if policy.balances == "turns" else 0.0
        cut = (self.batches.many > 1) & ~self.batches.piped & policy.chunked
        behind = np.where(cut, prompts * p.behind * at.own**2 / (1 - busy), 0.0 * own)
        whole, per_step = followed(np.where(self.batches.piped, 0.0, at.two), self.moments, policy, 1 / (1 - at.alone))
        times = BatchTimes(
            decode=cycles.decode, prompts=step - cycles.decode, lingering=at.following * whole + at.left,
            lingering_per_step=at.following * per_step + at.left * self.moments.inverse_steps, over=1 + 0 * step,
            load=np.where(self.batches.many > 1, 1 - cycles.decode / step, at.keeps),
            rest=rest, own=own - at.left, others=behind, empty=p.alone + 0 * step, placed=at.cycle * p.pieces,
        )  # fmt: skip
        return gathered(times, rate, p, policy, (self.moments, self.batches)) if policy.batch_wait[0] else times

    def _likely(self, ratio: Any, width: Any, tail: Any) -> tuple[Any, Any]:
        """Return how likely each place is, and all that is beyond the last, up to a common factor.

        `ratio` is that of n sequences to n - 1, of a distribution `width` times as wide.
        """
        # log p(n) at the places: the sum of logs of the ratios between, by trapezoids.
        logs = np.log(ratio) / width * self.batches.every
        logs[:, -1] = np.minimum(logs[:, -1], 1.0)
        gaps = np.diff(self.prices.counts, axis=-1)
        # Between places a and b lie the ratios of a + 1 ... b: trapezoids from a to b, shifted by half a sequence.
        rise = gaps * (logs[:, 1:] + logs[:, :-1]) / 2 + (logs[:, 1:] - logs[:, :-1]) / 2 * (gaps > 0)
        total = np.concatenate([logs[:, :1], logs[:, :1] + np.cumsum(rise, axis=-1)], axis=1)
        likely = np.exp(total - total.max(axis=-1, keepdims=True))
        return likely, likely[:, -1] * tail / (1 - tail) / self._together

    def at(self, rate: Any, turns: Any = 1.0) -> Steady[Any]:
        """Return the means at so many requests a second of each layout, of replicas that take them in turns.

        Gaps between every W-th request have 1 / W of the squared cv.
        """
        with np.errstate(all="ignore"):
            asked = np.maximum(np.broadcast_to(np.asarray(rate, float), self.capacity.shape), 1e-9)
            each = asked / self.batches.lanes
            lane = at_rate(self, each)._at(each, turns)
        full, carried = self.full_seconds, self.carried_seconds
        running = lane.running * self.batches.lanes
        return replace(lane, full_seconds=full, carried_seconds=carried, rate=asked, running=running)

    def _at(self, rate: Any, turns: Any) -> Steady[Any]:
        p, moments, turns = self.prices, self.moments, np.broadcast_to(np.asarray(turns, float), rate.shape)
        most_served = np.asarray(1 / self._seconds[:, -1])
        n, steps = p.counts, max(moments.steps, 1e-9)
        pace = as_many_as_end(self._tempo(rate), n / (rate[:, None] * steps), n < n[:, -1:], moments.steps)
        # How often something happens is not opened, what it takes is.
        load, seconds = np.asarray(pace.load), np.asarray(pace.step + pace.lingering / steps)
        # Bunches widen the distribution, the less the more outputs differ (M^X/G/infinity), and as far as an answer
        # outlasts them.
        width = 1 + (1 / (1 - load) ** 2 / turns[:, None] - 1) * moments.overlap * np.asarray(pace.over)
        tail = np.minimum(rate / most_served, 0.999)
        ratio = rate[:, None] * steps * seconds / n
        likely, beyond = self._likely(ratio, width, tail)
        weighted, most = likely * self._weights, n[:, -1]
        ended = (weighted * n / seconds).sum(axis=-1) + beyond * most / seconds[:, -1]
        # The share of tokens that is made while so many run.
        made = (weighted * n / seconds / ended[:, None], beyond * most / seconds[:, -1] / ended)
        tokens = mean_of(pace.decode, *made, OWN_DECODE) + mean_of(pace.prompts, *made, OTHER_PROMPTS)
        lingering = mean_of(pace.lingering, *made, "prompts that came with its own")
        scale = np.minimum(rate * steps / ended, 1 / (weighted.sum(axis=-1) + beyond))
        chance, past = scale[:, None] * weighted, scale * beyond
        empty = np.maximum(1 - chance.sum(axis=-1) - past, 0.0)
        # Prompts that run hold places too, in a stage of their own before the decode steps.
        placed = ratio + rate[:, None] * pace.placed / n
        whole = scale * (weighted.sum(axis=-1) + beyond)
        waiting = self._waiting(rate, (placed, width, tail), whole, load[:, -1], turns)
        causes = ((WAITS[3], pace.rest), (OWN_PROMPT, pace.own), (MATES, pace.others))
        ttft = sum(mean_of(value, chance, past, name) for name, value in causes)
        ttft = ttft + first_token_alone(self, rate, empty, pace, ttft / np.maximum(1 - empty, 1e-12))
        ttft = ttft + called(waiting, "waiting for a place")
        if not moments.steps and moments.new_tokens:
            alone, longer = self._prompts_alone(rate, turns)
            ttft = np.where(self.batches.many[:, 0] > 1, ttft, called(alone, OWN_PROMPT) + called(longer, MATES))
        # Seconds a token as requests have it: short answers linger as long as others.
        per_token = mean_of(pace.lingering_per_step, *made, "prompts that came with its own")
        per_token = (tokens * moments.whole_steps if moments.made > 1 else tokens) + per_token
        values = {
            "running": (chance * n).sum(axis=-1) + past * most,
            "ttft_seconds": ttft,
            "tpot_seconds": per_token / moments.made if moments.steps else 0.0 * per_token,
            "e2e_seconds": ttft + moments.steps * (tokens + lingering / steps),
            "waiting_seconds": waiting,
        }
        values = {k: np.where(rate < most_served, v, math.inf) for k, v in values.items()}
        return Steady(full_seconds=self._seconds[:, -1], carried_seconds=self._seconds[:, -1], rate=rate, **values)

    def _waiting(self, rate: Any, shape: tuple[Any, Any, Any], whole: Any, load: Any, turns: Any) -> Any:
        """Return mean seconds of a wait for a place among the sequences, of which prompts take such a share if full.

        Requests come one by one, however many of those who have a place begin together.
        """
        (ratio, width, tail), one = shape, self.batches.one_list(self.policy)
        # A cache is full by what requests hold, whose spread adds to that of their number.
        room = np.asarray(self.cache_tokens, float) - self.moments.shared_tokens
        fitting = room / self.moments.held_tokens < self.policy.max_sequences
        if not self.policy.shared_waiting:
            # While one batch of a pipeline is full others take what arrives alone, so that a cycle is shorter.
            full = np.minimum(ratio[:, -1], tail)
            tail = np.where(self.batches.lanes > 1, full + (tail - full) / self.batches.lanes, tail)
        likely, beyond = self._likely(ratio, width + (fitting * self.moments.held_cv2)[:, None], tail)
        chance = whole * likely[:, -1] / self._together / ((likely * self._weights).sum(axis=-1) + beyond)
        apart = served_cv2(load, fitting, self.moments)
        factor = slot_factor(tail, self.prices.counts[:, -1] * one, apart) * self._pooled(apart, turns)
        return chance * tail / (1 - tail) ** 2 * factor / (rate * one)

    @property
    def _together(self) -> Any:
        """Batches whose places are as good as those of one: one more in each of them is so many requests more."""
        return self.batches.one_list(self.policy) * (1.0 if self.policy.balances == "turns" else self.batches.groups)

    def _pooled(self, apart: Any, turns: Any) -> Any:
        """The wait for a place over that of a group alone: of all places together, or of Erlang arrivals (in turns)."""
        cv2 = apart if self.policy.balances == "turns" else 0.0
        return (self.batches.one_list(self.policy) / self.batches.every[:, 0] / turns + cv2) / (1 + cv2)
