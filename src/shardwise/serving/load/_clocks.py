"""The closed form between two clocks: prices of prompts on a device that lately ran none, and on one that runs many.

Prompts come to a device that has been at rest for some of the time, so that a share of their seconds is at the highest
clock (`mean_left`), which is priced between both. What they make of the time decides that share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.arrays import np
from shardwise.cost import Burst
from shardwise.records import replace
from shardwise.serving.load._batch_times import FULL
from shardwise.serving.load._lockstep import between_prices
from shardwise.serving.load._longest import PROMPTS

if TYPE_CHECKING:
    from shardwise.serving.load._steady import Replicas

_ROUNDS = 4
# A share so near all is that, whatever other layouts have.
_NEAR = 1e-3
_LEVELS = 33  # of the integral over a bucket, an odd number


def at_rate(form: Replicas, rate: Any) -> Replicas:
    """Return the closed form with prompts at the clock that is left to them, at requests a second of each batch."""
    highest = form.highest
    if highest is None:
        return form
    share = share_at_rate(form, rate)
    share = np.where(share > 1 - _NEAR, 1.0, share)
    if (share == 1).all():
        return highest
    prices = replace(form.prices, highest=None), replace(highest.prices, highest=None)
    mixed = replace(form, prices=between_prices(*prices, share[:, None]))
    vars(mixed).update(_seconds=_of_both(form.lasting_seconds, highest.lasting_seconds, share), _weights=form._weights)
    return mixed


def when_full(form: Replicas, seconds: Callable[[Replicas], Any]) -> Any:
    """Return what a full queue takes, of which a share is at the highest clock: [layout, place]."""
    if form.highest is None:
        return seconds(form)
    return _of_both(seconds(form), seconds(form.highest), form.full_share)


def _of_both(lasting: Any, highest: Any, share: Any) -> Any:
    return (1 - share)[:, None] * lasting + share[:, None] * highest


def share_at_rate(form: Replicas, rate: Any) -> Any:
    """Return the share of prompts' seconds at the highest clock, at requests a second of each batch: [layout].

    Near the capacity it becomes what it is there.
    """
    moments, p = form.moments, form.prices
    steps = max(moments.steps, 1e-9)
    decode, first = (np.asarray(one, float) for one in (p.decode, p.added[0]))
    load = np.minimum(rate[:, None] * first, 0.9)
    # As many decode as come meanwhile (Little), the first number of sequences that is so many.
    served = rate[:, None] * steps * decode / (1 - load) <= p.counts
    place = np.minimum((np.cumsum(served, axis=-1) == 0).sum(axis=-1), p.counts.shape[-1] - 1)
    running = rate * steps * np.take_along_axis(decode, place[:, None], 1)[:, 0]
    share = _share(form, rate, place, -np.expm1(-running) if moments.steps else 0.0 * rate)
    busy = np.minimum(rate * form.lasting_seconds[:, -1], 1.0)
    return share + busy**8 * (form.full_share - share)


def share_when_full(form: Replicas, seconds: Any) -> Any:
    """Return the same of a full queue, which takes so many seconds for each request of a batch: [layout]."""
    last = np.full(len(seconds), form.prices.counts.shape[-1] - 1)
    return _share(form, 1 / seconds, last, np.ones(len(seconds)) * (form.moments.steps > 0))


def _share(form: Replicas, rate: Any, place: Any, decoding: Any) -> Any:
    """Return the share at a rate where sequences of a place decode a share `decoding` of the time.

    A step with prompts is one of theirs, whatever decodes beside them. Pauses between runs of such steps are
    exponential, these are busy periods (M/G/1).
    """
    p, policy, rows = form.prices, form.policy, np.arange(len(rate))
    if p.burst is None:
        return 0.0 * rate
    decode = np.asarray(p.decode, float)[rows, place] * decoding
    added, ahead = np.asarray(p.added, float)[:, rows, place], np.asarray(p.ahead, float)[rows, place]
    arrivals = rate * decode
    for _ in range(_ROUNDS):
        each = added_by(added, ahead, arrivals)
        load = np.minimum(rate * each, FULL)
        arrivals = rate * decode / (1 - load)
    busy, run = load, each
    if policy.mixed:
        pieces = np.maximum(np.asarray(p.pieces, float)[rows, place], 1.0)
        busy, run = 1 - (1 - load) * np.exp(-arrivals * pieces), each + pieces * decode
    lanes = form.batches.lanes
    spread = np.maximum(np.asarray(p.spread, float)[rows, place] - 1, 0.0)
    busy = np.minimum(busy, FULL)
    runs = run / lanes / (1 - busy)
    return mean_left(p.burst, busy, runs, (spread + busy) / (1 - busy))


def added_by(added: Any, ahead: Any, arrivals: Any) -> Any:
    """Return what a prompt adds to a step in which so many arrive on average, from what 1, 2, ... of them add."""
    mean = np.maximum(arrivals, 1e-9)
    chance, whole, seen = np.exp(-mean), 0.0, 0.0
    past = chance
    for k in range(1, PROMPTS + 1):
        chance = chance * mean / k
        whole, seen, past = whole + chance * added[k - 1], seen + k * chance, past + chance
    beyond, rest = np.maximum(mean - seen, 0.0) / PROMPTS, np.maximum(1 - past, 0.0)
    return (whole + np.maximum(beyond * ahead, rest * added[-1])) / mean


def mean_left(burst: Burst, busy: Any, each: Any, cv2: Any) -> Any:
    """Return the share of the highest clock that is left to prompts, in the mean of their time: [layout].

    They run a share `busy` of the time, `each` seconds of a squared cv at once. Exact where these and the pauses
    between are exponential: a bucket that fills at 1 and runs out at `recovery` (Anick, Mitra and Sondhi 1982, of one
    source and a bucket with an end); times of other spreads differ by that of their heavy traffic.

    >>> burst = Burst(share=0.1, full_seconds=0.1, gone_seconds=0.2, recovery=1.0, devices=())
    >>> mean_left(burst, np.array([0.01, 0.5, 0.99]), np.array([0.02, 0.02, 0.02]), 0.0).round(2).tolist()
    [1.0, 0.68, 0.0]
    """
    busy, each = np.clip(busy, 1e-9, 1 - 1e-9), np.maximum(each, 1e-6)
    ends, begins = 1 / each, busy / (1 - busy) / each
    falls = (ends - begins / burst.recovery) * 2 / (1 + cv2)
    gone, full = burst.gone_seconds, burst.full_seconds
    at = np.arange(_LEVELS) * (gone / (_LEVELS - 1))
    left = np.clip((gone - at) / (gone - full), 0.0, 1.0)
    # The density of levels up to a factor, of the least exponent 0, by Simpson's rule; at the end is the rest.
    powers = -falls[:, None] * at
    most = powers.max(axis=-1, keepdims=True)
    likely = np.exp(powers - most)
    weights = np.array([1.0, *[4.0, 2.0] * (_LEVELS // 2 - 1), 4.0, 1.0]) * (gone / (3 * (_LEVELS - 1)))
    whole = (likely * weights).sum(axis=-1) + likely[:, -1] / ends
    return (likely * weights * left).sum(axis=-1) / whole
