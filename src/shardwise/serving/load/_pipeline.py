"""What prompts cost the batches of a pipeline that follow each other through its stages.

Jobs that take as long at every stage end after their sum and P - 1 times the longest (Pinedo, Scheduling, proportionate
flow shops); P batches come round, so that n steps take as long as the longest path through steps and stages. A path
passes all P stages with P - 1 steps left out each time, while it stays at one long step. Of long steps and short ones
it goes at the pace of the long ones but for the short ones that it cannot leave out: `_longest_in_queue`, and
`_longest_in_turns` of what arrives. Steps of more lengths are such steps once for each length (at most 2 % too long).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Literal

from shardwise.arrays import np
from shardwise.records import dataclass
from shardwise.serving.load._batch_times import FULL

# Prompts of a step that are priced; between them lie lines.
IN_A_STEP = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
_NUMBERS = np.arange(420)
_LOG_FACTORIALS = np.array([math.lgamma(k + 1) for k in _NUMBERS])


Come = Literal["apart", "alternating"]
"""How prompts come to batches in flight: to any or in turns, or between steps that only decode."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePrices:
    """What steps of `IN_A_STEP` prompts take beyond a decode step: seconds through all stages."""

    mean: Any
    """[prompts, layout, place]; more prompts than a step has room for in proportion."""
    levels: Any
    """Of shorter and of longer prompts, as many as a step has room for: [prompts, half, layout, place]."""
    fit: Any
    """Prompts that a step has room for: [layout, place]."""
    share: Any
    """Of the groups of a step that share experts those that have any of its prompts: [prompts, layout, place]."""


def poisson(means: Any) -> Any:
    return np.exp(_NUMBERS * np.log(means)[:, None] - means[:, None] - _LOG_FACTORIALS)


def _sums(chances: Any, values: Any) -> Any:
    """Return means of values; threads of a GEMM take ten times the seconds of a core that this does."""
    return np.einsum("mk,kn->mn", chances, values)


def _alternating(means: Any) -> tuple[Any, Any]:
    """Return the mean a of Poisson prompts behind a decode step, and the share of decode steps: m = a / (2 - e^-a).

    What ends in a decode step leaves places to prompts of the next step, after which a decode step comes.
    """
    seconds = means + 0.0
    for _ in range(60):
        seconds = means * (2 - np.exp(-seconds))
    return seconds, 1 / (2 - np.exp(-seconds))


def _longest_in_queue(some: Any, batches: int) -> Any:
    """Return the share of time at the pace of steps that are long, of which any step is one of a share `some`.

    A path that stays at a long step leaves out the next P - 1, from any of the long ones that follow on each other
    after which a long one comes; where there is none it goes on to the next. Of two batches it leaves out each step
    that follows on a long one. Held against such paths in tests/serving/test_pipeline_steps.py.

    >>> _longest_in_queue(np.array([0.0, 0.5, 1.0]), 2).tolist()
    [0.0, 0.75, 1.0]
    """
    short = 1 - some
    if batches == 2:
        return 1 - short**2
    # How many long ones it tries, and short ones it goes through where none will do.
    tried = 1 / (1 - some * short)
    through = short**2 * tried / np.maximum(some, 1e-300)
    return 1 - through / (batches - 1 + tried + through)


def _longest_in_turns(mean: Any, batches: int) -> Any:
    """Return how likely the longest step of a cycle has at least 1, 2, ... prompts: [mean, prompts].

    Prompts that arrive go to one batch after another: of K in a cycle ceil(K / P) are in the longest step. Of two
    batches a step is not the longest where it and the next have fewer: both have what arrives in the same half.
    """
    chance = poisson(mean)
    if batches > 2:
        fewer = np.concatenate([0 * chance[:, :1], np.cumsum(chance, axis=1)], axis=1)
        return 1 - fewer[:, np.minimum(1 + batches * (_NUMBERS[1:] - 1), len(_NUMBERS))]
    half = poisson(mean / 2)
    # What is left beside those of the shared half; of 2 too many and more none is.
    left = np.arange(-2, len(_NUMBERS) - 1)

    def fewer_than(values: Any, more: int) -> Any:
        """Return how likely as many as are left, or one more, are not too many."""
        sums = np.concatenate([0 * values[:, :1], np.cumsum(values, axis=1)], axis=1)
        return sums[:, np.clip(left + 1 + more, 0, None)]

    # Which batch is next depends on whether even or odd numbers came before.
    even = half * (_NUMBERS % 2 == 0)
    whole, evens = ([fewer_than(values, more) for more in (0, 1)] for values in (half, even))
    each = sum(evens[more] * whole[1 - more] + (whole[more] - evens[more]) * whole[more] for more in (0, 1))
    neither = each[:, np.clip(2 * _NUMBERS[1:, None] - 2 - _NUMBERS, left[0], left[-1]) - left[0]]
    return 1 - np.einsum("mk,mvk->mv", half, neither) / 2


