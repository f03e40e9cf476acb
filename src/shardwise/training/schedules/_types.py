"""What a pipeline is, in numbers and tasks, and what every schedule says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal

from shardwise.ledger.number import X
from shardwise.plans import Schedule, ScheduleRules, find_rules
from shardwise.records import dataclass

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]

F: Kind = "forward"
FULL: Kind = "backward"
B: Kind = "backward_input"
W: Kind = "backward_weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRun(Generic[X]):
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


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work on one device: a micro-batch through one chunk of the model, forward or backward.

    With DualPipe the chunk is the direction: 0 enters at the first device, 1 at the last.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


Slot = tuple[Task, ...]
TaskOrder = list[Slot]


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSchedule:
    """One pipeline schedule: what forbids it, the order of its tasks, what it holds, and its seconds in closed form.

    `order` gives the slots of device i of (p, v, m); `seconds` and `in_flight` take runs and a shape; `tolerance` is
    the largest difference of the closed form from the simulation, messages included. `holds_heads` is where every loss
    runs before a backward pass.
    """

    name: Schedule
    order: Callable[[int, int, int, int], TaskOrder]
    seconds: Callable[..., Any]
    in_flight: Callable[..., Any]
    tolerance: float
    least: Callable[..., Any] | None = None
    holds_heads: bool = False
    passed_whole: bool = True
    """What comes before a stage's first micro-batch and after its last is all of its passes, not its forward alone."""

    @property
    def rules(self) -> ScheduleRules:
        """What the schedule is to a plan."""
        return find_rules(self.name)

    @property
    def mirrored(self) -> bool:
        """Whether a device holds the opposite stage too."""
        return self.rules.mirrored

    @property
    def chunked(self) -> bool:
        """Whether a stage holds several pieces of the model."""
        return self.rules.chunked
