"""What a pipeline is, in numbers: runs of equal stages, the shape of the schedule, and the seconds that come out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X


@dataclass(frozen=True, kw_only=True, slots=True)
class Run(Generic[X]):
    """Consecutive pipeline stages that cost the same, in seconds of one micro-batch through all chunks of one stage.

    A count of zero pads a column: such a run has no stages, whatever its seconds.
    """

    count: X
    forward: X
    backward_input: X
    backward_weight: X


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineShape(Generic[X]):
    """Size of the pipeline: stages (pp), chunks of the model on each stage (vpp), micro-batches and the message.

    `send` is the seconds of one boundary message. With `overlap_send` the stage computes while it travels, so that
    only waiting for it costs; without, the sender stands still for it.
    """

    num_stages: X
    num_chunks: X
    num_micro: X
    send: X
    overlap_send: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineTime(Generic[X]):
    """Seconds of the pipeline part of a step: `total = busy + bubble + exposed_send`.

    `total` runs from the first forward to the last backward, `busy` is what the slowest stage computes, `bubble` what
    it waits with free messages, and `exposed_send` what the messages add to that.
    """

    total: X
    busy: X
    bubble: X
    exposed_send: X
