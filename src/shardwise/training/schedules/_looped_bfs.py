"""Looped breadth-first: GPipe through one piece of the model after the other (arXiv:2211.05953)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, largest, maximum, minimum
from shardwise.records import replace
from shardwise.training.schedules._stage_times import pipeline
from shardwise.training.schedules._types import FULL, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder


def looped_bfs_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """All forwards of each chunk in turn, then all backwards in reverse (ScheduleLoopedBFS of torch)."""
    forwards: TaskOrder = [(Task(F, k, chunk),) for chunk in range(v) for k in range(m)]
    return forwards + [(Task(FULL, k, chunk),) for chunk in reversed(range(v)) for k in reversed(range(m))]


def looped_bfs_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of looped breadth-first: a chunk takes its micro-batches, or the way to the next where longer.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> looped_bfs_seconds(stages, shape)
    28.5
    """
    m, v = shape.num_micro, shape.num_chunks
    whole = replace(shape, send=shape.send * v)
    pipe = pipeline(runs, whole)
    wrap = whole.send * minimum(shape.num_stages - 1, 1)
    seconds = 0 * m
    for slowest, path in (
        (largest([x.forward for x in pipe.points]), pipe.forward_path),
        (largest([x.gradient for x in pipe.points]), pipe.gradient_path),
    ):
        seconds = seconds + path + (m - 1) * slowest + (v - 1) * maximum(m * slowest, path + wrap)
    return seconds / v


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: all of them."""
    return shape.num_micro + 0 * stage


SCHEDULE = PipelineSchedule(
    name="looped-bfs",
    order=looped_bfs_order,
    seconds=looped_bfs_seconds,
    in_flight=_in_flight,
    tolerance=0.03,
    holds_heads=True,
)
