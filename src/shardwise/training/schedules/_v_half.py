"""V-Half: two pieces of the model a stage in a V, with half of the activations of 1F1B (arXiv:2405.15362).

The order is the authors' own: a pattern of six slots that every micro-batch repeats, whose fill and drain move up as
far as the memory of the pattern lets them (sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv_greedy.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

from shardwise.ledger.number import X, ceil, minimum
from shardwise.training.schedules._stage_times import SendSeconds, StageWait, waiting_seconds
from shardwise.training.schedules._types import B, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder, W

Pattern = tuple[int, ...]
# Of a stage, the slots of all micro-batches: forward down and up, backward down and up, weight gradients if placed.
_Slots = list[list[int]]
_PERIOD, _WEIGHT = 6, 4
UnitRow = tuple[tuple[float, float, float], ...]


def v_half_pattern(p: int, i: int) -> Pattern:
    """The slots of the first micro-batch on device i: two forwards, two backwards (stable_pattern_v_half)."""
    gap = 0 if p % 2 else 3
    return 2 * i, 3 * p - i - 2, 3 * p + gap + 2 * i - 1, 6 * p + gap - i - 2


def _weights(slots: _Slots) -> _Slots:
    """Add the weight gradients, each in the first slot without a pass after its backward (put_w)."""
    passes = {slot: kind for kind, several in enumerate(slots) for slot in several}
    last, waiting, weights = max(passes), 0, []
    for slot in range(last + 1):
        if slot not in passes:
            weights += [slot] if waiting else []
            waiting -= bool(waiting)
        waiting += passes.get(slot, 0) >= 2
    return [*slots, [*weights, *range(last + 1, last + 1 + waiting)]]


def _most_held(slots: _Slots) -> int:
    """Return the most pieces of which a stage holds activations (mem_of_stage)."""
    whole = slots if len(slots) > _WEIGHT else _weights(slots)
    last = max(several[-1] for several in slots)
    change = [0] * (last + 1)
    for kind, step in ((0, 1), (1, 1), (_WEIGHT, -1)):
        for slot in whole[kind]:
            if slot <= last:
                change[slot] = step
    return max(accumulate(change))


def _slot_order(stages: list[_Slots]) -> list[tuple[int, int, int, int]]:
    return sorted(
        (slot, i, kind, k)
        for i, slots in enumerate(stages)
        for kind, several in enumerate(slots)
        for k, slot in enumerate(several)
    )


def _made(stages: list[_Slots], i: int, kind: int, k: int) -> list[int]:
    """Return the slots of what a pass needs: its neighbour's, its own before it, and that of the micro-batch before."""
    before = [stages[i][kind][k - 1]] if k else []
    if kind == _WEIGHT:
        return before
    neighbour = i - 1 if kind in (0, 2) else i + 1
    before += [stages[neighbour][kind][k]] if 0 <= neighbour < len(stages) else []
    return before + ([stages[i][kind - 1][k]] if kind else [])


def _reordered(stages: list[_Slots], m: int, *, filling: bool) -> list[_Slots]:
    """Move the passes of fill and drain up, none beyond the memory of the pattern; the steady state stays (reorder)."""
    stages = [[list(several) for several in (_weights(slots) if filling else slots)] for slots in stages]
    most = max(map(_most_held, stages))
    used: list[set[int]] = [set() for _ in stages]
    steady = ended = False
    for slot, i, kind, k in _slot_order(stages):
        steady |= kind == 3 and not i
        last = steady and not ended and not kind and k == m - 1
        if not last and (ended or (filling and not steady)):
            own = stages[i]
            backward = [sorted(own[2] + own[3])[k]] if kind == _WEIGHT else []
            for early in range(max(_made(stages, i, kind, k) + backward, default=-1) + 1, slot + 1):
                own[kind][k] = early
                if early == slot or (early not in used[i] and _most_held(own) <= most):
                    break
        ended |= last
        used[i].add(stages[i][kind][k])
    return _squeezed(stages if filling else [_weights(slots) for slots in stages])


def _squeezed(stages: list[_Slots]) -> list[_Slots]:
    """Start every pass as soon as its stage is free and what it needs is there (eager_execution_time at unit costs)."""
    free = [0] * len(stages)
    for _, i, kind, k in _slot_order(stages):
        start = max([free[i], *(slot + 1 for slot in _made(stages, i, kind, k))])
        stages[i][kind][k], free[i] = start, start + 1
    return [slots[:_WEIGHT] for slots in stages]


