"""Seconds of the pipeline part of a step for DualPipe as longest paths (arXiv:2412.19437; deepseek-ai/DualPipe).

Device d of the first half holds stage d, "early", for the micro-batches that enter at its end, and stage p-1-d,
"late", for the others; the second half mirrors it, so half of the devices are evaluated and h = p/2 - 1 is the middle
one. "Inward" is the pair of an early forward with a late backward, whose results go towards the middle, "outward" the
pair of a late forward with an early backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from shardwise.ledger.number import X, above, ceil, is_plain, largest, maximum, minimum, total
from shardwise.records import dataclass
from shardwise.training.schedules._1f1b import one_f_one_b_order
from shardwise.training.schedules._stage_times import distinct, longest, overlaps, running_largest, slowest_work, there
from shardwise.training.schedules._types import (
    FULL,
    B,
    F,
    Kind,
    PipelineSchedule,
    PipelineShape,
    StageRun,
    Task,
    TaskOrder,
    W,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lane(Generic[X]):
    """One kind of task: its seconds on a device, and those of all devices up to and with it, messages included."""

    own: X
    through: X

    @property
    def before(self) -> X:
        return self.through - self.own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Device(Generic[X]):
    """One device of the first half."""

    present: X
    index: X
    middle: X
    forward_early: _Lane[X]
    forward_late: _Lane[X]
    gradient_early: _Lane[X]
    gradient_late: _Lane[X]
    inward: _Lane[X]
    outward: _Lane[X]
    full_early: X
    full_late: X
    weights: X

    @property
    def late_step(self) -> X:
        """Seconds of a late backward and a late forward, one after the other."""
        return self.full_late + self.forward_late.own


@dataclass(frozen=True, kw_only=True, slots=True)
class _Half(Generic[X]):
    """The devices of the first half in order, p/2 - 1, half of the micro-batches, and the message that turns."""

    devices: tuple[_Device[X], ...]
    present: tuple[X, ...]
    last: X
    rounds: X
    turn: X
    round_mean: X
    gradient_early: X
    gradient_late: X


_Costs = tuple[X, ...]


def _segments(runs: Sequence[StageRun[X]]) -> list[tuple[X, _Costs[X]]]:
    """Devices in a row whose early and late stages lie in one run each: their count and six costs, absent ones zero."""
    segments: list[tuple[X, _Costs[X]]] = []
    for (i, k), count in overlaps(runs).items():
        if is_plain(count, 0):
            continue
        early, late, on = runs[i], runs[k], minimum(count, 1)
        costs = (early.forward, early.backward_input, early.backward_weight,
                 late.forward, late.backward_input, late.backward_weight)  # fmt: skip
        segments.append((count, tuple(there(on, cost) for cost in costs)))
    return segments


def _half(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> _Half[X]:
    p = shape.num_stages
    devices: list[_Device[X]] = []
    zero = p * 0
    index = zero
    before: _Costs[X] = (zero,) * 6
    for count, costs in _segments(runs):
        last = maximum(count - 1, 0)
        offsets = [zero, last] if shape.overlap_send else [zero, minimum(last, 1), last]
        for offset in distinct(offsets):
            sums = tuple(b + offset * c for b, c in zip(before, costs, strict=True))
            devices.append(_device(minimum(count, 1), index + offset, costs, sums, shape))
        index = index + count
        before = tuple(b + count * c for b, c in zip(before, costs, strict=True))
    return _Half(
        devices=tuple(devices),
        present=tuple(device.present for device in devices),
        last=p / 2 - 1,
        rounds=shape.num_micro / 2,
        turn=shape.send if shape.overlap_send else zero,
        round_mean=total(before) / (p / 2),
        gradient_early=before[1] + (p / 2 - 1) * shape.send,
        gradient_late=before[4] + p / 2 * shape.send,
    )


def _device(present: X, index: X, costs: _Costs[X], sums: _Costs[X], shape: PipelineShape[X]) -> _Device[X]:
    """One device. What goes outwards stops at device 0, which therefore does not send it."""
    c, zero = shape.send, index * 0
    in_send = zero if shape.overlap_send else c * present
    out_send = zero if shape.overlap_send else c * minimum(index, 1) * present
    out_hops = index if shape.overlap_send else maximum(index - 1, 0)

    def inwards(own: X, before: X) -> _Lane[X]:
        return _Lane(own=own + in_send, through=before + own + in_send + index * c)

    def outwards(own: X, before: X) -> _Lane[X]:
        return _Lane(own=own + out_send, through=before + own + out_send + out_hops * c)

    fe, ge, we, fl, gl, wl = costs
    fe0, ge0, we0, fl0, gl0, wl0 = sums
    return _Device(
        present=present,
        index=index,
        middle=above(index, shape.num_stages / 2 - 1.5, present, 0),
        forward_early=inwards(fe, fe0),
        gradient_late=inwards(gl, gl0),
        inward=inwards(fe + gl + wl, fe0 + gl0 + wl0),
        forward_late=outwards(fl, fl0),
        gradient_early=outwards(ge, ge0),
        outward=outwards(fl + ge + we, fl0 + ge0 + we0),
        full_early=ge + we + out_send,
        full_late=gl + wl + in_send,
        weights=(we + wl) / 2,
    )


def dualpipe_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of DualPipe.

    A path fills inwards, starts the pairs, stays on a device or moves inwards, and drains outwards. With equal
    stages this is m (f + b) plus the larger of (p - 2) f and (p/2 - 2) f + (p/2 - 1) g plus, where it is positive,
    (p/2 - 1)(g - w): the bubble of the DualPipe README, (p/2 - 1)(f + 2g - w), less one forward, because the middle
    devices do not pair their first forward and backward.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=8.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=8.0, num_chunks=1.0, num_micro=20.0, send=0.0, overlap_send=True)
    >>> dualpipe_seconds(stages, shape)
    66.0
    """
    half = _half(runs, shape)
    seconds = _drained(half, _pairs_end(half, _pairs_start(half, _first_late_forward(half))))
    return above(shape.num_stages, 1, seconds, shape.num_micro * slowest_work(runs, mirrored=False))


