"""Seconds and activations of a pipeline schedule in closed form, on numbers, columns and traced numbers alike.

The forms are the longest paths through a fixed order of tasks; `simulate` runs the same orders task by task, and is
what they are held against. Largest differences seen in thousands of random pipelines (hundreds, with messages) of 2 to
16 stages and 1 to 64 micro-batches, fewer than stages and odd numbers included:

| schedule | equal stages | stages +-20 %, messages free | stages +-20 %, messages of 0.2 forwards |
|---|---|---|---|
| gpipe | exact | exact | exact |
| 1f1b | exact | 0.5 % | 1.0 % |
| interleaved | exact | 1.5 % | 3.1 % |
| zb-h1 | exact | 2.1 % | 2.6 % |
| dualpipe | exact | 2.7 % | 3.4 % |
| looped-bfs | exact | exact | exact |
| sequential | exact | exact | exact |
| interleaved-zb | exact | 8.1 % | 10.7 % |
| zb-v | exact | 6.1 % | 6.2 % |
| dualpipe-v | exact | 5.5 % | 9.5 % |
| v-half, v-min | 2 %, two stages 4.5 % | 11 % | 11 % |

The last five are the largest of some waits (`waiting_seconds`): half of the pipelines are within 0.4, 0.4, 1.0, 1.9 and
2.3 %, nine of ten within 2 to 3 %, of the last two 5 to 7 %; with messages of a twentieth of a forward and equal stages
within 1.1 % (the last two 4.4 %), of a fifth within 2.7, 1.4 and 1.3 %.

Messages are hops of the paths, so they are exposed where the order of tasks leaves no slack: in the fill and the drain
of every schedule, and, even when they overlap, in the steady state of 1F1B and DualPipe, whose stages hold nothing to
spare: about 2(1 - 1/p) messages a micro-batch with 1F1B, half of that with DualPipe. Interleaved 1F1B and ZB-H1 hide
them there. A message that does not overlap keeps its sender still: two for each micro-batch and chunk on inner stages.
With equal stages messages are exact too, up to 0.2 forwards (1 % with zb-h1; interleaved up to 0.4 chunks, 2 % beyond).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module

from shardwise.errors import Problems
from shardwise.ledger.number import X, above, is_plain, largest, maximum
from shardwise.ledger.traced import named
from shardwise.plans import Schedule, find_rules
from shardwise.records import replace
from shardwise.training.schedules._stage_times import sends_of, slowest_work
from shardwise.training.schedules._types import (
    FULL,
    B,
    F,
    Kind,
    PipelineSchedule,
    PipelineShape,
    PipelineTime,
    Slot,
    StageRun,
    Task,
    TaskOrder,
    W,
)


@cache
def find_schedule(name: Schedule) -> PipelineSchedule:
    """Return the schedule of a name, from the file of that name.

    >>> find_schedule("dualpipe").mirrored
    True
    """
    schedule: PipelineSchedule = import_module(f"{__name__}._{name.replace('-', '_')}").SCHEDULE
    return schedule


def pipeline_time(schedule: Schedule, runs: tuple[StageRun[X], ...], shape: PipelineShape[X]) -> PipelineTime[X]:
    """Return the seconds of the pipeline part of a step, and which of them are bubble and exposed messages.

    arXiv:1811.06965 (gpipe), arXiv:2104.04473 section 2.2 (1f1b, interleaved), arXiv:2401.10241 section 2.1 (zb-h1),
    arXiv:2412.19437 section 3.2.1 (dualpipe); unequal stages are derived, see `schedule_forms`. Chunks of a stage cost
    the same, and a DualPipe pair takes the sum of its two tasks: what pairing hides is not part of their seconds. What
    no order of tasks can run (`schedule_problems`) is not refused here.

    >>> stages = StageRun(count=4, forward=1.0, backward_input=1.0, backward_weight=1.0)
    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.0, overlap_send=True)
    >>> for schedule in ("1f1b", "zb-h1", "dualpipe"):
    ...     print(schedule, pipeline_time(schedule, (stages,), shape).bubble)
    1f1b 9.0
    zb-h1 3.0
    dualpipe 2.0
    """
    own = find_schedule(schedule)
    busy = shape.num_micro * slowest_work(runs, mirrored=own.mirrored)
    free = maximum(own.seconds(runs, replace(shape, send=shape.send * 0)), busy)
    sent = free if is_plain(shape.send, 0) else maximum(own.seconds(runs, shape), free)
    busy = named(busy, "slowest stage computes", unit="s")
    bubble = named(free - busy, "pipeline bubble", unit="s")
    exposed_send = named(sent - free, "exposed pipeline messages", unit="s")
    return PipelineTime(total=busy + bubble + exposed_send, busy=busy, bubble=bubble, exposed_send=exposed_send)


def least_pipeline_seconds(schedule: Schedule, runs: tuple[StageRun[X], ...], shape: PipelineShape[X]) -> X:
    """Return seconds that `pipeline_time` is never below, messages or not; they never fall when a stage gets slower.

    Every micro-batch passes the slowest stage; before the first has come to it and after the last has left it (but for
    late weight gradients) nothing runs there. The last stage of each run waits the longest.

    >>> stages = StageRun(count=4, forward=1.0, backward_input=1.0, backward_weight=1.0)
    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.5, overlap_send=True)
    >>> least_pipeline_seconds("1f1b", (stages,), shape)
    33.0
    """
    own = find_schedule(schedule)
    if own.least is not None:
        bound: X = own.least(runs, shape)
        return bound
    lengths = []
    before = runs[0].count * 0
    for run in runs:
        work = run.forward + run.backward_input + run.backward_weight
        passed = work if own.passed_whole else run.forward
        waits = before + maximum(run.count - 1, 0) * passed
        lengths.append(above(run.count, 0, waits / shape.num_chunks + shape.num_micro * work, 0))
        before = before + run.count * passed
    return largest(lengths)


def in_flight(schedule: Schedule, shape: PipelineShape[X], stage: X) -> X:
    """Return the micro-batches whose activations a stage holds at its peak, in activations of one whole stage.

    Stages count from 0. Never more than there are micro-batches.

    >>> shape = PipelineShape(num_stages=4, num_chunks=1, num_micro=8, send=0.0, overlap_send=True)
    >>> [in_flight("1f1b", shape, stage) for stage in range(4)]
    [4, 3, 2, 1]
    """
    micro_batches: X = find_schedule(schedule).in_flight(shape, stage)
    return micro_batches


def schedule_problems(schedule: Schedule, num_stages: int, num_micro: int, num_chunks: int) -> Problems:
    """Return what forbids running the schedule on these whole numbers; empty when it is legal.

    Rounds of an interleaved schedule that micro-batches do not fill are not a problem here: frameworks differ in them.

    >>> for problem in schedule_problems("dualpipe", 4, 6, 1).items:
    ...     print(problem)
    num_micro = 6: is not enough: DualPipe needs an even number of at least 2 x pp = 8; use 8, or another schedule
    """
    problems, rules = Problems(), find_rules(schedule)
    for field, value in (("num_stages", num_stages), ("num_micro", num_micro), ("num_chunks", num_chunks)):
        if value < 1:
            problems.add(field, value, "must be at least 1", "use 1 or more")
    if num_chunks not in rules.chunks_of([num_chunks]) and num_stages > 1:
        least, most = rules.chunks
        rule = f"must be {most or f'{least} or more'} for {schedule}"
        problems.add("num_chunks", num_chunks, rule, f"use {most or least}, or another schedule")
    if num_stages <= 1 or num_micro < 1:
        return problems
    if rules.even_stages and num_stages % 2:
        problems.add("num_stages", num_stages, f"must be even for {schedule}", f"use {num_stages + 1}")
    if (next_count := rules.next_count(num_stages, num_micro)) != num_micro:
        needs = rules.needs.format(pp=num_stages, twice=2 * num_stages)
        problems.add("num_micro", num_micro, f"is not enough: {needs}", f"use {next_count}, or another schedule")
    return problems


def device_order(schedule: Schedule, shape: tuple[int, int, int], device: int) -> TaskOrder:
    """Return the slots of one device of (p, v, m), in the order in which it runs them.

    >>> [f"{task.kind} {task.micro_batch}" for slot in device_order("1f1b", (2, 1, 2), 0) for task in slot]
    ['forward 0', 'forward 1', 'backward 0', 'backward 1']
    """
    p, v, m = shape
    return find_schedule(schedule).order(p, v, m, device)
