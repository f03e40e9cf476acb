"""Seconds of the pipeline part of a step for GPipe, 1F1B, interleaved 1F1B and ZB-H1, as longest paths.

Letters: p stages, v chunks of the model on each, m micro-batches; s a stage counted from 0; f, g, w the seconds of one
micro-batch on it, forward, the backward that the stage before waits for, and the backward that can wait.
The equal-stage limits are those of arXiv:1811.06965 (GPipe), arXiv:2104.04473 section 2.2 (1F1B, interleaved) and
arXiv:2401.10241 section 2 (ZB-H1); with unequal stages the paths were found and checked with `simulate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic

from shardwise.ledger.number import X, above, ceil, largest, maximum, minimum
from shardwise.training.schedule_points import Pipeline, Point, longest, pipeline, running_largest, there
from shardwise.training.schedule_types import PipelineShape, Run


def rounds(shape: PipelineShape[X]) -> X:
    """Return how many micro-batches the first round of the interleaved schedule takes; every later round takes p.

    The first round takes what does not fill a round of its own, which costs memory and no time.

    >>> from shardwise.training.schedule import PipelineShape
    >>> rounds(PipelineShape(num_stages=4, num_chunks=2, num_micro=10, send=0, overlap_send=True))
    6
    """
    p, m = shape.num_stages, shape.num_micro
    whole = ceil((m - p + 1) / p)
    return m - p * maximum(whole - 1, 0)


def gpipe_seconds(runs: Sequence[Run[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of GPipe: each pass is one way through plus m - 1 more on its slowest stage.

    >>> from shardwise.training.schedule import PipelineShape, Run
    >>> stages = (Run(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=1.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> gpipe_seconds(stages, shape)
    33.0
    """
    pipe = pipeline(runs, shape)
    slowest = largest([x.forward for x in pipe.points]) + largest([x.gradient for x in pipe.points])
    return pipe.path + (shape.num_micro - 1) * slowest


