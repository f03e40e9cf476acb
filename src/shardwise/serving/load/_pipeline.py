"""What prompts cost the batches of a pipeline that follow each other through its stages.

A step that takes u longer than those behind it leaves all stages but one idle for u, unless one of the P - 1 steps
behind it takes as long: with a share q of such steps P q (1 - q)^(P - 1) times a cycle, summed over all u. (Jobs that
take as long at every stage end after their sum and P - 1 times the longest: Pinedo, Scheduling, proportionate flow
shops; batches come round, so that each P steps are such a shop.)
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from shardwise.arrays import np
from shardwise.records import dataclass
from shardwise.serving.load._batch_times import FULL

# Prompts of a step that are priced; between them lie lines.
IN_A_STEP = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 64)
_NUMBERS = np.arange(420)
_LOG_FACTORIALS = np.array([math.lgamma(k + 1) for k in _NUMBERS])


@dataclass(frozen=True, kw_only=True, slots=True)
class LanePrices:
    """What steps of `IN_A_STEP` prompts take beyond a decode step: seconds through all stages."""

    mean: Any
    """[prompts, layout, place]; more prompts than a step has room for in proportion."""
    levels: Any
    """Of shorter and of longer prompts, as many as a step has room for: [prompts, half, layout, place]."""


def _poisson(means: Any) -> Any:
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


@cache
def _in_a_step(means: tuple[float, ...], batches: int, apart: float, mixed: bool) -> tuple[Any, Any]:
    """Return how likely a step of one of so many batches has `IN_A_STEP` prompts, and any, by their mean in a cycle.

    Prompts are in any batch where they take the places of sequences that ended `apart` from each other; in turns K of
    a cycle are K / B of each, rounded down or up.
    """
    mean = np.array(means)
    turns = np.zeros((len(mean), len(_NUMBERS)))
    # A batch has no more than its share of them all, rounded up.
    most = len(_NUMBERS) // batches + 2
    turns[:, :most] = _sums(_poisson(mean), np.clip(_NUMBERS[:, None] / batches - _NUMBERS[:most] + 1, 0.0, 1.0))
    own, going = (mean / batches, 1.0) if mixed else _alternating(mean / batches)
    random = _poisson(own) * np.reshape(going, (-1, 1))
    random[:, 0] += 1 - random.sum(axis=1)
    chance = apart * random + (1 - apart) * (turns - np.concatenate([turns[:, 1:], 0 * turns[:, :1]], axis=1))
    at = np.array((0, *IN_A_STEP))
    i = np.clip(np.searchsorted(at, _NUMBERS, side="right") - 1, 0, len(at) - 2)
    share = (_NUMBERS - at[i]) / (at[i + 1] - at[i])
    hats = np.zeros((len(_NUMBERS), len(at)))
    hats[_NUMBERS, i], hats[_NUMBERS, i + 1] = 1 - share, share
    return _sums(chance, hats)[:, 1:], 1 - chance[:, 0]


def _raised(base: Any, times: int) -> Any:
    """Return a column to a whole power by squares, which take a tenth of the time of numpy's powers."""
    if times == 1:
        return base
    half = _raised(base, times // 2)
    return half * half * base if times % 2 else half * half


def in_lanes(means: Any, prices: LanePrices, batches: Any, apart: float, mixed: bool) -> tuple[Any, Any]:
    """Return by mean prompts of a cycle what it takes longer, and the share of prompt steps: [mean, layout, place]."""
    many = batches[:, 0]
    alone = np.flatnonzero(many <= 1)
    order = [alone]
    longer: list[Any] = [np.zeros((len(means), len(alone), prices.mean.shape[-1]))]
    busy = np.zeros((len(means), *prices.mean.shape[1:]))
    for count in np.unique(many[many > 1]).astype(int).tolist():
        rows = np.flatnonzero(many == count)
        order.append(rows)
        chance, some = _in_a_step(tuple(means.tolist()), count, apart, mixed)
        values = prices.levels[:, :, rows].reshape(-1, len(rows), busy.shape[-1])
        down = np.argsort(-values, axis=0)
        values = np.take_along_axis(values, down, 0)
        share = np.minimum(np.cumsum(np.repeat(chance / 2, 2, axis=1)[:, down], axis=1), 1.0)
        less = values - np.concatenate([values[1:], 0 * values[:1]])
        idle = (count - 1) * np.einsum("mkln,kln->mln", share * _raised(1 - share, count - 1), less)
        longer.append(np.einsum("mk,kln->mln", chance, prices.mean[:, rows]) + idle)
        busy[:, rows] = 0.0 if mixed else np.minimum(some, FULL)[:, None, None]
    return np.concatenate(longer, axis=1)[:, np.argsort(np.concatenate(order))], busy
