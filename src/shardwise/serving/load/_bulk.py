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
from shardwise.serving.load._batch_times import BatchTimes
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
        cv (Kingman 1961), which what a step takes whatever runs in it does not feel.

        >>> one, prompts = np.ones(1), np.array([[1.0], [2.0]])
        >>> steps = PromptSteps(added=prompts, ahead=2 * one, fit=one, cv2=0 * one, cut=False, ahead_of_time=False)
        >>> steps.sojourn(0.5 * one).round(3).tolist()  # M/D/1: 1 + 0.5 / (2 * 0.5)
        [1.5]
        """
        seconds, halves, chances = self.halves()
        rate = np.asarray(rate, float)
        # Short prompts of many may add nothing to a step: nobody comes in it.
        mean = np.maximum(rate[:, None, None] * seconds, 1e-300)
        left = np.maximum(_WAITING, 1)[:, None] - halves
        moves = np.zeros((len(rate), _MOST + 1, _MOST + 1))
        for case in range(seconds.shape[-1]):
            # So many others as bring those that are left to each number.
            come = _WAITING - left[:, :, case, None]
            at = np.clip(come, 0, _MOST).astype(int)
            logs = at * np.log(mean[:, :, case, None]) - mean[:, :, case, None] - _LOG_FACTORIALS[at]
            moves += chances[:, :, case, None] * np.where(come >= 0, np.exp(logs), 0.0)
        moves[:, :, -1] += np.maximum(1 - moves.sum(axis=-1), 0.0)
        system = np.swapaxes(moves, 1, 2) - np.eye(_MOST + 1)
        system[:, -1, :] = 1.0
        wanted = np.zeros((len(rate), _MOST + 1, 1))
        wanted[:, -1] = 1.0
        solution = np.linalg.solve(system, wanted)[..., 0]
        first, second = (chances * seconds).sum(axis=-1), (chances * seconds**2).sum(axis=-1)
        waited = np.maximum(_WAITING, 1) * first + rate[:, None] * second / 2
        lasted = (solution * first).sum(axis=-1) + solution[:, 0] / rate
        alone = self.added[0]
        sojourn = np.maximum((solution * waited).sum(axis=-1) / lasted / rate, alone)
        fixed, each = self._parts(rate[:, None] * first)
        kept = (solution * first * fixed).sum(axis=-1) / (solution * first**2).sum(axis=-1)
        sojourn = sojourn - (sojourn - alone) * (1 - kept) * (1 - 1 / turns) / (1 + self.cv2)
        longer = np.minimum(fixed / np.maximum(1 - rate[:, None] * each, 1e-9), first)
        return sojourn + (solution * first * self._later(rate[:, None] * first, longer, each)).sum(axis=-1) / lasted

    def _parts(self, come: Any) -> tuple[Any, Any]:
        """Return what a step of so many prompts takes whatever runs in it, and each of them more: [layout, waiting]."""
        k, added = np.clip(np.round(come), 1, len(self.added)).astype(int), self.added.T
        more = np.maximum(k, 2)
        each = np.take_along_axis(added, more - 1, 1) - np.take_along_axis(added, more - 2, 1)
        return np.maximum(np.take_along_axis(added, k - 1, 1) - k * each, 0.0), each

    def _later(self, come: Any, longer: Any, each: Any) -> Any:
        """Return seconds that those wait longer, of so many in a step, without whom the next is scheduled.

        All but the first, where the next has room: they wait for a step more, `longer`. One that nobody else is known
        for runs the first alone, who waits for `each` of the others no more.
        """
        if not self.ahead_of_time:
            return 0.0 * come
        fit, others = self.fit[:, None], 1 + np.expm1(-come) / np.maximum(come, 1e-12)
        shared = (1 + come) * np.exp(-come) * np.clip(fit - 1, 0.0, 1.0)
        return others * (longer - shared * each) * (np.maximum(fit, 1.0) >= _WAITING)


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
    longest = cycles.look(cycles.mean, bunch)
    period = np.maximum(bunch / rate, longest)
    step = period / (1 + (period - longest) / cycles.decode)
    waited = wait * (1 + rate * wait / 2) / bunch
    other = replace(
        times, prompts=step - cycles.decode, load=1 - cycles.decode / step,
        others=times.others + waited + np.maximum(longest - cycles.look(cycles.mean, np.ones_like(bunch)), 0.0),
    )  # fmt: skip
    return BatchTimes(
        **{f.name: np.where(alone, getattr(other, f.name), getattr(times, f.name)) for f in fields(BatchTimes)}
    )