def one_f_one_b_seconds(runs: Sequence[Run[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of 1F1B.

    A path fills down to stage s, stays there, and drains; at both ends it may dive below s instead of idling. Stage
    s holds p-1-s micro-batches ahead, so that a dive to stage r gains the way there and back and gives up r-s
    forwards (at the start) or backwards (at the end) of s. With fewer micro-batches than stages below s the dive of
    the start runs into that of the end; then the path comes up to a stage that has only forwards or only backwards
    left. Messages make every further dive longer than staying: one for each p micro-batches.

    >>> from shardwise.training.schedule import PipelineShape, Run
    >>> stages = (Run(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
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
    return maximum(slowest, _diving(pipe, shape, m - 1)) if shape.overlap_send else slowest


def _dive(x: Point[X], below: Sequence[Point[X]]) -> X:
    """What the best dive from the last forward of stage x gains over its own backwards."""
    level = x.through - x.index * x.gradient
    return maximum(largest([there(r.present, r.through - r.index * x.gradient - level) for r in below]), 0)


def _dives(x: Point[X], pipe: Pipeline[X], shape: PipelineShape[X], below: Sequence[Point[X]]) -> X:
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


def _diving(pipe: Pipeline[X], shape: PipelineShape[X], steps: X) -> X:
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


def interleaved_seconds(runs: Sequence[Run[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of interleaved 1F1B.

    Paths are those of 1F1B, between a phase of forwards and one of backwards of v-1 chunks of one round. A round
    through one chunk takes its micro-batches on the slowest stage, or the way through all stages where that is
    longer (fewer micro-batches than stages). Lengths are v times the seconds: a chunk takes 1/v of its stage.

    >>> from shardwise.training.schedule import PipelineShape, Run
    >>> stages = (Run(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=8.0, send=0.0, overlap_send=True)
    >>> interleaved_seconds(stages, shape)
    28.5
    """
    v = shape.num_chunks
    whole = replace(shape, send=shape.send * v)
    pipe = pipeline(runs, whole)
    phases = _chunk_phases(pipe, whole)
    dives = _wrapped_dives(pipe, whole)
    lone = running_largest([maximum(x.forward, x.gradient) for x in pipe.points])
    lengths = [
        maximum(_stay(x, pipe, whole, dives), _meet(x, pipe, whole, peak))
        for x, peak in zip(pipe.points, lone, strict=True)
    ]
    slowest = longest(pipe.present, lengths)
    if shape.overlap_send:
        slowest = maximum(slowest, _diving(pipe, whole, _ahead(pipe.points[0], whole)[1]))
    return (slowest + phases) / v


def _chunk_phases(pipe: Pipeline[X], shape: PipelineShape[X]) -> X:
    """The forwards before and the backwards after the steady state, on the stage that is slowest at them."""
    p, m, v, head = shape.num_stages, shape.num_micro, shape.num_chunks, rounds(shape)
    forward = largest([x.forward for x in pipe.points])
    gradient = largest([x.gradient for x in pipe.points])
    wrap = p * shape.send * minimum(p - 1, 1)
    tail = above(2 * p, m, head, p)
    forwards = maximum(head * forward, pipe.forward_sum + wrap)
    backwards = maximum(tail * gradient, pipe.gradient_sum + wrap) + (head - tail) * gradient
    return (v - 1) * (forwards + backwards)


def _wrapped_dives(pipe: Pipeline[X], shape: PipelineShape[X]) -> tuple[X, X]:
    """The longest way from the first round over some stage r into the second, and the same from the end."""
    p, head, late = shape.num_stages, rounds(shape), _extra_ahead(shape)
    wrap = p * shape.send * minimum(p - 1, 1)
    first = [(head - 2 * (p - 1 - r.index)) * r.work + pipe.below(r) for r in pipe.points]
    last = [(p - late - 2 * (p - 1 - r.index)) * r.work + pipe.below(r) for r in pipe.points]
    return (
        pipe.forward_sum + wrap + longest(pipe.present, first),
        pipe.gradient_sum + wrap + longest(pipe.present, last),
    )


def _extra_ahead(shape: PipelineShape[X]) -> X:
    """Chunks held beyond those of a round of p, because the first round is longer."""
    return (shape.num_chunks - 1) * maximum(rounds(shape) - shape.num_stages, 0)


def _ahead(x: Point[X], shape: PipelineShape[X]) -> tuple[X, X]:
    """Chunks that stage x runs ahead beyond the phases, and how many there are to run; v = 1 is 1F1B."""
    most = shape.num_micro * shape.num_chunks - 1 - (shape.num_chunks - 1) * rounds(shape)
    return minimum(shape.num_chunks, 2) * (shape.num_stages - 1 - x.index), most


def _stay(x: Point[X], pipe: Pipeline[X], shape: PipelineShape[X], dives: tuple[X, X]) -> X:
    """A path that fills down to stage x, stays there and drains, diving below it at both ends where that is longer."""
    p, m, v, head, late = shape.num_stages, shape.num_micro, shape.num_chunks, rounds(shape), _extra_ahead(shape)
    ahead, most = _ahead(x, shape)
    wraps = above(2 * p, m, 0, 1) * minimum(v - 1, 1)
    first = dives[0] - (head + p) * x.work + ahead * x.gradient
    last = dives[1] - 2 * p * x.work + (ahead + late) * x.forward
    start = maximum(maximum(pipe.below(x) - ahead * x.forward, wraps * first), 0)
    end = maximum(maximum(pipe.below(x) - (ahead + late) * x.gradient, wraps * last), 0)
    steady = (m * v - (v - 1) * head) * x.work - _phase_sends(x, shape)
    return x.forward_before + x.gradient_before + steady + above(most, ahead, start + end, 0)


def _meet(x: Point[X], pipe: Pipeline[X], shape: PipelineShape[X], lone: X) -> X:
    """A path whose dive of the start runs into that of the end, and that finds forwards or backwards alone."""
    ahead, most = _ahead(x, shape)
    alone = minimum(ahead, most)
    return pipe.path + (most - alone) * x.work - _phase_sends(x, shape) + alone * lone


def _phase_sends(x: Point[X], shape: PipelineShape[X]) -> X:
    """Sends of an end stage that fall in the phases: there it sends every chunk, so its steady state sends fewer."""
    p, v = shape.num_stages, shape.num_chunks
    if shape.overlap_send:
        return x.index * 0
    ends = minimum(p - 1, 1) * 2 - minimum(p - 1 - x.index, 1) - minimum(x.index, 1)
    return (v - 1) * rounds(shape) * ends * shape.send / v


def zb_h1_seconds(runs: Sequence[Run[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of ZB-H1.

    Tasks are those of 1F1B, with the weight gradients of stage s run s micro-batches late, to fill the drain. After
    its last forward a path stays and drains upwards, dives to the last stage and comes up anywhere, dives to a
    stage below and back, or goes up to a stage that has backwards left; it ends with late weight gradients.

    >>> from shardwise.training.schedule import PipelineShape, Run
    >>> stages = (Run(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
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
    return maximum(slowest, _diving(pipe, shape, m - 1) + (ceil((m - p) / p) + 1) * pipe.points[0].weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Late(Generic[X]):
    """A stage of ZB-H1: the micro-batches it runs ahead, and those by which its weight gradients are late."""

    at: Point[X]
    ahead: X
    delay: X


def _late(x: Point[X], shape: PipelineShape[X]) -> _Late[X]:
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
