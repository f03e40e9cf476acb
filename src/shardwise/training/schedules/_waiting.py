"""Seconds of zero-bubble schedules: the work of a stage, and what it waits for on the longest way around it.

With equal stages the bubble of each of these orders is the largest of a few sums of passes, read off the critical
paths of their simulation at random costs; with unequal ones a pass of another stage counts as the mean of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, above, largest, maximum, minimum, total
from shardwise.training.schedules._types import PipelineShape, Run

# Of what a slow stage takes longer than the mean, this share covers what it waits for: it is met by work that is there.
_COVERED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait(Generic[X]):
    """One way around a stage: passes (forward, input gradient, weight gradient) of a chunk on others, and on its own.

    `hops` are the messages on it.
    """

    others: tuple[X, X, X]
    own: tuple[X, X, X]
    hops: X


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent(Generic[X]):
    """Messages without overlap: a micro-batch, of a stage inside or at an end, and those around it."""

    inner: X | float
    ends: X | float
    around: X


def waiting_seconds(
    runs: Sequence[Run[X]], shape: PipelineShape[X], waits: Sequence[Wait[X]], sent: Sent[X], *, folded: bool
) -> X:
    """Return the seconds of a pipeline whose stages wait the longest of some ways.

    Folded, the last stage of the way down is the first of the way up: a slow stage waits for its fill and drain alone.
    """
    p, m, v = shape.num_stages, shape.num_micro, shape.num_chunks
    costs = [_chunk(run, v) for run in runs]
    sums = tuple(total((run.count * c[i] for run, c in zip(runs, costs, strict=True)), 0 * p) for i in range(3))
    mean = v * total(sums) / p
    inner, hop = minimum(p - 1, 1), shape.send if shape.overlap_send else 0 * shape.send
    still = m * above(p, 2, sent.inner, sent.ends) + maximum(sent.around, 0)
    stood = 0 * hop if shape.overlap_send else still * shape.send
    before, fill, drain, lengths = 0 * p, 0 * p, 0 * p, []
    for run, own in zip(runs, costs, strict=True):
        last, work = maximum(run.count - 1, 0), v * total(own)
        others = tuple((s - c) / maximum(p - 1, 1) for s, c in zip(sums, own, strict=True))
        longest = maximum(largest([_length(wait, others, own, hop) for wait in waits]), 0)
        if folded:
            at, filled, drained = before + last, fill + last * own[0], drain + last * own[1]
            least = minimum(filled + maximum(drained - at * own[2], 0), longest)
            longest = maximum(maximum(longest - _COVERED * m * maximum(work - mean, 0), least), filled)
        lengths.append(above(run.count, 0, m * work + inner * (longest + stood), 0 * p))
        before = before + run.count
        fill, drain = fill + run.count * own[0], drain + run.count * own[1]
    return largest(lengths)


def _chunk(run: Run[X], v: X) -> tuple[X, X, X]:
    return run.forward / v, run.backward_input / v, run.backward_weight / v


def _length(wait: Wait[X], others: tuple[X, ...], own: tuple[X, X, X], hop: X) -> X:
    passes = [n * cost for n, cost in zip((*wait.others, *wait.own), (*others, *own), strict=True)]
    return total(passes) + maximum(wait.hops, 0) * hop
