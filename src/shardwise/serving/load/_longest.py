"""What the batch with the most and the longest prompts adds, and of a step of several groups that with most of them."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.arrays import np
from shardwise.serving._policy import Policy
from shardwise.serving.load._batches import Batches, most_of_any

# Prompts of one step that are priced apart; more cost in proportion.
PROMPTS = 8
# Prompts of a step that are shared out to groups one by one; what more are apart grows with their root.
_SHARED_OUT = 64


def in_groups(prompts: Any, room: Any, batches: Batches, policy: Policy, apart: float) -> tuple[Any, Any]:
    """Return the prompts of the group with most of those of a step, and how many groups have any.

    Groups take them in turns, or where sequences ended, so far `apart` that it is any group; what one has no `room` for
    runs in the next step, with those of the others.
    """
    apart = 1.0 if policy.balances != "turns" else apart
    groups, numbers = batches.groups_each, np.arange(_SHARED_OUT + 1.0)
    most, some = prompts + 0.0 * groups, 1.0 + 0.0 * groups * prompts
    for count in np.unique(groups[groups > 1]).astype(int).tolist():
        row = np.flatnonzero(groups[:, 0] == count)
        each = most[..., row, :]
        longest = apart * _shared_out(count) + (1 - apart) * np.ceil(numbers / count)
        more = np.maximum(np.sqrt(each / _SHARED_OUT), 1.0)
        beyond = np.interp(each, numbers, longest - numbers / count)
        even = np.minimum(each, count)
        some[..., row, :] = apart * count * (1 - (1 - 1 / count) ** each) + (1 - apart) * even
        most[..., row, :] = np.minimum(np.maximum(each / count + more * beyond, 1.0), np.maximum(each, 1.0))
    most = np.where(groups > 1, np.minimum(most, np.maximum(prompts / groups, room)), most)
    return most, np.maximum(some, np.where(groups > 1, prompts / most, 1.0))


@cache
def _shared_out(groups: int) -> Any:
    """Return the mean of the most prompts of a group of some, of 0, 1, ... prompts that are each in any."""
    return np.array([0.0, *(most_of_any(k, groups) for k in range(1, _SHARED_OUT + 1))])


def own_of(means: Any, ahead: Any, each: Any) -> Any:
    """Return what so many prompts of a batch add, with a part; more than are priced in proportion."""
    at = np.minimum(each.astype(int), PROMPTS - 1)[None] - 1
    low, high = (np.take_along_axis(means, np.broadcast_to(i, (1, *means.shape[1:])), 0)[0] for i in (at, at + 1))
    own = low + np.clip(each - at[0] - 1, 0.0, 1.0) * (high - low)
    return np.where(each > PROMPTS, np.maximum(own, ahead * each / PROMPTS), own)


def longest_of(
    owns: tuple[Any, Any], prompts: tuple[Any, Any], batch: tuple[Any, Any], filled: tuple[Any, Any]
) -> tuple[Any, Any]:
    """Return the mean and the variance of what the longest batch adds, of those that have prompts.

    A prompt takes so long in the mean and in equal classes. The longest of some prompts by their classes; sums of
    several in a batch spread with their root: half are as much shorter as half are longer, until a step is full. Where
    batches have more prompts than usual by chance, that and their lengths spread apart from each other.
    """
    (mean, alone), (each, some), (full, chance), classes = prompts, batch, filled, len(prompts[1])
    shares = np.arange(classes + 1) / classes
    likely = [shares[c + 1] ** some - shares[c] ** some for c in range(classes)]
    most, square, whole, whole_square = (
        sum(x * one[c] ** power for c, x in enumerate(likely)) for one in (alone, full) for power in (1, 2)
    )
    (usual, own), longer = owns, np.sqrt(each) * (most - mean)
    middle, apart = usual + _either(own - usual, longer), np.sqrt(each * np.maximum(square - most**2, 0.0))
    spread = np.sqrt(np.maximum(whole_square - whole**2, 0.0))
    low, high = np.minimum(middle - apart, whole - spread), np.minimum(middle + apart, whole + spread)
    often = np.where(middle + apart > whole + spread, chance, 0.5)
    return low + often * (high - low), often * (1 - often) * (high - low) ** 2


def _either(one: Any, other: Any) -> Any:
    """Return the root of the squares of two, in parts of each; the other where the one is nothing."""
    more, longer = np.asarray(one), np.asarray(other)
    both = np.maximum(np.sqrt(more**2 + longer**2), 1e-30)
    return one * (more / both) + other * np.where(more > 0, longer / both, 1.0)


def as_often(own: Any, pieces: Any) -> Any:
    """Return as many values as there are, each as often as it has pieces: [class, prompts, layout, place]."""
    shares, at = np.cumsum(pieces, axis=0) / pieces.sum(axis=0), (np.arange(len(own)) + 0.5) / len(own)
    if (pieces == pieces[:, :, :1, :1]).all():
        return own[np.searchsorted(shares[:, 0, 0, 0], at)]
    places = np.stack([(shares < one).sum(axis=0) for one in at])
    return np.take_along_axis(own, np.broadcast_to(places, own.shape), 0)
