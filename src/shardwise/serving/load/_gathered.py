"""Cycles of a pipeline whose batches take from one waiting list, as a Markov chain of the prompts in them.

Who comes is in the batch that is made next, that is in the gap between the ends of two batches. A batch ends after the
one before it by what it keeps a stage, d / P of a decode step d of P stages; but the batch with the longest step has
the rest of the cycle: a cycle takes as long as P stages of the longest step or all steps of one stage, the longer of
the circuits of a timed event graph (Baccelli, Cohen, Olsder and Quadrat, Synchronization and Linearity, 1992, 2.5). So
of those who come in a cycle of C seconds a share 1 - (P - 1) d / (P C) runs in one step of the next, the others in any
batch. Prompts of a cycle are Poisson about what comes in the one before (gated service: Takagi, Analysis of Polling
Systems, 1986): their numbers are a Markov chain, of whose stationary shares all means are taken. Prompts that are cut
come as groups of pieces (Chaudhry and Templeton, A First Course in Bulk Queues, 1983), which follow one another through
the stages. Held against the simulation in tests/serving/test_pipeline_steps.py.
"""

from __future__ import annotations

import math
from dataclasses import field, fields
from functools import cache
from typing import Any, TypeVar, cast

from shardwise.arrays import np
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._batch_times import FULL
from shardwise.serving.load._batches import Batches, batches_going
from shardwise.serving.load._pipeline import IN_A_STEP, LanePrices, in_lines, poisson