def least_dualpipe_seconds(runs: Sequence[StageRun[X]], num_stages: X, num_micro: X) -> X:
    """Return seconds that `dualpipe_seconds` is never below, messages or not; they never fall when a task gets slower.

    One path through it: in to the middle, the pairs there, pairs outwards to device 0, and the last backwards there.

    >>> stages = (StageRun(count=8.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> least_dualpipe_seconds(stages, 8.0, 20.0)
    66.0
    """
    shape = PipelineShape(
        num_stages=num_stages, num_chunks=1 + 0 * num_micro, num_micro=num_micro, send=0 * num_micro, overlap_send=True
    )
    half = _half(runs, shape)
    outer = half.devices[0]
    drain = outer.full_late + (half.last + 1) * outer.full_early
    ways = []
    for d in half.devices:
        fill = d.forward_early.through + d.forward_late.own + half.last * (d.forward_early.own + d.forward_late.own)
        turn = d.forward_early.own + d.full_late + (half.rounds - half.last - 2) * (d.inward.own + d.outward.own)
        ways.append(d.middle * (fill + turn + d.outward.through + drain))
    busy = num_micro * slowest_work(runs, mirrored=True)
    return maximum(busy, above(num_stages, 1, largest(ways), 0 * busy))


def _first_late_forward(half: _Half[X]) -> list[X]:
    """When each device ends its first late forward: it comes over the middle, from a device busy with early ones."""
    slowest = running_largest([d.forward_early.own for d in half.devices])
    reached = []
    for forward, d in zip(slowest, half.devices, strict=True):
        early = d.forward_early.through + 2 * (half.last - d.index) * forward
        reached.append(there(d.present, early + d.middle * half.turn + d.forward_late.through))
    best = running_largest(reached[::-1])[::-1]
    return [at - d.forward_late.before for at, d in zip(best, half.devices, strict=True)]


def _pairs_start(half: _Half[X], first: Sequence[X]) -> tuple[list[X], list[X]]:
    """When each device ends its first inward pair, and when it starts its first outward pair."""
    entered = [at - d.gradient_late.before for at, d in zip(first, half.devices, strict=True)]
    inwards = running_largest(entered)
    ends: list[X] = []
    starts: list[X] = []
    for k, d in enumerate(half.devices):
        left = half.last - d.index
        alternating = d.index * (d.forward_early.own + d.forward_late.own + d.middle * half.turn)
        own = first[k] + alternating + left * d.late_step
        reached = [at + left * i.late_step for at, i in zip(entered[:k], half.devices[:k], strict=True)]
        reached.append(inwards[k] + left * d.late_step)
        ways = (own + d.middle * d.forward_early.own, largest(reached) + d.gradient_late.before)
        ends.append(largest(ways) + d.inward.own + d.middle * (d.full_late - d.inward.own))
        starts.append(there(d.present, ends[-1] + d.middle * half.turn + d.outward.through))
    best = running_largest(starts[::-1])[::-1]
    return ends, [at - d.outward.through for at, d in zip(best, half.devices, strict=True)]


def _pairs_end(half: _Half[X], pairs: tuple[list[X], list[X]]) -> list[X]:
    """When each device ends its last outward pair: devices nearer the middle run inward pairs for longer."""
    reached = []
    for first, at, d in zip(*pairs, half.devices, strict=True):
        num_rounds = half.rounds - 2 * half.last - 2 + d.index
        steady = maximum(num_rounds * (d.inward.own + d.outward.own), _swinging(half, d, num_rounds))
        reached.append(there(d.present, above(num_rounds, 0, at + steady, first)) - d.inward.through)
    reached = [at + d.inward.through for at, d in zip(running_largest(reached), half.devices, strict=True)]
    left = [half.last - d.index for d in half.devices]
    outwards = [
        there(d.present, at + d.middle * half.turn + d.outward.through)
        for at, d in zip(reached, half.devices, strict=True)
    ]
    ends = []
    for k, d in enumerate(half.devices):
        step = d.full_late + d.outward.own
        ways = [at + num_left * step for at, num_left in zip(outwards[k:], left[k:], strict=True)]
        ends.append(largest(ways) - d.outward.before)
    return ends


