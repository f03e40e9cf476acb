"""ZB-V: two pieces of the model a stage, laid down and up again, weight gradients in the bubbles (arXiv:2401.10241).

The order is torch.distributed.pipelining's ScheduleZBVZeroBubble (section 6 of the paper by hand, equal passes).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.ledger.number import X, minimum
from shardwise.training.schedules._stage_times import SendSeconds, StageWait, waiting_seconds
from shardwise.training.schedules._types import (
    B,
    F,
    Kind,
    PipelineSchedule,
    PipelineShape,
    StageRun,
    Task,
    TaskOrder,
    W,
)


class _Rank:
    """The tasks of one device in the making; of micro-batches that fill the pipeline beyond those there are, none."""

    def __init__(self, num_micro: int) -> None:
        self.num_micro, self.order = num_micro, TaskOrder()
        self.count: Counter[tuple[Kind, int]] = Counter()

    def run(self, *kinds: Kind, chunk: int) -> None:
        """Append the next task of each kind on a chunk."""
        for kind in kinds:
            k = self.count[kind, chunk]
            self.count[kind, chunk] += 1
            if k < self.num_micro:
                self.order.append((Task(kind, k, chunk),))


def zb_v_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """Forwards down, forwards down and up by turns, then each piece forward and backward by turns, and the rest."""
    rank = _Rank(m)
    for _ in range(2 * (p - i) - 1):
        rank.run(F, chunk=0)
    for _ in range(i):
        rank.run(F, chunk=1)
        rank.run(F, chunk=0)
    for _ in range(p - i):
        rank.run(F, B, W, chunk=1)
    while rank.count[F, 1] < max(rank.count[F, 0], 2 * p - 1, m):
        if rank.count[F, 0] < max(2 * p - 1, m):
            rank.run(F, chunk=0)
        rank.run(B, W, chunk=0)
        rank.run(F, B, W, chunk=1)
    for _ in range(i):
        rank.run(B, chunk=0)
        rank.run(B, chunk=1)
    for _ in range(p - i):
        rank.run(B, W, chunk=0)
    for chunk in (1, 0):
        while rank.count[W, chunk] < rank.count[B, chunk]:
            rank.run(W, chunk=chunk)
    return rank.order


def zb_v_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of ZB-V, from twice as many micro-batches as stages on.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=2.0, backward_input=2.0, backward_weight=2.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=16.0, send=0.0, overlap_send=True)
    >>> zb_v_seconds(stages, shape)
    99.0
    """
    q = shape.num_stages - 1
    zero, one = 0 * q, 0 * q + 1
    waits = (
        StageWait(others=(zero, q, zero), own=(zero, zero, zero), hops=5 * q - 2),
        StageWait(others=(zero, 2 * q, zero), own=(zero, zero, zero - 2 * q), hops=6 * q - 2),
        StageWait(others=(zero, one, q - 1), own=(zero, zero, zero), hops=3 * q),
        StageWait(others=(one, zero, q - 1), own=(zero, zero, zero), hops=3 * q - 2),
        StageWait(others=(2 * q - 1, zero, zero), own=(zero, 1 - q, zero), hops=3 * q - 2),
        StageWait(others=(2 * q - 1, one, zero), own=(zero, zero, zero - 2 * q), hops=4 * q),
        StageWait(others=(2 * q, zero, zero), own=(zero, zero - q, zero - one), hops=3 * q),
        StageWait(others=(2 * q, zero, zero), own=(zero, zero, zero - 2 * q - 1), hops=4 * q),
    )
    return waiting_seconds(runs, shape, waits, SendSeconds(inner=4, ends=2, around=q - 2), folded=True)


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: p on every device, as 1F1B has on its first (arXiv:2401.10241 section 6)."""
    return minimum(shape.num_stages + 0 * stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="zb-v", order=zb_v_order, seconds=zb_v_seconds, in_flight=_in_flight, tolerance=0.07, passed_whole=False
)
