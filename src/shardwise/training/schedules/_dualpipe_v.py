"""DualPipe-V: DualPipe cut in half, two pieces of the model a stage (deepseek-ai/DualPipe, dualpipe/dualpipev.py).

The order is that of torch.distributed.pipelining's ScheduleDualPipeV.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, minimum
from shardwise.training.schedules._dualpipe import PairedRank, paired_order
from shardwise.training.schedules._stage_times import SendSeconds, StageWait, waiting_seconds
from shardwise.training.schedules._types import PipelineSchedule, PipelineShape, StageRun, TaskOrder


def dualpipe_v_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """The steps of DualPipe on a device that holds both directions of its own stage."""
    return paired_order(PairedRank(), i, p - 1 - i, m - 2 * p + i + 1)


def dualpipe_v_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of DualPipe-V; a pair takes the sum of its two passes, and waits for messages as DualPipe's.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=2.0, backward_input=2.0, backward_weight=2.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=16.0, send=0.0, overlap_send=True)
    >>> dualpipe_v_seconds(stages, shape)
    102.0
    """
    p, m = shape.num_stages, shape.num_micro
    q = p - 1
    zero, steady = 0 * q, 2 * m * q / p
    waits = (
        StageWait(others=(q - 1, 2 * q, zero), own=(zero, zero, zero - q), hops=steady + 4 * q - 2),
        StageWait(others=(2 * q, zero, zero), own=(zero, zero, zero), hops=steady + q - 2),
        StageWait(others=(q - 1, q, zero), own=(zero, zero, zero), hops=steady + 3 * q - 2),
        StageWait(others=(2 * q, q, zero), own=(zero, zero, zero - q), hops=steady + 2 * q - 2),
    )
    return waiting_seconds(runs, shape, waits, SendSeconds(inner=2, ends=1, around=3 * q - 4), folded=True)


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight on a device: 2p + 1 of two chunks."""
    return minimum(shape.num_stages + 0.5 + 0 * stage, shape.num_micro)


SCHEDULE = PipelineSchedule(
    name="dualpipe-v",
    order=dualpipe_v_order,
    seconds=dualpipe_v_seconds,
    in_flight=_in_flight,
    tolerance=0.06,
    passed_whole=False,
)
