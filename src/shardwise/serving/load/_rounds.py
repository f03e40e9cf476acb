"""Rounds of a pipeline in which every batch that decodes goes on as before, many at once: `go_round`.

Where a whole round has changed nothing but contexts, the next ones are alike until somebody comes, a sequence ends or
the cache is full: who waits is refused again, since caches only fill. So of a turn what is left are its seconds and
when it is through each stage, the same sums in the same order as those of `Rotation.run`; of a batch that is alone its
steps follow each other at once, whatever the empty ones do. The last round before something happens is left to `run`,
which notes what is most.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, chain, repeat
from operator import mul
from typing import TYPE_CHECKING

from shardwise.serving.load._simulate import Scheduler

if TYPE_CHECKING:
    from shardwise.serving.load._rotation import Rotation

# Fewer rounds are not worth the look.
_WORTH = 3


class _DecodingBatch:
    """A batch that decodes: when its next step begins, what steps from there on take alone, and what each took."""

    __slots__ = ("batch", "now", "own", "tokens", "took")

    def __init__(self, batch: Scheduler, rounds: int) -> None:
        self.batch, self.now, self.tokens = batch, batch.now, batch.decoding * batch.made
        decode, count, contexts = batch.table.decode, batch.decoding, batch.contexts
        self.own = [decode(count, (contexts + self.tokens * step) / count) for step in range(rounds)]
        self.took: list[float] = []

    def book(self) -> None:
        """Book the steps of its turns, as `Scheduler.run` does one by one."""
        batch, took, tokens = self.batch, self.took, self.tokens
        if not took:
            return
        trace, steps, seconds = batch.trace, len(took), sum(took)
        booked, gap = round(tokens), batch.made
        trace.gaps.extend([(one / gap, booked) for one in took])
        trace.busy_seconds += seconds
        trace.running_seconds += seconds * batch.decoding
        used = accumulate(repeat(tokens, steps - 1), initial=batch.used)
        trace.cache_token_seconds += sum(map(mul, took, used))
        trace.iterations += steps
        batch.spent = batch.spent[0], batch.spent[1] + (seconds - sum(self.own[:steps]))
        batch.unseen = (batch.unseen + steps) % batch.policy.receive_steps
        batch.now, batch.step = self.now, batch.step + steps
        batch.contexts += tokens * steps
        batch.used += tokens * steps
        batch.reserved -= batch.policy.reserved_share * tokens * steps


def go_round(rotation: Rotation, horizon: float) -> None:
    """Take as many turns as are alike, to a time at most; rounds before were alike."""
    front, batches = rotation.front, rotation.batches
    until = horizon
    if front.pending and front.pending[0].ready - 1e-9 < until:
        until = front.pending[0].ready - 1e-9
    rounds = _rounds(rotation, until)
    if rounds < _WORTH:
        return
    lanes = [_DecodingBatch(batch, rounds) if batch.decoding else None for batch in batches]
    decoding = [lane for lane in lanes if lane is not None]
    if len(decoding) == 1 and (not front.waiting or len(set(rotation.causes)) == 1):
        _alone(rotation, decoding[0], until)
    else:
        _take_turns(rotation, lanes, rounds, until)
    made = sum([len(lane.took) * lane.tokens for lane in decoding])
    for lane in decoding:
        lane.book()
    front.allocated += made
    rotation.noted, rotation.refused_until = False, -math.inf
    for index, batch in enumerate(batches):
        if batch.decoding:
            rotation.kept[index] = batch.now, batch.decoding, batch.used + batch.reserved


def _rounds(rotation: Rotation, until: float) -> int:
    """Return how many rounds are alike for sure, of those that are over by a time."""
    front, policy, at = rotation.front, rotation.policy, rotation.next_seconds
    tokens, grows, fullest = 0.0, 0.0, 0
    rounds = 1 << 30
    for batch, (ends, had, _) in zip(rotation.batches, rotation.kept, strict=True):
        count = batch.decoding
        tokens += batch.used + batch.reserved
        if count:
            if had != count:
                return 0
            rounds = min(rounds, batch.ends[0][0] - batch.step - 2)
            seconds = batch.table.decode(count, batch.contexts / count)
            if math.isfinite(until):
                rounds = min(rounds, int((until - batch.now) / seconds) + 1)
            grows, fullest = grows + count * batch.made, max(fullest, count)
        elif ends > at:
            return 0
    if not fullest:
        return 0
    if fullest > 1:
        rounds = min(rounds, int((rotation.capacity - tokens - fullest * front.made) // grows) - 2)
    if front.waiting:
        first, room = front.waiting[0], policy.step_tokens - policy.mixed * fullest * front.table.verified
        # What it finds in the cache may change meanwhile.
        if first.blocks or (first.preemptions and first.target > room):
            return 0
    return rounds


def _alone(rotation: Rotation, lane: _DecodingBatch, until: float) -> None:
    """Take steps of the only batch that decodes, whose turn is next: each begins as the one before has ended."""
    ended, begin, launching = rotation.ended, lane.now, rotation.front.table.launching_seconds
    many, ahead, own = len(rotation.batches), rotation.policy.batches_ahead, lane.own
    if ahead > 1 or launching > own[0] or rotation.launched > ended[0] or max(ended[-1], *rotation.free) > begin:
        _take_turns(rotation, [lane if lane.batch is batch else None for batch in rotation.batches], len(own), until)
        return
    each = chain.from_iterable([repeat(one / many, many) for one in own])
    passed = list(accumulate(each, initial=begin))
    times = passed[::many]
    steps = min(bisect_left(times, until), len(times)) - 2
    if steps < 2:
        return
    lane.took = [times[step + 1] - times[step] for step in range(steps)]
    lane.now = times[steps]
    rotation.free = passed[(steps - 1) * many + 1 : steps * many + 1]
    ended.extend([times[steps - 1]] * many + [times[steps]] * many)
    rotation.launched = times[steps - 1 - ahead] + launching
    at = max(times[steps - 1], rotation.launched)
    if rotation.front.waiting:
        rotation.front.clocks[rotation.front.cause] += at - rotation.seen
    rotation.seen = at


def _take_turns(rotation: Rotation, lanes: list[_DecodingBatch | None], rounds: int, until: float) -> None:
    """Take turns of several batches that decode, one after another through the stages."""
    front, ended, free, many = rotation.front, rotation.ended, rotation.free, len(lanes)
    launching, clocks, waiting = front.table.launching_seconds, front.clocks, bool(front.waiting)
    index, launched, seen, cause = rotation.turn, rotation.launched, rotation.seen, front.cause
    for _ in range(rounds * many):
        at = ended[0]
        if launched > at:
            at = launched
        if at >= until:
            break
        last = ended[-1]
        if at > last:
            ended.extend([at] * len(ended))
            last = at
        if waiting:
            clocks[cause] += at - seen
            cause = rotation.causes[index]
        seen, lane = at, lanes[index]
        index = (index + 1) % many
        if lane is None:
            ended.append(last)
            continue
        launched = at + launching
        begin = done = lane.now
        each = lane.own[len(lane.took)] / many
        for stage, before in enumerate(free):
            free[stage] = done = (done if done > before else before) + each
        lane.took.append(done - begin)
        lane.now = begin + (done - begin)
        ended.append(done if done > last else last)
    rotation.turn, rotation.launched, rotation.seen, front.cause = index, launched, seen, cause