T = TypeVar("T")
# Prompts of a cycle: the states of the chain, the last of which stands for more.
_STATES = (0, *IN_A_STEP)
_MEANS = np.concatenate([[0.0], np.geomspace(0.01, 200.0, 60)])
_PER_LOG, _PER_GAP = 1 / math.log(_MEANS[2] / _MEANS[1]), 1 / np.diff(_MEANS)
_TURNS = 3
# Before the last turn shares of states are those after so many cycles: they say who comes when, not how often.
_CYCLES = 4
# The first places of a layout, of few sequences, and one in so many have a chain; others lie on lines between.
_FIRST, _EACH = (0, 1, 2, 3, 5), 8
# Of so many prompts a cycle the chain is left, of twice as many it is not used: steps of all batches are full.
_MANY = 20
_OWN = ("decode", "counts", "launching", "pieces")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredMix:
    """Cycles at a rate, what they are in the mean (`CycleMix` of _lockstep.py has the same names): [layout, place]."""

    cycle: Any
    square: Any
    short: Any
    turn: Any
    own: Any
    alone: Any
    following: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Seconds of cycles with `_STATES` prompts at some of the places: [way, layout, place, state]."""

    longer: Any
    """What they take longer: all in one step, or in as many as they fill, and as evenly in all batches as they go."""
    beyond: Any
    """What is left of them as the first step ends, of which the next cycle has nothing if it has a long step, too."""
    spread: Any
    """Its variance, since prompts differ: [layout, place, state]."""
    stages: Any
    """What they keep a stage: [layout, place, state]."""
    fit: Any
    """Prompts that a step has room for: [layout, place]."""
    rounds: Any
    """Cycles whose steps they fill, at least one: [layout, place, state]."""
    decode: Any
    batches: Batches
    counts: Any
    launching: Any
    pieces: Any
    """Of a prompt."""
    policy: Policy
    places: Any
    """Which places these are."""
    last: list[tuple[Any, GatheredMix]] = field(default_factory=list, compare=False)
    """The rates that were asked last, and the mix there: a search changes those of few layouts at a time."""

    @staticmethod
    def of(lanes: LanePrices, decode: Any, cells: tuple[Any, Any, Any], batches: Batches, policy: Policy) -> Gathered:
        """Return the seconds from the prices of steps; `cells`: numbers of sequences, the host's seconds, pieces."""
        last = decode.shape[-1] - 1
        at = np.array(sorted({*(one for one in _FIRST if one < last), *range(0, last, _EACH), last}))
        # How often something happens is not opened.
        levels, mean, decode = (np.asarray(one[..., at], float) for one in (lanes.levels, lanes.mean, decode))
        many, (counts, launching, pieces) = batches.many, (np.asarray(one[:, at], float) for one in cells)
        levels, mean = (_of_whole(one, pieces) for one in (levels, mean))
        stages, zero = mean / many, np.zeros((1, len(decode), len(at)))
        longer, beyond = _both_ways(levels, mean, batches, policy.batches_ahead)
        fit = np.asarray(lanes.fit[:, at], float) / pieces
        rounds = np.maximum(np.array(_STATES) / (fit * (many + policy.batches_ahead))[..., None], 1.0)

        def by_state(values: Any) -> Any:
            return np.moveaxis(np.concatenate([zero, values]), 0, -1)

        return Gathered(
            longer=np.stack([by_state(one) for one in longer]), beyond=np.stack([by_state(one) for one in beyond]),
            spread=by_state((levels[:, 1] - levels[:, 0]) ** 2 / 4), stages=by_state(stages), rounds=rounds, fit=fit,
            decode=decode, batches=batches, counts=counts, launching=launching, pieces=pieces, policy=policy, places=at,
        )  # fmt: skip

    def between(self, other: Gathered, share: Any) -> Gathered:
        """Return seconds of which a share is those of others, by layout."""

        def both(name: str, share: Any) -> Any:
            return (1 - share) * getattr(self, name) + share * getattr(other, name)

        by_state = {name: both(name, share[..., None]) for name in ("longer", "beyond", "spread", "stages", "rounds")}
        return replace(self, **by_state, last=[])

    def over(self, at: T, rate: Any) -> T:
        """Return a mix of cycles in which those of pipelines are of the chain, up to many prompts in each."""
        if not self.batches.piped.any():
            return at
        mix, many = (
            self.mix(np.asarray(rate, float)[:, self.places] / self.pieces),
            np.clip(np.asarray(cast(Any, at).some, float) / _MANY - 1, 0.0, 1.0),
        )
        share = np.where(self.batches.piped, 1 - many, 0.0)
        before = {f.name: getattr(at, f.name) for f in fields(GatheredMix)}
        after = {name: one + share * (self._everywhere(getattr(mix, name)) - one) for name, one in before.items()}
        return cast(T, replace(cast(Any, at), **after))

    def mix(self, rate: Any) -> GatheredMix:
        """Return what cycles are where so many prompts arrive a second."""
        known, mix = self.last[0] if self.last else (rate + 1, None)
        new = np.flatnonzero((rate != known).any(axis=1))
        if mix is None or len(new) == len(rate):
            mix = self._mix(rate)
        elif len(new):
            part, columns = self.rows(new)._mix(rate[new]), {}
            for f in fields(GatheredMix):
                columns[f.name] = getattr(mix, f.name).copy()
                columns[f.name][new] = getattr(part, f.name)
            mix = GatheredMix(**columns)
        self.last[:] = [(rate, mix)]
        return mix

    def _mix(self, rate: Any) -> GatheredMix:
        many, ahead = self.batches.many, self.policy.batches_ahead
        # Who runs ahead is delayed by a step more, and comes round in as many turns.
        turns = 1 + ahead / many
        decode = (turns * self.decode)[..., None] * self.rounds
        (once, even), (once_over, even_over) = self.longer, self.beyond
        share, quiet = np.full((*self.decode.shape, len(_STATES)), 0.5), 0.0
        stays = np.full_like(share, 1 / len(_STATES))
        for turn in range(_TURNS):
            seconds = decode + even + share * (once - even) + quiet * (even_over + share * (once_over - even_over))
            spots = _spots(rate, seconds)
            next_ones = _transitions(spots)
            last, quiet = turn == _TURNS - 1, next_ones[..., 0]
            stays = _stationary(next_ones) if last else _soon(next_ones, stays)
            gap = self._in_the_gap(seconds / self.rounds, _by(stays, seconds) / _by(stays, self.rounds), 1 - share)
            if not last:
                # Those of a cycle came in the one before, whichever it was.
                came, ever = (np.einsum("lni,lnij->lnj", each, next_ones) for each in (stays * gap, stays))
                share = came / np.maximum(ever, 1e-300)
        return self._means(rate, (next_ones, _transitions(spots, 1)), (stays, gap), seconds)

    def _means(self, rate: Any, chances: tuple[Any, Any], shares: tuple[Any, Any], cycles: Any) -> GatheredMix:
        """Return the means of a chain of cycles; `shares` are those of states and of who comes in the longest gap.

        `chances` are those of the next cycle's prompts, and with one more of them.
        """
        (next_ones, more), (stays, gap), ahead = chances, shares, self.policy.batches_ahead
        many, rounds = (self.batches.many + ahead)[..., None], self.rounds
        each, whole_time = cycles / rounds, _by(stays, cycles)
        mean = whole_time / _by(stays, rounds)
        square = stays * rounds * (each**2 + self.spread) / _by(stays, rounds)[..., None]
        others = (1 - gap) / (many - 1)
        turn = (square * (gap**2 + (1 - gap) * others)).sum(axis=-1) / (2 * mean)
        behind = (stays * cycles * each * (gap * others + (1 - gap) / many)).sum(axis=-1) / whole_time
        seen = stays * cycles / whole_time[..., None]
        # With the prompt of who has come there is one more in the next cycle, if not in the same step.
        one_more, alike = (np.einsum("lni,lnij->lnj", each, more) for each in (seen, seen * gap))
        # Prompts beyond what a cycle has room for wait for the next one, as in M/D/c with c of them in a cycle
        # (Sakasegawa, An approximation formula L = a r^b / (1 - r), Annals of the Inst. of Stat. Math. 29, 1977).
        room = self.fit * many[..., 0]
        load = np.minimum(rate * each[..., -1] / room, FULL)
        queue = each[..., -1] / room * load ** (np.sqrt(2 * room + 2) - 1) / (1 - load) / 2
        # Until its last piece has passed all stages, over what one piece would take of that.
        whole = self.decode[..., None] + (self.longer[0] + self.beyond[0]) / rounds
        own = (alike * whole).sum(axis=-1) + (1 - (seen * gap).sum(axis=-1)) * whole[..., 1]
        own = own / (1 + (self.pieces - 1) / self.batches.many)
        left = (cycles - mean[..., None] * rounds) * (1 + 1 / rounds) / 2
        following = (one_more * (_excess(next_ones, stays, cycles - mean[..., None] * rounds) - left)).sum(axis=-1)
        alone, turns = 0.0 * mean, 1 + ahead / self.batches.many
        if not self.policy.mixed:
            come = (rate * self.pieces / self.batches.groups_each)[..., None] * each
            here, there = -np.expm1(-come * gap), -np.expm1(-come * others)
            alone = (stays * (gap * here + (1 - gap) * there)).sum(axis=-1)
        return GatheredMix(
            cycle=mean / turns, square=square.sum(axis=-1) / turns**2, short=stays[..., 0] / _by(stays, rounds),
            turn=turn + ahead * behind + queue, own=own, alone=alone, following=np.maximum(following, 0.0) / turns,
        )  # fmt: skip

    def _everywhere(self, values: Any) -> Any:
        """Return values of all places, on lines between those of some."""
        every = np.arange(int(self.places[-1]) + 1)
        low = np.clip(np.searchsorted(self.places, every, side="right") - 1, 0, max(len(self.places) - 2, 0))
        high = np.minimum(low + 1, len(self.places) - 1)
        share = (every - self.places[low]) / np.maximum(self.places[high] - self.places[low], 1)
        return values[:, low] + share * (values[:, high] - values[:, low])

    def rows(self, at: Any) -> Gathered:
        """Return those of some layouts."""
        batches = Batches(groups=self.batches.groups[at], lanes=self.batches.lanes[at])
        cells = {name: getattr(self, name)[at] for name in ("spread", "stages", "rounds", "fit", *_OWN)}
        return replace(self, longer=self.longer[:, at], beyond=self.beyond[:, at], batches=batches, last=[], **cells)

    def _in_the_gap(self, cycles: Any, mean: Any, apart: Any) -> Any:
        """Return the share of those who come in a cycle that run in one step of the next: [layout, place, state]."""
        many = self.batches.many + self.policy.batches_ahead
        quiet = np.minimum(self.decode / mean, 1.0)
        going = batches_going(self.counts * quiet, self.batches, self.policy, self.launching)
        others = ((going + self.policy.batches_ahead - 1) / self.batches.many * self.decode)[..., None]
        others = others + apart * self.stages
        if not self.policy.shared_places:
            # Batches that are full take as many as end in them; one that is not has half of its places in the mean.
            places, running = self.counts[:, -1:], self.counts * self.batches.many
            full = 1 - np.minimum(places / (2 * np.maximum(running, 1e-9)), 1.0)
            others = np.maximum(others, (full * mean)[..., None])
        gap = 1 - others / cycles
        return np.clip(gap, 1 / many[..., None], 1.0)