def _swinging(half: _Half[X], d: _Device[X], num_rounds: X) -> X:
    """Rounds of pairs on a path that swings between device 0 and the middle, once in p/2 rounds, messages included."""
    from_middle = 2 * num_rounds - ceil(num_rounds / (half.last + 1))
    from_outer = 2 * (num_rounds - 1) - ceil((num_rounds - 1) / (half.last + 1))
    messages = maximum(d.middle * from_middle + (1 - d.middle) * from_outer - 1, 0)
    return num_rounds * half.round_mean + messages * half.turn


def _drained(half: _Half[X], ends: Sequence[X]) -> X:
    """The last backwards: those of one device, or from device 0 inwards, to stay there or to turn and go outwards."""
    own = [
        at + (d.index + 1) * d.full_late + (half.last + 1) * d.full_early
        for at, d in zip(ends, half.devices, strict=True)
    ]
    entered = [
        (1 - minimum(d.index, 1)) * (at + d.full_late - d.gradient_late.through)
        for at, d in zip(ends, half.devices, strict=True)
    ]
    left = [(d.index + 1) * d.weights - d.gradient_early.before for d in half.devices]
    stay = [
        d.present
        * (d.gradient_late.through + (half.last - d.index + 1) * d.gradient_early.own + (half.last + 1) * d.weights)
        for d in half.devices
    ]
    out = half.gradient_late + half.gradient_early + largest(left)
    around = longest(half.present, entered) + maximum(out, largest(stay))
    return maximum(longest(half.present, own), around)


class PairedRank:
    """Emits the slots of one device, counting micro-batches per chunk from the `first` of each."""

    def __init__(self, flip: int = 0, first: tuple[int, int] = (0, 0)) -> None:
        self.order: TaskOrder = []
        self.flip, self.first = flip, first
        self.next = {F: [0, 0], FULL: [0, 0]}
        self.late: list[Task] = []

    def task(self, kind: Kind, phase: int) -> Task:
        """Return the next task of a phase; phase 0 is the direction that enters at this half of the devices."""
        chunk = phase ^ self.flip
        counts = self.next[F if kind == F else FULL]
        counts[chunk] += 1
        return Task(kind, self.first[chunk] + counts[chunk] - 1, chunk)

    def forward(self, phase: int) -> None:
        self.order.append((self.task(F, phase),))

    def backward(self, phase: int, *, split: bool = False) -> None:
        task = self.task(B if split else FULL, phase)
        self.order.append((task,))
        if split:
            self.late.append(Task(W, task.micro_batch, task.chunk))

    def weight(self) -> None:
        self.order.append((self.late.pop(0),))

    def pair(self, forward_phase: int, backward_phase: int) -> None:
        self.order.append((self.task(F, forward_phase), self.task(FULL, backward_phase)))


def dualpipe_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """The eight steps of DualPipe (arXiv:2412.19437, figure 5; deepseek-ai/DualPipe, dualpipe/dualpipe.py)."""
    if p == 1:
        return one_f_one_b_order(p, v, m, i)
    half = min(i, p - 1 - i)
    rank = PairedRank(int(i >= p // 2), (0, m // 2))
    return paired_order(rank, half, p // 2 - 1 - half, m // 2 - p + half + 1)


def paired_order(rank: PairedRank, half: int, outer: int, steady: int) -> TaskOrder:
    """Return the steps of a device with `half` devices outside of it, `outer` inside, and so many rounds of pairs."""
    for _ in range(2 * outer):
        rank.forward(0)
    for _ in range(half + 1):
        rank.forward(0)
        rank.forward(1)
    for _ in range(outer):
        rank.backward(1, split=True)
        rank.weight()
        rank.forward(1)
    for k in range(steady):
        if k == 0 and outer == 0:
            rank.forward(0)
            rank.backward(1)
        else:
            rank.pair(0, 1)
        rank.pair(1, 0)
    for _ in range(outer):
        rank.backward(1)
        rank.pair(1, 0)
    _drain_dualpipe(rank, half, outer)
    return rank.order


def _drain_dualpipe(rank: PairedRank, half: int, outer: int) -> None:
    """The last backwards, the second half of them with their weight gradients put off."""
    for k in range(half + 1):
        rank.backward(1, split=k >= (half + 2) // 2)
        rank.backward(0, split=k >= (half + 1) // 2)
    for _ in range(outer):
        rank.weight()
        rank.backward(0, split=True)
    while rank.late:
        rank.weight()


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight on a device, both of its stages together: p + 1 (the DualPipe README)."""
    p = shape.num_stages
    return minimum(p + minimum(p - 1, 1) + 0 * stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="dualpipe",
    order=dualpipe_order,
    seconds=dualpipe_seconds,
    in_flight=_in_flight,
    tolerance=0.034,
    least=lambda runs, shape: least_dualpipe_seconds(runs, shape.num_stages, shape.num_micro),
)
