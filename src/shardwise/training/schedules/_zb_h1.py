"""ZB-H1: 1F1B whose weight gradients wait to fill the drain (arXiv:2401.10241 section 2.1).

Letters: p stages, v chunks of the model on each, m micro-batches; s a
stage counted from 0; f, g, w the seconds of one micro-batch on it: forward, the backward that the stage before waits
for, and the backward that can wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

from shardwise.ledger.number import X, above, ceil, largest, maximum, minimum
from shardwise.records import dataclass
from shardwise.training.schedules._1f1b import diving
from shardwise.training.schedules._stage_times import StageTimes, longest, pipeline, running_largest, there
from shardwise.training.schedules._types import B, F, PipelineSchedule, PipelineShape, StageRun, Task, TaskOrder, W


def zb_h1_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """1F1B with the weight gradients of device i running i micro-batches late (arXiv:2401.10241, section 2.1)."""
    order: TaskOrder = [(Task(F, k),) for k in range(min(p - 1 - i, m))]
    ahead = len(order)
    for k in range(m):
        order += [(Task(F, f),) for f in range(ahead + k, min(ahead + k + 1, m))] + [(Task(B, k),)]
        order += [(Task(W, k - i),)] if k >= i else []
    return order + [(Task(W, k),) for k in range(max(0, m - i), m)]


def zb_h1_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of ZB-H1.

    Tasks are those of 1F1B, with the weight gradients of stage s run s micro-batches late, to fill the drain. After
    its last forward a path stays and drains upwards, dives to the last stage and comes up anywhere, dives to a
    stage below and back, or goes up to a stage that has backwards left; it ends with late weight gradients.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=1.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> zb_h1_seconds(stages, shape)
    27.0
    """
    p, m = shape.num_stages, shape.num_micro
    pipe = pipeline(runs, shape, split_backward=True, bends=(minimum(m - 1, p - m + 1), maximum(m - 1, p - m + 1)))
    stages = [_late(x, shape) for x in pipe.points]
    tails = [(z.delay + 1) * z.at.weight - z.at.gradient_before for z in stages]
    drains = [z.at.gradient_before + best for z, best in zip(stages, running_largest(tails), strict=True)]
    deepest = pipe.gradient_path + largest(tails)
    lengths = []
    for k, z in enumerate(stages):
        x, ahead = z.at, z.ahead
        start = maximum(pipe.below(x) - ahead * x.forward, 0)
        done = maximum(m - 1 - ahead - z.delay, 0)
        last = x.forward_before + m * x.forward + (m - 1 - ahead) * x.gradient + done * x.weight
        own = (ahead + 1) * x.gradient + minimum(ahead, m - 1 - z.delay) * x.weight + drains[k]
        dive = largest([_zb_dive(z, r, m, done) for r in stages[k:]])
        bounce = maximum(pipe.forward_path - x.forward_before - x.forward + deepest, own + maximum(dive, 0))
        climb = x.gradient_before + x.gradient
        rise = largest([own, *(climb + _zb_rise(z, r, m, drain) for r, drain in zip(stages[:k], drains, strict=False))])
        full = above(m, p - x.index, start, 0)
        lengths.append(last + maximum(start + rise, full + bounce))
    slowest = longest(pipe.present, lengths)
    if not shape.overlap_send:
        return slowest
    return maximum(slowest, diving(pipe, shape, m - 1) + (ceil((m - p) / p) + 1) * pipe.points[0].weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Late(Generic[X]):
    """A stage of ZB-H1: the micro-batches it runs ahead, and those by which its weight gradients are late."""

    at: StageTimes[X]
    ahead: X
    delay: X


def _late(x: StageTimes[X], shape: PipelineShape[X]) -> _Late[X]:
    most = shape.num_micro - 1
    return _Late(at=x, ahead=minimum(shape.num_stages - 1 - x.index, most), delay=minimum(x.index, most))


def _zb_dive(z: _Late[X], r: _Late[X], m: X, done: X) -> X:
    """What a dive from the last forward of stage z to stage r below and back gains over the tasks of z meanwhile."""
    meanwhile = (z.ahead - r.ahead) * z.at.gradient + (maximum(m - 1 - r.ahead - z.delay, 0) - done) * z.at.weight
    return there(r.at.present, r.at.through - z.at.through - meanwhile)


def _zb_rise(z: _Late[X], r: _Late[X], m: X, drain: X) -> X:
    """From stage z up to stage r above it when z ran its last forward: the backwards r has left, and its drain."""
    backwards = (z.ahead + 1) * r.at.gradient + minimum(z.ahead, m - 1 - r.delay) * r.at.weight
    return backwards + drain - r.at.gradient_before - r.at.gradient


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: p everywhere, until the weight gradient is done."""
    return minimum(shape.num_stages + 0 * stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="zb-h1",
    order=zb_h1_order,
    seconds=zb_h1_seconds,
    in_flight=_in_flight,
    tolerance=0.026,
    passed_whole=False,
)