@cache
def controlled_orders(patterns: tuple[Pattern, ...], m: int) -> tuple[TaskOrder, ...]:
    """Return the order of every device whose first micro-batch runs in these slots (schedule_from_pattern)."""
    stages = [[list(range(slot, slot + _PERIOD * m, _PERIOD)) for slot in pattern] for pattern in patterns]
    for filling in (True, False):
        stages = _reordered(stages, m, filling=filling)
    return tuple(map(_tasks, stages))


def _tasks(slots: _Slots) -> TaskOrder:
    """Return the tasks of a device; a weight gradient of the piece on the way up goes before one on the way down."""
    passes = {slot: (kind, k) for kind, several in enumerate(slots) for k, slot in enumerate(several)}
    order: TaskOrder = []
    waiting: tuple[list[int], list[int]] = ([], [])
    for slot in range(max(passes) + 1):
        if slot in passes:
            kind, k = passes[slot]
            order.append((Task(F, k, kind) if kind < 2 else Task(B, k, 3 - kind),))
            if kind >= 2:
                waiting[3 - kind].append(k)
        elif any(waiting):
            chunk = 1 if waiting[1] else 0
            order.append((Task(W, waiting[chunk].pop(0), chunk),))
    return order + [(Task(W, k, chunk),) for chunk in (1, 0) for k in waiting[chunk]]


def v_half_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """The authors' order: the pattern of V-Half, filled and drained as early as its memory allows."""
    return controlled_orders(tuple(v_half_pattern(p, stage) for stage in range(p)), m)[i]


# Ways around a stage, linear in sizes: passes (forward, input and weight gradient) a round of the steady state, a
# stage, once and once more where p is odd, and messages (a micro-batch, a stage, once). Fitted to the longest paths of
# the order at fourteen costs, 3 to 14 stages: within 0.1 passes of them with equal passes, 0.9 at worst. The steady
# state waits where an input gradient takes longer than a forward and half of a weight gradient, or a forward than they.
_WAYS: tuple[UnitRow, ...] = (
    ((0, 0, 0), (3, 1, -1), (-2, -7.5, 2.5), (0, 3, 0), (0, 6.6, -5.6)),
    ((0, 0, 0), (2, 1, 0), (0.5, -7.5, 0), (-0.5, 3, 0), (0, 4.4, -4)),
    ((0, 0, 0), (0.8, 3.2, -1), (-2, -4, -1), (2, 0, 1), (0, 6.3, -7.8)),
    ((0, 0, 0), (1.6, 2.5, -1.1), (-2.8, -3.8, -0.4), (0, 1.9, 1), (0, 6.5, -4.8)),
    ((-2, 2, -1), (2, 2, -0.375), (0, -6, -0.8), (0, 2, 0.3), (2, 5, -9.2)),
    ((2, -2, -1), (1.7, 2, -0.44), (-8.3, 3.6, 1.75), (1.3, 0.5, 1), (2, 3.9, -6.5)),
    ((2, -2, -1), (1, 3, -0.1), (-6.9, 0.8, 1.6), (1.7, 0.3, 0), (2, 4.2, -10)),
)


def ways_around(rows: Sequence[UnitRow], shape: PipelineShape[X], steady: X, odd: X) -> list[StageWait[X]]:
    """Return the ways of a table as what a stage waits for, with the times that the steady state comes round."""
    p, m = shape.num_stages, shape.num_micro
    ways = []
    for slope, each, once, more, sent in rows:
        passes = [a * steady + b * p + c + d * odd for a, b, c, d in zip(slope, each, once, more, strict=True)]
        hops = sent[0] * m + sent[1] * p + sent[2]
        ways.append(StageWait(others=(passes[0], passes[1], passes[2]), own=(0 * p, 0 * p, 0 * p), hops=hops))
    return ways


def v_half_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of V-Half, from twice as many micro-batches as stages on.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=2.0, backward_input=2.0, backward_weight=2.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=16.0, send=0.0, overlap_send=True)
    >>> v_half_seconds(stages, shape)
    101.0
    """
    p = shape.num_stages
    waits = ways_around(_WAYS, shape, shape.num_micro, 2 * ceil(p / 2) - p)
    return waiting_seconds(runs, shape, waits, SendSeconds(inner=4, ends=2, around=p - 3), folded=True)


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: half of the stages and one on every device."""
    return minimum(ceil((shape.num_stages + 1) / 2) + 0 * stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="v-half", order=v_half_order, seconds=v_half_seconds, in_flight=_in_flight, tolerance=0.12, passed_whole=False
)
