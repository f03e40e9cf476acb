"""V-Min: two pieces of the model a stage in a V, with a third of the activations of 1F1B (arXiv:2405.15362).

The order is the authors' own (sail-sg/zero-bubble-pipeline-parallelism, scheduler/zbv_greedy.py), as that of V-Half.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, above, ceil, minimum
from shardwise.training.schedules._stage_times import SendSeconds, waiting_seconds
from shardwise.training.schedules._types import PipelineSchedule, PipelineShape, StageRun, TaskOrder
from shardwise.training.schedules._v_half import Pattern, UnitRow, controlled_orders, ways_around


def v_min_pattern(p: int, i: int) -> Pattern:
    """The slots of the first micro-batch on device i: two forwards, two backwards (stable_pattern_v_min)."""
    gap = 0 if p % 3 else 2
    return i, 2 * p - i - 1, 2 * p + gap + i, 4 * p + gap - i - 1


def v_min_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """The authors' order: the pattern of V-Min, filled and drained as early as its memory allows."""
    return controlled_orders(tuple(v_min_pattern(p, stage) for stage in range(p)), m)[i]


# As the ways of V-Half, with more where three divides p. A micro-batch takes six of the longest kind of pass where the
# three differ, which is why it is worth its memory with equal ones alone (section 4 of the paper).
_WAYS: tuple[UnitRow, ...] = (
    ((-1, 2, -1), (2, 2, 0), (0.4, -6.7, 1.4), (-0.5, -1, -0.5), (5, 6.9, -30)),
    ((-1, 2, -1), (2, 2, 0), (1.1, -7.1, 1), (-1.4, -0.6, 0), (5, 6.9, -30)),
    ((2, -1, -1), (1.35, 2.4, 0.25), (-10.4, 3.2, 2.3), (-0.5, -1.4, 0), (5, 6.7, -30)),
    ((2, -1, -1), (1.63, 1.92, 0.2), (-11.4, 6.6, 0.6), (0.2, -2.75, 0), (5, 5.7, -28)),
    ((2, -1, -1), (1.12, 2.7, 0.18), (-9, 3.2, 0.9), (0, -1.2, 0), (5, 6.2, -31)),
)
# Of two stages: six of a pass never follow one another.
_TWO: tuple[UnitRow, ...] = (
    ((1, 1, -2), (0, 0, 0), (1, 1, 1), (0, 0, 0), (2, 0, 0)),
    ((-1, 2, -1), (0, 0, 0), (3, 0, 0), (0, 0, 0), (2, 0, 0)),
)


def v_min_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of V-Min, from twice as many micro-batches as stages on.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=2.0, backward_input=2.0, backward_weight=2.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=16.0, send=0.0, overlap_send=True)
    >>> round(v_min_seconds(stages, shape), 6)
    107.1
    """
    p = shape.num_stages
    steady, zero = minimum(p - 1, 2) * shape.num_micro, 0 * p
    thirds = above(3 * ceil(p / 3) - p, 0, zero, zero + 1)
    waits = ways_around(_WAYS, shape, steady, thirds)
    two = ways_around(_TWO, shape, above(p, 2, zero, steady), thirds)
    return waiting_seconds(runs, shape, [*waits, *two], SendSeconds(inner=4, ends=2, around=p - 3), folded=True)


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: a third of the stages and one; half less on a first one if p is 3n + 2."""
    p, m = shape.num_stages, shape.num_micro
    whole = ceil((p + 2) / 3)
    spare = above(3 * whole - p, 3, 0.5, 0.0) * (1 - minimum(stage, 1))
    return minimum(whole - spare, m)


SCHEDULE = PipelineSchedule(
    name="v-min", order=v_min_order, seconds=v_min_seconds, in_flight=_in_flight, tolerance=0.12, passed_whole=False
)
