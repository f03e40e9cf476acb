"""Prompts that nobody decodes beside: a queue whose server takes all who wait at once, as far as a step has room.

Bulk service (Bailey 1954), seen where steps begin: of k prompts that wait X run for S seconds, in which a Poisson
number of others comes. The stationary chances of k, and Little's law over the time between two such moments, give the
mean seconds from arrival to the end of the prompt. Lengths that differ are two equal halves, of long and short ones.
Prompts that wait on purpose, until they fill a step, are `gathered`.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from shardwise.arrays import np
from shardwise.records import dataclass, replace
from shardwise.serving._policy import Policy
from shardwise.serving.load._batch_times import BatchTimes, run_ends
from shardwise.serving.load._batches import Batches
from shardwise.serving.load._moments import LengthMoments
from shardwise.serving.load._prices import LoadPrices

# Prompts that wait at most: loads of which more would wait are near the capacity, where nobody asks for digits.
_MOST = 64
_WAITING = np.arange(_MOST + 1)
_LOG_FACTORIALS = np.array([math.lgamma(k + 1) for k in _WAITING])


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSteps:
    """Steps of prompts alone: columns of layouts."""

    added: Any
    """Seconds of 1, 2, ... prompts: [prompts, layout]."""
    ahead: Any
    """Seconds of the last of these in a step that is full."""
    fit: Any
    """Prompts that a step has room for, with a part where prompts are cut."""
    cv2: Any
    """Squared coefficient of variation of their seconds."""
    cut: bool
    ahead_of_time: bool
    """Whether a step is scheduled as the one before begins, or alone for the first who comes where nobody waits."""

    def _full(self) -> Any:
        """Return seconds of a step that is full: [layout, 1]."""
        many, fit = len(self.added), np.maximum(self.fit, 1.0)
        whole = np.minimum(np.ceil(fit), many).astype(int)
        some = np.take_along_axis(self.added, whole[None] - 1, 0)[0] * fit / np.maximum(whole, fit)
        return np.where(fit > many, np.maximum(self.added[-1], self.ahead * fit / many), some)[:, None]

    def halves(self) -> tuple[Any, Any, Any]:
        """Return seconds, prompts that run, and how likely both are: [layout, waiting, case]."""
        k, many = np.maximum(_WAITING, 1), len(self.added)
        own = np.maximum(self.added[np.minimum(k, many) - 1].T, self.ahead[:, None] * np.where(k > many, k / many, 0.0))
        apart = np.sqrt(self.cv2[:, None] * k) * self.added[0][:, None]
        fit, full = np.maximum(self.fit, 1.0)[:, None], self._full()
        spread = np.minimum(np.sqrt(self.cv2[:, None] * fit), fit) if self.cut else 0.0 * fit
        seconds, steps, chances = [], [], []
        for sign in (-1.0, 1.0):
            room = np.maximum(fit - sign * spread, 1e-9)
            each = np.minimum(np.maximum(own + sign * apart, 0.0), full) if self.cut else own + sign * apart
            low = np.floor(room)
            for some, chance in ((low, 1 - room + low), (low + 1, room - low)):
                whole = k <= some
                seconds.append(np.where(whole, each, full))
                steps.append(np.minimum(k, some) + 0.0 * each)
                chances.append(chance / 2 + 0.0 * each)
        return tuple(np.stack(each, axis=-1) for each in (seconds, steps, chances))

    def sojourn(self, rate: Any, turns: Any = 1.0) -> Any:
        """Return mean seconds from the arrival of a prompt to its end, at requests a second of each layout.

        Of so many workers that take requests in turns each waits less: gaps between its own have 1 / W of the squared
        cv. A step that is scheduled as the one before begins has those who had come by then; where nobody had, the
        first of those who came since runs alone.

        >>> one, prompts = np.ones(1), np.array([[1.0], [2.0]])
        >>> steps = PromptSteps(added=prompts, ahead=2 * one, fit=one, cv2=0 * one, cut=False, ahead_of_time=False)
        >>> steps.sojourn(0.5 * one).round(3).tolist()  # M/D/1: 1 + 0.5 / (2 * 0.5)
        [1.5]
        """
        seconds, ran, chances = self.halves()
        rate = np.asarray(rate, float)
        # Short prompts of many may add nothing to a step: nobody comes in it.
        mean = np.maximum(rate[:, None, None] * seconds, 1e-300)
        left = np.maximum(_WAITING, 1)[:, None] - ran
        steps = range(seconds.shape[-1])
        moves = sum(chances[:, :, i, None] * _others(mean[:, :, i], left[:, :, i]) for i in steps)
        come = sum(chances[:, :, i, None] * _others(mean[:, :, i], 0.0 * mean[:, :, i]) for i in steps)
        unended = (chances * left)[:, 0].sum(axis=-1)
        if self.ahead_of_time:
            moves[:, 0] = _after_first(come[:, 1], unended)
        moves[:, :, -1] += np.maximum(1 - moves.sum(axis=-1), 0.0)
        solution = _stationary(moves)
        first, second = (chances * seconds).sum(axis=-1), (chances * seconds**2).sum(axis=-1)
        waiting, nobody = np.maximum(_WAITING, 1.0), 1.0
        if self.ahead_of_time:
            shares = [chances[:, :, i] for i in steps], [left[:, :, i].astype(int) for i in steps]
            solution, unknown = _a_step_later(solution, come, shares, unended)
            nobody = unknown[:, 0]
            waiting = _WAITING + (unknown * _WAITING).sum(axis=-1)[:, None]
            waiting[:, 0] = waiting[:, 0] + nobody
        waited = waiting * first + rate[:, None] * second / 2
        lasted = (solution * first).sum(axis=-1) + solution[:, 0] * nobody / rate
        alone = self.added[0]
        wait = np.maximum((solution * waited).sum(axis=-1) / lasted / rate - alone, 0.0)
        return alone + self._in_turns(wait, rate, first, np.maximum(turns + 0.0 * rate, 1.0))

    def _in_turns(self, wait: Any, rate: Any, first: Any, turns: Any) -> Any:
        """Return the wait of requests that come in turns, of that of Poisson arrivals, by the seconds of steps.

        What is left of it where gaps are even stays. The rest is as much as gaps differ (Kingman 1961), and less below
        the capacity (Kraemer and Langenbach-Belz 1976), of what each prompt takes of a step.
        """
        fixed, several = self._fixed(first)[:, 0], np.clip(self.fit - 1, 0.0, 1.0)
        even = np.minimum(several * self._even(rate, first, turns), wait)
        busy = rate * first[:, -1] / np.clip(self.fit, 1.0, float(_MOST))
        cv2 = (1 / turns + self.cv2) / (1 + self.cv2)
        less = 2 * (1 - np.minimum(busy, 1.0)) * (1 - 1 / turns) ** 2 / (3 * busy * (1 / turns + self.cv2))
        own = 1 - several * fixed / np.maximum(first[:, 0], 1e-30)
        return even + (wait - even) * cv2 * np.exp(-own * less)

    def _fixed(self, first: Any) -> Any:
        """Return what a step takes whatever runs in it: [layout, 1]."""
        return np.maximum(2 * first[:, :1] - first[:, 2:3], 0.0)

    def _even(self, rate: Any, first: Any, turns: Any) -> Any:
        """Return the wait where as many prompts come in each step: the rest of one, and one scheduled before.

        Steps are so only as long as anybody comes in each of them, and begin to be where two come in one.
        """
        more = rate[:, None] * np.concatenate([self._fixed(first), first[:, 1:]], axis=1) - _WAITING
        at = np.minimum((np.cumsum(more <= 0, axis=-1) == 0).sum(axis=-1), _MOST)[:, None]
        low, high = (np.take_along_axis(more, np.maximum(at - some, 0), 1) for some in (1, 0))
        come = (np.maximum(at - 1, 0) + low / np.maximum(low - high, 1e-12) * (at > 0))[:, 0]
        step, phases = np.maximum(come / rate, first[:, 0]), np.minimum(turns, 8.0)[:, None]
        mean = np.maximum(phases * come[:, None], 1e-300)
        chances = np.exp(_WAITING * np.log(mean) - mean - _LOG_FACTORIALS)
        nobody = (chances * np.clip(1 - _WAITING / phases, 0.0, 1.0)).sum(axis=-1)
        several = np.maximum(1 - (chances * np.clip(2 - _WAITING / phases, 0.0, 1.0)).sum(axis=-1), 0.0)
        share = several / np.maximum(several + nobody, 1e-12)
        return share * ((2.5 if self.ahead_of_time else 1.5) * step - first[:, 0])


def prompts_alone(prices: LoadPrices, policy: Policy, rate: Any) -> tuple[Any, PromptSteps]:
    """Return seconds of a prompt alone, and the steps of prompts at so many requests a second of each layout.

    Of prompts that are cut the last step of a run is not full, nor is that of one alone; where lengths differ short
    ones fill it, the more so the further they do.
    """
    fit = np.minimum(prices.together[:, 0], prices.counts[:, -1])
    added, spread = np.asarray(prices.added[:, :, 0]), prices.spread[:, 0]
    short = np.where(fit < 1, np.asarray(prices.short[:, :, 0]) * np.clip(2 - spread, 0.0, 1.0), 0.0)
    ends = run_ends(short, prices.unfilled[:, :, 0], rate * added[0])[0] if short.any() else 0.0
    steps = PromptSteps(
        added=added + ends, ahead=np.asarray(prices.ahead[:, 0]), fit=fit, cv2=spread - 1, cut=policy.chunked,
        ahead_of_time=policy.async_scheduling,
    )  # fmt: skip
    return prices.added[0][:, 0] + short[0], steps


def _others(mean: Any, left: Any) -> Any:
    """Return how likely a Poisson number of others brings those that are left to each number: [layout, left, number].

    Numbers beyond the last are left out.
    """
    come = _WAITING - left[:, :, None]
    at = np.clip(come, 0, _MOST).astype(int)
    logs = at * np.log(mean[:, :, None]) - mean[:, :, None] - _LOG_FACTORIALS[at]
    return np.where(come >= 0, np.exp(logs), 0.0)


def _after_first(come: Any, unended: Any) -> Any:
    """Return the chances of what is left of numbers of which one, or none of none, has run: [layout, number].

    Of one that is cut a part may be left, with a chance.
    """
    none = 0.0 * come[:, :1]
    less = np.concatenate([come[:, :1] + come[:, 1:2], come[:, 2:], none], axis=1)
    return less + unended[:, None] * (np.concatenate([none, less[:, :-1]], axis=1) - less)


def _stationary(moves: Any) -> Any:
    """Return the chances that moves from number to number leave as they are: [layout, number]."""
    system = np.swapaxes(moves, 1, 2) - np.eye(_MOST + 1)
    system[:, -1, :] = 1.0
    wanted = np.zeros((len(moves), _MOST + 1, 1))
    wanted[:, -1] = 1.0
    return np.linalg.solve(system, wanted)[..., 0]


def _a_step_later(known: Any, come: Any, shares: tuple[Any, Any], unended: Any) -> tuple[Any, Any]:
    """Return the chances of those known as a step is scheduled ahead, and of those who came since then.

    Of steps in each of which those run who came in the one before these are the chances of both. Who comes in a step is
    known to the one after the next: what a step leaves is of other arrivals than those who join it.
    """
    chances, left = shares
    unknown = (known[:, :, None] * come).sum(axis=1)
    kept = sum(
        (known[:, 1:, None] * some[:, 1:, None] * (one[:, 1:, None] == _WAITING)).sum(axis=1)
        for some, one in zip(chances, left, strict=True)
    )
    known = _joined(kept, unknown) + known[:, :1] * _after_first(unknown, unended)
    known = known / known.sum(axis=-1)[:, None]
    return known, (known[:, :, None] * come).sum(axis=1)


def _joined(one: Any, other: Any) -> Any:
    """Return the chances of sums of two numbers: [layout, number]."""
    less = _WAITING[None, :] - _WAITING[:, None]
    at = np.broadcast_to(np.clip(less, 0, _MOST).astype(int)[None], (len(one), _MOST + 1, _MOST + 1))
    shifted = np.where(less >= 0, np.take_along_axis(np.broadcast_to(other[:, None], at.shape), at, 2), 0.0)
    return (one[:, :, None] * shifted).sum(axis=1)


def gathered(
    times: BatchTimes[Any], rate: Any, prices: LoadPrices, policy: Policy, run: tuple[LengthMoments, Batches]
) -> BatchTimes[Any]:
    """Return the pace where prompts wait for decode steps until they fill a share of a step.

    The first of them waits for all of these, others for a part, and all run in one step.
    """
    (moments, batches), (steps, share), cycles = run, policy.batch_wait, prices.cycles
    wanted = np.ceil((share * policy.step_tokens - prices.counts) / max(moments.new_tokens, 1.0))
    # The least of the wait for so many more and of those steps, exact for one more.
    more, longest_wait = np.maximum(wanted - 1, 0.0), steps * cycles.decode
    wait = more / rate * -np.expm1(-rate * longest_wait / np.maximum(more, 1e-9))
    alone = (batches.many == 1) & (prices.counts >= 1)
    bunch = 1 + rate * wait
    longest = cycles.look("mean", bunch)
    period = np.maximum(bunch / rate, longest)
    step = period / (1 + (period - longest) / cycles.decode)
    waited = wait * (1 + rate * wait / 2) / bunch
    other = replace(
        times, prompts=step - cycles.decode, load=1 - cycles.decode / step,
        others=times.others + waited + np.maximum(longest - cycles.look("mean", np.ones_like(bunch)), 0.0),
    )  # fmt: skip
    return BatchTimes(
        **{f.name: np.where(alone, getattr(other, f.name), getattr(times, f.name)) for f in fields(BatchTimes)}
    )
