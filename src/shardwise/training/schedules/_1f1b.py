"""1F1B: one forward, one backward, with as many forwards ahead as stages below (arXiv:2104.04473 section 2.2.1).

Letters: p stages, v chunks of the model on each, m micro-batches; s a
stage counted from 0; f, g, w the seconds of one micro-batch on it: forward, the backward that the stage before waits
for, and the backward that can wait.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, above, ceil, largest, maximum, minimum
from shardwise.training.schedules._stage_times import Pipeline, StageTimes, longest, pipeline, running_largest, there
from shardwise.training.schedules._types import FULL, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder


def one_f_one_b_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """Device i runs p-1-i forwards ahead, then one forward, one backward (arXiv:2104.04473, section 2.2.1)."""
    return alternate([Task(F, k) for k in range(m)], [Task(FULL, k) for k in range(m)], p - 1 - i)


def alternate(forwards: list[Task], backwards: list[Task], warm_up: int) -> TaskOrder:
    """Return so many forwards, then a backward after each forward."""
    order: TaskOrder = [(task,) for task in forwards[:warm_up]]
    ahead = len(order)
    for k, task in enumerate(backwards):
        order += [(f,) for f in forwards[ahead + k : ahead + k + 1]] + [(task,)]
    return order


def one_f_one_b_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of 1F1B.

    A path fills down to stage s, stays there, and drains; at both ends it may dive below s instead of idling. Stage
    s holds p-1-s micro-batches ahead, so that a dive to stage r gains the way there and back and gives up r-s
    forwards (at the start) or backwards (at the end) of s. With fewer micro-batches than stages below s the dive of
    the start runs into that of the end; then the path comes up to a stage that has only forwards or only backwards
    left. Messages make every further dive longer than staying: one for each p micro-batches.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=1.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> one_f_one_b_seconds(stages, shape)
    33.0
    """
    p, m = shape.num_stages, shape.num_micro
    pipe = pipeline(runs, shape, bends=(p - m + 1,) if shape.overlap_send else ())
    lone = running_largest([maximum(x.forward, x.gradient) for x in pipe.points])
    lengths = []
    for k, x in enumerate(pipe.points):
        ahead = minimum(p - 1 - x.index, m - 1)
        start = maximum(pipe.below(x) - ahead * x.forward, 0)
        end = _dive(x, pipe.points[k:])
        both = above(m, p - x.index, start + end, 0)
        stay = x.forward_before + x.gradient_before + m * x.work + both
        length = maximum(stay, pipe.path + (m - 1 - ahead) * x.work + ahead * lone[k])
        lengths.append(maximum(length, _dives(x, pipe, shape, pipe.points[k:])) if shape.overlap_send else length)
    slowest = longest(pipe.present, lengths)
    return maximum(slowest, diving(pipe, shape, m - 1)) if shape.overlap_send else slowest


def _dive(x: StageTimes[X], below: Sequence[StageTimes[X]]) -> X:
    """What the best dive from the last forward of stage x gains over its own backwards."""
    level = x.through - x.index * x.gradient
    return maximum(largest([there(r.present, r.through - r.index * x.gradient - level) for r in below]), 0)


def _dives(x: StageTimes[X], pipe: Pipeline[X], shape: PipelineShape[X], below: Sequence[StageTimes[X]]) -> X:
    """Stage x with a dive at the start, one at the end and as many as fit between them, to the same stage below.

    A dive over k stages takes k steps of x, and is the longer way where messages outweigh what x is slower.
    """
    p, m = shape.num_stages, shape.num_micro
    steps = m - 1 - (p - x.index)
    gains = []
    for r in below:
        num_stages = r.index - x.index + 1
        dives = ceil((steps - num_stages + 1) / num_stages)
        gains.append(there(r.present, dives * (r.through - x.through + (1 - num_stages) * x.work)))
    longer = maximum(largest(gains), 0)
    return above(m, p - x.index, pipe.path + pipe.below(x) + (steps + 1) * x.work + longer, 0)


def diving(pipe: Pipeline[X], shape: PipelineShape[X], steps: X) -> X:
    """The path that dives from the first stage to the last again and again, in a steady state of so many steps.

    1F1B has p steps for a dive and fills what is left with a shorter one; interleaved, 2p - 1 chunks pass meanwhile.
    """
    p, per_stage = shape.num_stages, minimum(shape.num_chunks, 2)
    length = per_stage * (p - 1) + 1
    dives = ceil((steps - length + 1) / length)
    rest = steps - dives * length
    hops = dives * (p - 1) + maximum(rest - 1, 0) * (2 - per_stage) * minimum(p - 1, 1)
    swings = dives * (pipe.forward_sum + pipe.gradient_sum) + rest * pipe.quickest
    return pipe.path + swings + 2 * shape.send * hops


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: p - stage (arXiv:2104.04473)."""
    return minimum(shape.num_stages - stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="1f1b", order=one_f_one_b_order, seconds=one_f_one_b_seconds, in_flight=_in_flight, tolerance=0.010
)
