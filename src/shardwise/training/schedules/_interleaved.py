"""Interleaved 1F1B: several chunks of the model on each stage (arXiv:2104.04473 section 2.2.2).

Letters: p stages, v chunks of the model on each, m micro-batches; s a
stage counted from 0; f, g, w the seconds of one micro-batch on it: forward, the backward that the stage before waits
for, and the backward that can wait.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

from shardwise.ledger.number import X, above, ceil, evaluate, largest, maximum, minimum, register
from shardwise.plans.schedules import round_size
from shardwise.records import replace
from shardwise.training.schedules._1f1b import alternate, diving
from shardwise.training.schedules._stage_times import Pipeline, StageTimes, longest, pipeline, running_largest
from shardwise.training.schedules._types import (
    FULL,
    F,
    Kind,
    PipelineSchedule,
    PipelineShape,
    StageRun,
    Task,
    TaskOrder,
)


def round_tasks(p: int, v: int, m: int, kind: Kind) -> list[Task]:
    """Each round of micro-batches goes through one chunk after the other."""
    chunks, size = range(v) if kind == F else range(v - 1, -1, -1), round_size(p, m)
    rounds = [range(start, min(start + size, m)) for start in range(0, m, size)]
    return [Task(kind, k, chunk) for members in rounds for chunk in chunks for k in members]


def interleaved_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """Warm-up of 2(p-1-i) + (v-1)p chunks, then one forward, one backward chunk (arXiv:2104.04473, section 2.2.2)."""
    ahead = p - 1 - i if v == 1 else 2 * (p - 1 - i) + (v - 1) * round_size(p, m)
    return alternate(round_tasks(p, v, m, F), round_tasks(p, v, m, FULL), ahead)


def rounds(shape: PipelineShape[X]) -> X:
    """Return how many micro-batches a round takes; the last takes what is left, at least as many as there are stages.

    >>> from shardwise.training.schedules import PipelineShape
    >>> rounds(PipelineShape(num_stages=4, num_chunks=2, num_micro=10, send=0, overlap_send=True))
    5
    """
    return cast(X, evaluate("round_size", shape.num_stages, shape.num_micro))


def _round_sizes(p: Any, m: Any) -> Any:
    numpy = sys.modules["numpy"]
    # Plans have few numbers of stages and micro-batches: each pair is looked at once.
    codes = numpy.asarray(p, float) * 2.0**32 + numpy.asarray(m, float)
    pairs = numpy.sort(codes, axis=None)
    pairs = pairs[numpy.append(True, pairs[1:] != pairs[:-1])[: len(pairs)]]
    sizes = [_plain_round(*divmod(pair, 2.0**32)) for pair in pairs.tolist()]
    return numpy.array(sizes, float)[numpy.searchsorted(pairs, codes)]


def _plain_round(p: float, m: float) -> float:
    return round_size(int(p), int(m))


register("round_size", _plain_round, _round_sizes)


def interleaved_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of interleaved 1F1B.

    Paths are those of 1F1B, between a phase of forwards and one of backwards of v-1 chunks of one round. A round
    through one chunk takes its micro-batches on the slowest stage, or the way through all stages where that is
    longer (fewer micro-batches than stages). Lengths are v times the seconds: a chunk takes 1/v of its stage.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=1.0, backward_input=1.0, backward_weight=1.0),)
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
        slowest = maximum(slowest, diving(pipe, whole, _ahead(pipe.points[0], whole)[1]))
    return (slowest + phases) / v


def _chunk_phases(pipe: Pipeline[X], shape: PipelineShape[X]) -> X:
    """The forwards before and the backwards after the steady state, on the stage that is slowest at them."""
    p, m, v, head = shape.num_stages, shape.num_micro, shape.num_chunks, rounds(shape)
    forward = largest([x.forward for x in pipe.points])
    gradient = largest([x.gradient for x in pipe.points])
    wrap = p * shape.send * minimum(p - 1, 1)
    tail = m - head * (ceil(m / head) - 1)
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


def _ahead(x: StageTimes[X], shape: PipelineShape[X]) -> tuple[X, X]:
    """Chunks that stage x runs ahead beyond the phases, and how many there are to run; v = 1 is 1F1B."""
    most = shape.num_micro * shape.num_chunks - 1 - (shape.num_chunks - 1) * rounds(shape)
    return minimum(shape.num_chunks, 2) * (shape.num_stages - 1 - x.index), most


def _stay(x: StageTimes[X], pipe: Pipeline[X], shape: PipelineShape[X], dives: tuple[X, X]) -> X:
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


def _meet(x: StageTimes[X], pipe: Pipeline[X], shape: PipelineShape[X], lone: X) -> X:
    """A path whose dive of the start runs into that of the end, and that finds forwards or backwards alone."""
    ahead, most = _ahead(x, shape)
    alone = minimum(ahead, most)
    return pipe.path + (most - alone) * x.work - _phase_sends(x, shape) + alone * lone


def _phase_sends(x: StageTimes[X], shape: PipelineShape[X]) -> X:
    """Sends of an end stage that fall in the phases: there it sends every chunk, so its steady state sends fewer."""
    p, v = shape.num_stages, shape.num_chunks
    if shape.overlap_send:
        return x.index * 0
    ends = minimum(p - 1, 1) * 2 - minimum(p - 1 - x.index, 1) - minimum(x.index, 1)
    return (v - 1) * rounds(shape) * ends * shape.send / v


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: 2(p - 1 - stage) + (v - 1)n + 1 of v chunks, with rounds of n.

    Megatron-Core pipeline_parallel/schedules.py; where p does not divide m, rounds are longer and it holds more.
    """
    p, v, m = shape.num_stages, shape.num_chunks, shape.num_micro
    chunks = minimum(v, 2) * (p - 1 - stage) + (v - 1) * rounds(shape) + 1
    return minimum(chunks / v, m)


SCHEDULE = PipelineSchedule(
    name="interleaved",
    order=interleaved_order,
    seconds=interleaved_seconds,
    in_flight=_in_flight,
    tolerance=0.031,
)
