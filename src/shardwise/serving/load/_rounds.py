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
    from shardwise.serving.load._rotation import GroupBatches, Rotation

# Fewer rounds are not worth the look.
_WORTH = 3
_NONE_RUNS = 1 << 30


class _DecodingBatch:
    """A batch that decodes: what steps from here on take alone."""

    __slots__ = ("batch", "own", "tokens")

    def __init__(self, batch: Scheduler, rounds: int) -> None:
        self.batch, self.tokens = batch, batch.decoding * batch.made
        decode, count, contexts = batch.table.decode, batch.decoding, batch.contexts
        self.own = [decode(count, (contexts + self.tokens * step) / count) for step in range(rounds)]

    def book(self, took: list[float], now: float) -> None:
        """Book the steps of its turns, to a time, as `Scheduler.run` does one by one."""
        batch, tokens = self.batch, self.tokens
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
        batch.now, batch.step = now, batch.step + steps
        batch.contexts += tokens * steps
        batch.used += tokens * steps
        batch.reserved -= batch.policy.reserved_share * tokens * steps


class _DecodingTurn:
    """The batches of a turn that decode, of groups that step together: as long as the slowest, and what each took."""

    __slots__ = ("batches", "now", "own", "took")

    def __init__(self, batches: list[Scheduler], rounds: int) -> None:
        self.batches = [_DecodingBatch(batch, rounds) for batch in batches]
        self.now = batches[0].now
        every = [batch.own for batch in self.batches]
        self.own = every[0] if len(every) == 1 else list(map(max, *every))
        self.took: list[float] = []


def go_round(rotation: Rotation, horizon: float) -> None:
    """Take as many turns as are alike, to a time at most; rounds before were alike."""
    groups, until = rotation.groups, horizon
    for group in groups:
        if group.front.pending and group.front.pending[0].ready - 1e-9 < until:
            until = group.front.pending[0].ready - 1e-9
    if rotation.hold.steps and any([group.front.waiting for group in groups]):
        return
    rounds = min([_rounds(group, rotation.next_seconds, until) for group in groups])
    if not _WORTH <= rounds < _NONE_RUNS:
        return
    together = [[one for group in groups if (one := group.batches[i]).decoding] for i in range(rotation.many)]
    lanes = [_DecodingTurn(batches, rounds) if batches else None for batches in together]
    decoding = [lane for lane in lanes if lane is not None]
    alike = [not group.front.waiting or len(set(group.causes)) == 1 for group in groups]
    if len(decoding) == 1 and all(alike):
        turns = _alone(rotation, lanes, rounds, until)
    else:
        turns = _take_turns(rotation, lanes, rounds, until)
    all_decode = all([len(batches) == len(groups) for batches in together])
    rotation.hold.go_on(turns if all_decode else 0)
    _book(rotation, decoding)


def _book(rotation: Rotation, lanes: list[_DecodingTurn]) -> None:
    """Book what the batches of all groups did in their turns."""
    for lane in lanes:
        for one in lane.batches:
            one.book(lane.took, lane.now)
    made = {id(one.batch): len(lane.took) * one.tokens for lane in lanes for one in lane.batches}
    for group in rotation.groups:
        group.front.allocated += sum([made.get(id(batch), 0) for batch in group.batches])
        group.noted, group.refused_until = False, -math.inf
        for index, batch in enumerate(group.batches):
            if batch.decoding:
                group.kept[index] = batch.now, batch.decoding, batch.used + batch.reserved


def _rounds(group: GroupBatches, at: float, until: float) -> int:
    """Return how many rounds of a group are alike for sure, of those that are over by a time.

    Where it has nothing to run they are `_NONE_RUNS`.
    """
    front, policy = group.front, group.policy
    tokens, grows, fullest = 0.0, 0.0, 0
    rounds = _NONE_RUNS
    for batch, (ends, had, _) in zip(group.batches, group.kept, strict=True):
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
        return 0 if front.waiting else _NONE_RUNS
    if fullest > 1:
        rounds = min(rounds, int((group.capacity - tokens - fullest * front.made) // grows) - 2)
    if front.waiting:
        first, room = front.waiting[0], policy.step_tokens - policy.mixed * fullest * front.table.verified
        # What it finds in the cache may change meanwhile.
        if first.blocks or (first.preemptions and first.target > room):
            return 0
    return rounds


def _alone(rotation: Rotation, lanes: list[_DecodingTurn | None], rounds: int, until: float) -> int:
    """Take steps of the only batch that decodes, of every group: each begins as the one before has ended.

    Its turn is next. The turns that were taken are returned.
    """
    (lane,) = [one for one in lanes if one is not None]
    ended, begin, launching = rotation.ended, lane.now, rotation.table.launching_seconds
    many, ahead, own = rotation.many, rotation.policy.batches_ahead, lane.own
    if ahead > 1 or launching > own[0] or rotation.launched > ended[0] or max(ended[-1], *rotation.free) > begin:
        return _take_turns(rotation, lanes, rounds, until)
    each = chain.from_iterable([repeat(one / many, many) for one in own])
    passed = list(accumulate(each, initial=begin))
    times = passed[::many]
    steps = min(bisect_left(times, until), len(times)) - 2
    if steps < 2:
        return 0
    lane.took = [times[step + 1] - times[step] for step in range(steps)]
    lane.now = times[steps]
    rotation.free = passed[(steps - 1) * many + 1 : steps * many + 1]
    ended.extend([times[steps - 1]] * many + [times[steps]] * many)
    rotation.launched = times[steps - 1 - ahead] + launching
    at = max(times[steps - 1], rotation.launched)
    _pass_time(rotation, at)
    return steps * many


def _pass_time(rotation: Rotation, at: float) -> None:
    """Let the clocks of those who wait run to a time."""
    for group in rotation.groups:
        if group.front.waiting:
            group.front.clocks[group.front.cause] += at - rotation.seen
    rotation.seen = at


def _take_turns(rotation: Rotation, lanes: list[_DecodingTurn | None], rounds: int, until: float) -> int:
    """Take turns of several batches that decode, one after another through the stages, and return how many."""
    ended, free, many = rotation.ended, rotation.free, len(lanes)
    launching, index, launched = rotation.table.launching_seconds, rotation.turn, rotation.launched
    waiting = [group for group in rotation.groups if group.front.waiting]
    turns = 0
    while turns < rounds * many:
        at = ended[0]
        if launched > at:
            at = launched
        if at >= until:
            break
        last = ended[-1]
        if at > last:
            ended.extend([at] * len(ended))
            last = at
        for group in waiting:
            group.front.clocks[group.front.cause] += at - rotation.seen
            group.front.cause = group.causes[index]
        rotation.seen, lane, turns = at, lanes[index], turns + 1
        index = (index + 1) % many
        if lane is None:
            ended.append(last)
            continue
        launched = at + launching
        begin = lane.now
        done = begin if begin > at else at
        each = lane.own[len(lane.took)] / many
        for stage, before in enumerate(free):
            free[stage] = done = (done if done > before else before) + each
        lane.took.append(done - begin)
        lane.now = begin + (done - begin)
        ended.append(done if done > last else last)
    rotation.turn, rotation.launched = index, launched
    return turns
