"""Seconds and activations of a pipeline schedule in closed form, on numbers, columns and traced numbers alike.

The forms are the longest paths through a fixed order of tasks; `simulate` runs the same orders task by task, and is
what they are held against. Largest differences seen in thousands of random pipelines (hundreds, with messages) of 2 to
16 stages and 1 to 64 micro-batches, fewer than stages and odd numbers included:

| schedule | equal stages | stages +-20 %, messages free | stages +-20 %, messages of 0.2 forwards |
|---|---|---|---|
| gpipe | exact | exact | exact |
| 1f1b | exact | 0.5 % | 1.0 % |
| interleaved | exact | 1.5 % | 3.1 % |
| zb-h1 | exact | 2.1 % | 2.6 % |
| dualpipe | exact | 2.7 % | 3.4 % |

Messages are hops of the paths, so they are exposed where the order of tasks leaves no slack: in the fill and the drain
of every schedule, and, even when they overlap, in the steady state of 1F1B and DualPipe, whose stages hold nothing to
spare: about 2(1 - 1/p) messages a micro-batch with 1F1B, half of that with DualPipe. Interleaved 1F1B and ZB-H1 hide
them there. A message that does not overlap keeps its sender still: two for each micro-batch and chunk on inner stages.
With equal stages messages are exact too, up to 0.2 forwards (1 % with zb-h1; interleaved up to 0.4 chunks, 2 % beyond).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.ledger.number import X, above, largest, maximum, minimum
from shardwise.ledger.traced import named
from shardwise.training.schedule_dualpipe import dualpipe_seconds, least_dualpipe_seconds
from shardwise.training.schedule_forms import (
    gpipe_seconds,
    interleaved_seconds,
    one_f_one_b_seconds,
    rounds,
    zb_h1_seconds,
)
from shardwise.training.schedule_orders import ScheduleName, schedule_problems
from shardwise.training.schedule_points import slowest_work
from shardwise.training.schedule_types import PipelineShape, PipelineTime, Run

__all__ = [
    "PipelineShape",
    "PipelineTime",
    "Run",
    "ScheduleName",
    "in_flight",
    "least_pipeline_seconds",
    "pipeline_time",
    "schedule_problems",
]


def _seconds(schedule: ScheduleName, runs: tuple[Run[X], ...], shape: PipelineShape[X]) -> X:
    forms: dict[ScheduleName, Callable[[tuple[Run[X], ...], PipelineShape[X]], X]] = {
        "gpipe": gpipe_seconds,
        "1f1b": one_f_one_b_seconds,
        "interleaved": interleaved_seconds,
        "zb-h1": zb_h1_seconds,
        "dualpipe": dualpipe_seconds,
    }
    return forms[schedule](runs, shape)


def pipeline_time(schedule: ScheduleName, runs: tuple[Run[X], ...], shape: PipelineShape[X]) -> PipelineTime[X]:
    """Return the seconds of the pipeline part of a step, and which of them are bubble and exposed messages.

    arXiv:1811.06965 (gpipe), arXiv:2104.04473 section 2.2 (1f1b, interleaved), arXiv:2401.10241 section 2.1 (zb-h1),
    arXiv:2412.19437 section 3.2.1 (dualpipe); unequal stages are derived, see `schedule_forms`. Chunks of a stage cost
    the same, and a DualPipe pair takes the sum of its two tasks: what pairing hides is not part of their seconds. What
    no order of tasks can run (`schedule_problems`) is not refused here.

    >>> stages = Run(count=4, forward=1.0, backward_input=1.0, backward_weight=1.0)
    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.0, overlap_send=True)
    >>> for schedule in ("1f1b", "zb-h1", "dualpipe"):
    ...     print(schedule, pipeline_time(schedule, (stages,), shape).bubble)
    1f1b 9.0
    zb-h1 3.0
    dualpipe 2.0
    """
    busy = shape.num_micro * slowest_work(runs, mirrored=schedule == "dualpipe")
    free = maximum(_seconds(schedule, runs, replace(shape, send=shape.send * 0)), busy)
    sent = maximum(_seconds(schedule, runs, shape), free)
    busy = named(busy, "slowest stage computes", unit="s")
    bubble = named(free - busy, "pipeline bubble", unit="s")
    exposed_send = named(sent - free, "exposed pipeline messages", unit="s")
    return PipelineTime(total=busy + bubble + exposed_send, busy=busy, bubble=bubble, exposed_send=exposed_send)


def least_pipeline_seconds(schedule: ScheduleName, runs: tuple[Run[X], ...], shape: PipelineShape[X]) -> X:
    """Return seconds that `pipeline_time` is never below, messages or not; they never fall when a stage gets slower.

    Every micro-batch passes the slowest stage; before the first has come to it and after the last has left it (but for
    late weight gradients) nothing runs there. The last stage of each run waits the longest.

    >>> stages = Run(count=4, forward=1.0, backward_input=1.0, backward_weight=1.0)
    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.5, overlap_send=True)
    >>> least_pipeline_seconds("1f1b", (stages,), shape)
    33.0
    """
    if schedule == "dualpipe":
        return least_dualpipe_seconds(runs, shape.num_stages, shape.num_micro)
    lengths = []
    before = runs[0].count * 0
    for run in runs:
        work = run.forward + run.backward_input + run.backward_weight
        passed = run.forward if schedule == "zb-h1" else work
        waits = before + maximum(run.count - 1, 0) * passed
        lengths.append(above(run.count, 0, waits / shape.num_chunks + shape.num_micro * work, 0))
        before = before + run.count * passed
    return largest(lengths)


def in_flight(schedule: ScheduleName, shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches whose activations a stage holds at its peak, in activations of one whole stage.

    Stages count from 0. Never more than there are micro-batches: arXiv:2104.04473 (1f1b: p - stage), Megatron-Core
    pipeline_parallel/schedules.py (interleaved: 2(p - 1 - stage) + (v-1)p + 1 chunks), arXiv:2401.10241 section 2.1
    (zb-h1: p everywhere, until the weight gradient is done) and the DualPipe README (p + 1 on the device, both of its
    stages together). The first round of the interleaved schedule takes the micro-batches that do not fill a round,
    so that with m not a multiple of p it holds more; Megatron-Core refuses such m unless told to group them so.

    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.0, overlap_send=True)
    >>> [in_flight("1f1b", shape, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    p, v, m = shape.num_stages, shape.num_chunks, shape.num_micro
    if schedule == "gpipe":
        return m
    if schedule == "interleaved":
        chunks = minimum(v, 2) * (p - 1 - stage) + (v - 1) * rounds(shape) + 1
        return minimum(chunks / v, m)
    held = {"1f1b": p - stage, "zb-h1": p, "dualpipe": p + minimum(p - 1, 1)}
    return minimum(held[schedule], m)
