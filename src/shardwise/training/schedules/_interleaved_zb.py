"""Interleaved zero bubble: interleaved 1F1B with ZB-H1's late weight gradients (arXiv:2401.10241).

The order is torch.distributed.pipelining's ScheduleInterleavedZeroBubble.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.ledger.number import X, minimum
from shardwise.plans.schedules import round_size
from shardwise.training.schedules._interleaved import round_tasks, rounds
from shardwise.training.schedules._stage_times import SendSeconds, StageWait, waiting_seconds
from shardwise.training.schedules._types import B, F, PipelineSchedule, PipelineShape, StageRun, TaskOrder, W


def interleaved_zb_order(p: int, v: int, m: int, i: int) -> TaskOrder:
    """Warm-up of p-1-i chunks beyond the first rounds; weight gradients of device i run i chunks late."""
    forwards, late = round_tasks(p, v, m, F), round_tasks(p, v, m, W)
    ahead = min(p - 1 - i + (v - 1) * round_size(p, m), len(forwards))
    order: TaskOrder = [(task,) for task in forwards[:ahead]]
    for k, task in enumerate(round_tasks(p, v, m, B)):
        order += [(f,) for f in forwards[ahead + k : ahead + k + 1]] + [(task,)]
        order += [(late[k - i],)] if k >= i else []
    return order + [(task,) for task in late[max(0, len(late) - i) :]]


def interleaved_zb_seconds(runs: Sequence[StageRun[X]], shape: PipelineShape[X]) -> X:
    """Return the seconds of the interleaved zero-bubble schedule.

    >>> from shardwise.training.schedules import PipelineShape, StageRun
    >>> stages = (StageRun(count=4.0, forward=2.0, backward_input=2.0, backward_weight=2.0),)
    >>> shape = PipelineShape(num_stages=4.0, num_chunks=2.0, num_micro=16.0, send=0.0, overlap_send=True)
    >>> interleaved_zb_seconds(stages, shape)
    99.0
    """
    q, v = shape.num_stages - 1, shape.num_chunks
    zero = 0 * q
    waits = (
        StageWait(others=(zero, q, zero), own=(zero, zero, zero), hops=(v + 1) * q + v - 1),
        StageWait(others=(q, q, zero), own=(zero, zero, zero - q), hops=(v + 3) * q + v - 1),
        StageWait(others=(q, zero, zero), own=(zero, zero, zero), hops=(v + 2) * q + v - 1),
    )
    return waiting_seconds(runs, shape, waits, SendSeconds(inner=2 * v, ends=2 * v - 1, around=2 * q - 3), folded=False)


def _in_flight(shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches in flight: (v - 1)n + p of v chunks on every device, with rounds of n."""
    p, v, m = shape.num_stages, shape.num_chunks, shape.num_micro
    chunks = (v - 1) * rounds(shape) + minimum(p, m)
    return minimum(chunks / v + 0 * stage, m)


SCHEDULE = PipelineSchedule(
    name="interleaved-zb",
    order=interleaved_zb_order,
    seconds=interleaved_zb_seconds,
    in_flight=_in_flight,
    tolerance=0.09,
    passed_whole=False,
)
