"""An event simulation of the pipeline schedules, on plain numbers: the reference of the closed forms, and a timeline.

Each device runs its slots in the fixed order of `_types`; a slot starts when the device is free and what it
needs has arrived. A message takes `send` seconds; when sends do not overlap, the sender cannot compute meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.plans import Schedule, find_rules
from shardwise.records import dataclass
from shardwise.training.schedules import (
    FULL,
    F,
    Kind,
    PipelineShape,
    Slot,
    Task,
    TaskOrder,
    W,
    device_order,
    schedule_problems,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStage:
    """Seconds of one micro-batch on one pipeline stage, all its chunks together."""

    forward: float
    backward_input: float
    backward_weight: float

    def of(self, kind: Kind) -> float:
        """Return the seconds of one kind of task.

        >>> SimulatedStage(forward=1.0, backward_input=1.5, backward_weight=0.5).of("backward")
        2.0
        """
        full = self.backward_input + self.backward_weight
        return {F: self.forward, FULL: full, W: self.backward_weight}.get(kind, self.backward_input)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One task as it ran on the device `stage`; the two tasks of an overlapped pair share their start and end.

    With DualPipe the chunk is the direction: device i runs stage i of chunk 0 and stage p-1-i of chunk 1.
    """

    stage: int
    kind: Kind
    micro_batch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """What the simulation saw: seconds, every task, and the most activations each device held at once.

    `peak_in_flight` counts micro-batches on a whole stage, from the start of their forward to the end of their
    backward, its weight gradient included; with several chunks a stage, each chunk counts for its share.
    """

    seconds: float
    events: tuple[Event, ...]
    peak_in_flight: tuple[float, ...]


# What a device waits for: the pass, the micro-batch, and how many chunks it has come through.
_Result = tuple[bool, int, int]


class _Machine:
    """Devices with their place in time, and when each result is there for the device that waits for it."""

    def __init__(self, schedule: Schedule, stages: Sequence[SimulatedStage], shape: PipelineShape[float]) -> None:
        self.rules = find_rules(schedule)
        self.stages, self.num_chunks = stages, int(shape.num_chunks)
        self.depth = len(stages) * self.num_chunks
        self.send = shape.send if len(stages) > 1 else 0.0
        self.overlap = shape.overlap_send
        self.events: list[Event] = []
        self.made: dict[_Result, float] = {}
        self.free = [0.0] * len(stages)

    def place(self, device: int, chunk: int) -> int:
        """How many chunks a micro-batch has come through before this one."""
        return self.rules.piece(len(self.stages), device, chunk)

    def message(self, place: int, following: int) -> float:
        """Seconds of the message between two chunks that follow one another."""
        return 0.0 if self.rules.stays(len(self.stages), place, following) else self.send

    def task_seconds(self, device: int, task: Task) -> float:
        stage = self.place(device, task.chunk) if self.rules.mirrored else device
        return self.stages[stage].of(task.kind) / self.num_chunks

    def start(self, device: int, slot: Slot) -> float | None:
        """When the slot can start; None while something that it needs has not been made."""
        start = self.free[device]
        for task in slot:
            for result, message in self._needs(device, task):
                if result not in self.made:
                    return None
                start = max(start, self.made[result] + message)
        return start

    def _needs(self, device: int, task: Task) -> Iterator[tuple[_Result, float]]:
        place, k = self.place(device, task.chunk), task.micro_batch
        if task.kind == F and place:
            yield (True, k, place - 1), self.message(place - 1, place)
        if task.kind not in (F, W):
            yield (True, k, place), 0.0
            if place < self.depth - 1:
                yield (False, k, place + 1), self.message(place + 1, place)

    def run(self, device: int, slot: Slot, start: float) -> None:
        """Run a slot: the tasks of a pair take the sum of both, what they exchange inside already hidden."""
        end = start + sum(self.task_seconds(device, task) for task in slot)
        sends = False
        for task in slot:
            place = self.place(device, task.chunk)
            self.events.append(
                Event(
                    stage=device,
                    kind=task.kind,
                    micro_batch=task.micro_batch,
                    chunk=task.chunk,
                    start=start,
                    end=end,
                )
            )
            if task.kind != W:
                self.made[task.kind == F, task.micro_batch, place] = end
                following = place + 1 if task.kind == F else place - 1
                sends |= 0 <= following < self.depth and self.message(place, following) > 0
        self.free[device] = end + (self.send if sends and not self.overlap else 0.0)


def simulate(schedule: Schedule, stages: Sequence[SimulatedStage], shape: PipelineShape[float]) -> Timeline:
    """Return the seconds, events and peaks of a schedule run task by task; the shape holds plain whole numbers.

    Orders: arXiv:1811.06965, arXiv:2104.04473, arXiv:2401.10241, deepseek-ai/DualPipe; see `_types`.

    >>> stage = SimulatedStage(forward=1.0, backward_input=1.0, backward_weight=1.0)
    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0, overlap_send=True)
    >>> simulate("1f1b", [stage] * 4, shape).seconds
    33.0
    """
    sizes = (int(shape.num_stages), int(shape.num_chunks), int(shape.num_micro))
    _check(schedule, stages, sizes)
    machine = _Machine(schedule, stages, shape)
    orders = [device_order(schedule, sizes, device) for device in range(len(stages))]
    waiting = [list(reversed(order)) for order in orders]
    while any(waiting):
        left = sum(map(len, waiting))
        for device, slots in enumerate(waiting):
            while slots and (start := machine.start(device, slots[-1])) is not None:
                machine.run(device, slots.pop(), start)
        if sum(map(len, waiting)) == left:
            raise RuntimeError(f"the order of {schedule} waits for itself at {sizes}")
    return Timeline(
        seconds=max(event.end for event in machine.events),
        events=tuple(machine.events),
        peak_in_flight=tuple(_peak(order) / machine.num_chunks for order in orders),
    )


def _check(schedule: Schedule, stages: Sequence[SimulatedStage], sizes: tuple[int, int, int]) -> None:
    p, v, m = sizes
    problems = schedule_problems(schedule, p, m, v)
    if len(stages) != p:
        problems.add("stages", len(stages), f"must be {p}, one for each stage", "give the seconds of every stage")
    problems.raise_if_any()


def _peak(order: TaskOrder) -> int:
    """The most chunks held at once; a slot takes up what its forward makes before its backward gives any back."""
    in_flight = peak = 0
    for slot in order:
        in_flight += sum(task.kind == F for task in slot)
        peak = max(peak, in_flight)
        in_flight -= sum(task.kind in (FULL, W) for task in slot)
    return peak
