"""One micro-batch at a time through all stages and back: what a model split over devices does without a pipeline.

github.com/huggingface/accelerate src/accelerate/big_modeling.py dispatch_model (`device_map`): hooks move what enters a
layer to the device of its weights, and nothing starts a second micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X
from shardwise.training.schedules._stage_times import pipeline
from shardwise.training.schedules._types import FULL, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder


def sequential_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """Each forward pass, and its backward pass behind it."""
    return [(Task(kind, k),) for k in range(m) for kind in (F, FULL)]


def sequential_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of so many ways through all stages and back.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=1.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> sequential_seconds(stages, shape)
    96.0
    """
    return shape.num_micro * pipeline(runs, shape).path


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: one."""
    return 1 + 0 * stage


SCHEDULE = PipelineSchedule(
    name="sequential", order=sequential_order, seconds=sequential_seconds, in_flight=_in_flight, tolerance=1e-9
)