def _spots(rate: Any, seconds: Any) -> tuple[Any, Any]:
    """Return between which of `_MEANS` the prompts of the next cycle lie, and how far: of a cycle of each number."""
    mean = np.minimum(rate[..., None] * seconds, _MEANS[-1])
    # Means beyond the first, which is 0, are in proportion.
    place = np.log(np.maximum(mean, _MEANS[1]) / _MEANS[1]) * _PER_LOG
    low = np.clip(place.astype(int) + (mean >= _MEANS[1]), 0, len(_MEANS) - 2)
    return low, ((mean - _MEANS[low]) * _PER_GAP[low])[..., None]


def _transitions(spots: tuple[Any, Any], more: int = 0) -> Any:
    """Return how likely a cycle of each number of prompts, and so many more, comes after one of each."""
    (table, slopes), (low, share) = _next_prompts(more), spots
    # In place, since to make an array of this size anew takes as long as to fill it.
    chances = slopes[low]
    chances *= share
    chances += table[low]
    return chances


def _of_whole(steps: Any, pieces: Any) -> Any:
    """Return what steps of `IN_A_STEP` pieces [pieces, ..., layout, place] take of as many whole prompts."""
    if (pieces <= 1).all():
        return steps
    many, numbers = np.array(IN_A_STEP), np.minimum(np.array(IN_A_STEP)[:, None, None] * pieces, IN_A_STEP[-1])
    low = np.clip(np.searchsorted(many, numbers, side="right") - 1, 0, len(many) - 2)
    share = (numbers - many[low]) / (many[low + 1] - many[low])
    shape = (len(many), *(1,) * (steps.ndim - 3), *pieces.shape)
    low, share = low.reshape(shape) + np.zeros(steps.shape, int), share.reshape(shape)
    below, above = (np.take_along_axis(steps, each, axis=0) for each in (low, low + 1))
    return below + share * (above - below)


