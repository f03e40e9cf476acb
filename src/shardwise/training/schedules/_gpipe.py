"""GPipe: all forwards, then all backwards (arXiv:1811.06965)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, above, largest
from shardwise.training.schedules._stage_times import pipeline
from shardwise.training.schedules._types import FULL, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder


def gpipe_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """All forwards, then all backwards in reverse (arXiv:1811.06965, figure 2c); one stage accumulates instead."""
    if p == 1:
        return [task for k in range(m) for task in ((Task(F, k),), (Task(FULL, k),))]
    forwards: TaskOrder = [(Task(F, k),) for k in range(m)]
    return forwards + [(Task(FULL, k),) for k in reversed(range(m))]


def gpipe_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of GPipe: each pass is one way through plus m - 1 more on its slowest stage.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=1.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> gpipe_seconds(stages, shape)
    33.0
    """
    pipe = pipeline(runs, shape)
    slowest = largest([x.forward for x in pipe.points]) + largest([x.gradient for x in pipe.points])
    return pipe.path + (shape.num_micro - 1) * slowest


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: all of them, and one where no stage hands any on."""
    return above(shape.num_stages, 1, shape.num_micro, 1 + 0 * shape.num_micro) + 0 * stage


SCHEDULE = PipelineSchedule(
    name="gpipe", order=gpipe_order, seconds=gpipe_seconds, in_flight=_in_flight, tolerance=1e-9, holds_heads=True
)