@cache
def _in_a_step(means: tuple[float, ...], batches: int, apart: float, come: Come) -> tuple[Any, Any]:
    """Return how likely a step of one of so many batches, and the longest, has `IN_A_STEP` prompts, by their mean.

    Prompts are in any batch where they take the places of sequences that ended `apart` from each other; where these end
    in steps that only decode such steps follow on them. In turns K of a cycle are K / B of each, rounded down or up.
    """
    mean = np.array(means)
    turns = np.zeros((len(mean), len(_NUMBERS)))
    # A batch has no more than its share of them all, rounded up.
    most = len(_NUMBERS) // batches + 2
    turns[:, :most] = _sums(poisson(mean), np.clip(_NUMBERS[:, None] / batches - _NUMBERS[:most] + 1, 0.0, 1.0))
    own, going = _alternating(mean / batches) if come == "alternating" else (mean / batches, 1.0)
    random = poisson(own) * np.reshape(going, (-1, 1))
    chance = apart * random + (1 - apart) * (turns - np.concatenate([turns[:, 1:], 0 * turns[:, :1]], axis=1))
    some = np.cumsum(chance[:, :0:-1], axis=1)[:, ::-1]
    longest = apart * _longest_in_queue(some, batches)
    if apart < 1:
        longest = longest + (1 - apart) * np.maximum(_longest_in_turns(mean, batches), some)
    hats = in_lines()
    return _sums(chance[:, 1:], hats), _sums(longest - np.concatenate([longest[:, 1:], 0 * some[:, :1]], axis=1), hats)


@cache
def in_lines() -> Any:
    """Return the weights of `IN_A_STEP` for 1, 2, ... prompts."""
    at = np.array((0, *IN_A_STEP))
    i = np.clip(np.searchsorted(at, _NUMBERS, side="right") - 1, 0, len(at) - 2)
    share = (_NUMBERS - at[i]) / (at[i + 1] - at[i])
    hats = np.zeros((len(_NUMBERS), len(at)))
    hats[_NUMBERS, i], hats[_NUMBERS, i + 1] = 1 - share, share
    return hats[1:, 1:]


def in_lanes(
    means: Any, prices: LanePrices, decode: Any, batches: Any, mixed: bool, crowd: tuple[float, Come]
) -> tuple[Any, Any]:
    """Return by mean prompts of a cycle what it takes longer, and the share of prompt steps: [mean, layout, place]."""
    apart, come = crowd
    many = batches[:, 0]
    longer = np.zeros((len(means), *prices.mean.shape[1:]))
    busy = 0.0 * longer
    for count in np.unique(many[many > 1]).astype(int).tolist():
        rows = np.flatnonzero(many == count)
        chance, longest = _in_a_step(tuple(means.tolist()), count, apart, come)
        levels, room = prices.levels[:, :, rows], prices.fit[rows]
        # Of so many steps as long as the longest half are of longer prompts.
        alike = np.maximum(count * chance / np.maximum(longest, 1e-300), 1.0)
        low, high = longest * 0.5**alike, longest * (1 - 0.5**alike)
        idle = sum(np.einsum("mk,kln->mln", one - chance / 2, levels[:, half]) for half, one in enumerate((low, high)))
        # What a step has no room for makes others as long: the fewer steps are shorter, the fewer wait; of a queue more
        # of them are long in any order.
        run = np.einsum("mk,kln->mln", chance, np.minimum(np.array(IN_A_STEP)[:, None, None], room))
        whole = (chance @ np.array(IN_A_STEP, float))[:, None, None]
        left = np.clip(np.maximum(room - whole, 0.0) / np.maximum(room - run, 1e-9), 0.0, 1.0)
        left = left * (1 + apart * (whole / np.maximum(run, 1e-9) - 1))
        longer[:, rows] = np.einsum("mk,kln->mln", chance, prices.mean[:, rows]) + np.maximum(idle, 0.0) * left
        share, some = prices.share[:, rows], chance.sum(axis=1)[:, None, None]
        alone = np.where((share == 1).all(axis=0), some, np.einsum("mk,kln->mln", chance, share))
        busy[:, rows] = 0.0 if mixed else np.minimum(alone, FULL)
    return longer, busy