def _both_ways(levels: Any, mean: Any, batches: Batches, ahead: int) -> tuple[list[Any], list[Any]]:
    """Return what prompts of a cycle take longer, in one step and evenly in all batches, and what is left then.

    Of steps [prompts, half, layout, place] of shorter and of longer prompts the means: [prompts, layout, place].
    """
    many, most = batches.many, np.zeros_like(levels)
    for count in np.unique(many).astype(int).tolist():
        rows = np.flatnonzero(many[:, 0] == count)
        each = in_lines()[[-(-k // count) - 1 for k in IN_A_STEP]]
        most[:, :, rows] = np.einsum("sk,khln->shln", each, levels[:, :, rows])
    k, stages = np.array(IN_A_STEP)[:, None, None, None], mean[:, None] / many
    # A batch that is made ahead begins as the step after the one that it was made behind has ended.
    over = mean[:, None] - levels.mean(axis=1, keepdims=True)
    spilled = np.clip(over, 0.0, levels), most * np.minimum((k - 1) / many, 1.0)
    longer, beyond = [], []
    for one, after in zip((levels, most), spilled, strict=True):
        circuit = np.maximum(one + ahead * after / many, stages)
        longer.append(circuit.mean(axis=1))
        # Makespans go on until the last step has passed all stages: what that is more is behind the batches.
        beyond.append(np.maximum(stages + (1 - 1 / many) * one - circuit, 0.0).mean(axis=1))
    return longer, beyond


@cache
def _next_prompts(more: int) -> tuple[Any, Any]:
    """Return how likely Poisson numbers of `_MEANS`, and so many more, are each of `_STATES`, and their differences."""
    chance = np.concatenate([np.zeros((1, poisson(_MEANS[1:]).shape[1])), poisson(_MEANS[1:])])
    chance[0, 0] = 1.0
    numbers = np.minimum(np.arange(chance.shape[1]) + more, IN_A_STEP[-1])
    hats = np.concatenate([np.zeros((1, len(IN_A_STEP))), in_lines()])
    hats = np.concatenate([(np.arange(len(hats)) == 0)[:, None] * 1.0, hats], axis=1)
    # Between two states lie shares of both: those below 1 of the first are of none.
    table = np.einsum("mk,ks->ms", chance, hats[numbers])
    return table, table[1:] - table[:-1]


def _soon(next_ones: Any, stays: Any) -> Any:
    """Return the shares of states of chains some cycles after those that are given."""
    for _ in range(_CYCLES):
        stays = np.einsum("lni,lnij->lnj", stays, next_ones)
    return stays


def _stationary(next_ones: Any) -> Any:
    """Return the shares of states of chains, [layout, place, from, to]: balance, and all are one."""
    system = np.swapaxes(next_ones, -1, -2) - np.eye(next_ones.shape[-1])
    system[..., -1, :] = 1.0
    wanted = np.zeros((*next_ones.shape[:-1], 1))
    wanted[..., -1, 0] = 1.0
    return np.clip(np.linalg.solve(system, wanted)[..., 0], 0.0, 1.0)


def _by(shares: Any, values: Any) -> Any:
    return (shares * values).sum(axis=-1)


def _excess(next_ones: Any, stays: Any, beyond: Any) -> Any:
    """Return what cycles from a state on take beyond as many in the mean (Poisson's equation of a Markov chain)."""
    size = next_ones.shape[-1]
    system = np.eye(size) - next_ones + stays[..., None, :]
    return np.linalg.solve(system, beyond[..., None])[..., 0]
