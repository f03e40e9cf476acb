"""One step as it runs: every chunk, message, bubble and update of every stage, from the event simulation.

The chunks take the seconds that the step gives them (`_step`), so what differs from the reported step is the closed
form of the schedule alone (`schedule`). Before and after the pipeline stand, one after another as the step adds them,
the gathering of weights, the reduction of gradients, the optimizer and the host work.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from shardwise.errors import InputError, Problem
from shardwise.ops.overlap import CostModel, sends_overlap
from shardwise.plans import Plan, find_rules
from shardwise.records import dataclass, replace
from shardwise.training._adding import adding_seconds
from shardwise.training._case import TrainingCase
from shardwise.training._evaluate import Evaluation, machine_of, send_of, step_job
from shardwise.training._overlap import covering_passes, data_parallel_seconds, once_a_step, sharding_waits
from shardwise.training._parts import ModelBlocks, Recipe
from shardwise.training._sizes import PlanSizes
from shardwise.training._stages import Stages
from shardwise.training._step import StageSeconds, StepJob, once_seconds, tied_seconds, weighted, weighted_axes
from shardwise.training._update import optimizer_seconds, orthogonal_seconds
from shardwise.training.schedules import FULL, B, F, Kind, PipelineShape, W, find_schedule
from shardwise.training.schedules.simulate import Event, simulate
from shardwise.training.schedules.simulate import SimulatedStage as Chunk

# Beyond these a trace is too large for a viewer, and the parts of each chunk too many to read.
MOST_TASKS, MOST_DETAILED = 400_000, 40_000
Lane = Literal["stage", "sends", "data parallel"]
_Part = tuple[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Something that runs on a lane of a stage, in seconds from the start of the step; `parts` lie within it in order.

    Kinds: forward, backward, backward_input, backward_weight, pair, bubble, send, optimizer, overhead; of parts also
    compute, recompute, weight gradients, and the axes of exposed messages (tp, tp2, cp, ep, etp, dp, pp).
    """

    stage: int
    lane: Lane
    kind: str
    start: float
    end: float
    micro_batch: int | None = None
    chunk: int | None = None
    hidden: bool = False
    parts: tuple[Span, ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineMessage:
    """A send between stages: when it leaves its stage, and when the chunk that waits for it starts."""

    stage: int
    to_stage: int
    sent: float
    used: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeline:
    """Every span of one step, and how its length compares with the step that the closed forms give."""

    plan: Plan
    spans: tuple[Span, ...]
    messages: tuple[TimelineMessage, ...]
    seconds: float
    step_seconds: float
    detailed: bool

    @property
    def difference(self) -> float:
        """Length over the reported step, less one."""
        return self.seconds / self.step_seconds - 1

    @property
    def tolerance(self) -> float:
        """How far the closed form of the schedule may be from the simulation, as a share."""
        return find_schedule(self.plan.schedule).tolerance


def _shares(
    costs: CostModel[float], sizes: PlanSizes[float], recipe: Recipe, parts: ModelBlocks[float], stage: Stages[float]
) -> _Cut:
    """Return the parts of the forward and backward pass of one micro-batch on a stage."""
    waits, often = sharding_waits(costs, sizes, recipe, parts, stage), 1 - once_a_step(sizes, recipe)
    added = adding_seconds(costs, sizes, recipe, parts, stage)
    first = weighted_axes(parts, stage, lambda k: k.forward_exposed)
    replayed = weighted_axes(parts, stage, lambda k: k.replay_exposed)
    every = weighted_axes(parts, stage, lambda k: k.exposed)
    back = {axis: seconds - first.get(axis, 0.0) for axis, seconds in every.items()}
    replay = weighted(parts, stage, lambda k: k.replay) - sum(replayed.values())
    forward = weighted(parts, stage, lambda k: k.forward) - sum(first.values())
    inputs = weighted(parts, stage, lambda k: k.backward_input + k.replay) - sum(back.values()) - replay
    return _Cut(
        forward=(("dp", often * waits.ahead), ("compute", forward + often * waits.lost_ahead), *first.items()),
        backward=(
            ("recompute", replay),
            ("compute", inputs + often * waits.lost_behind),
            *back.items(),
            ("dp", often * waits.behind),
        ),
        weight=(("weight gradients", weighted(parts, stage, lambda k: k.backward_weight) + added),),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """The parts of each pass of one micro-batch through a stage, in the order in which they are drawn."""

    forward: tuple[_Part, ...]
    backward: tuple[_Part, ...]
    weight: tuple[_Part, ...]

    def of(self, kind: Kind) -> tuple[_Part, ...]:
        return {F: self.forward, B: self.backward, W: self.weight, FULL: (*self.backward, *self.weight)}[kind]


def _later(event: Event, seconds: float, micro_batches: int) -> Event:
    """Return a task of a later run of the pipeline."""
    number = event.micro_batch + micro_batches
    return replace(event, micro_batch=number, start=event.start + seconds, end=event.end + seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """Seconds of what a stage does outside the pipeline, once a step."""

    gather: float
    gather_hidden: float
    gradients: float
    gradients_hidden: float
    update: float


class _Drawing:
    """The spans of a step in the making."""

    def __init__(self, case: TrainingCase, evaluation: Evaluation[float]) -> None:
        self.case, self.plan, self.num_micro = case, case.plan, round(evaluation.sizes.num_micro)
        self.machine = machine_of(case, evaluation.sizes.group_shapes)
        self.runs = [i for i, s in enumerate(evaluation.stages) for _ in range(int(s.count))]
        cuts = [_shares(self.machine, evaluation.sizes, case.recipe, evaluation.parts, s) for s in evaluation.stages]
        around = [
            self._around(evaluation, s, t) for s, t in zip(evaluation.stages, evaluation.step.stages, strict=True)
        ]
        self.cuts, self.around = [cuts[i] for i in self.runs], [around[i] for i in self.runs]
        job = _job(case, self.machine, evaluation)
        self.send = job.send if self.plan.pp > 1 else 0.0
        self.drains = case.stack.settings.pipeline_runs if self.plan.pp > 1 else 1
        self.overlaps = sends_overlap(self.machine, case.stack, self.plan.schedule)
        # The reduction of a tied table runs on the two ends, which the other stages wait for.
        self.tied = tied_seconds(self.machine, evaluation.sizes, job) if job.tied else 0.0
        self.detailed = self._tasks() <= MOST_DETAILED
        self.spans: list[Span] = []
        self.messages: list[TimelineMessage] = []

    def _tasks(self) -> int:
        tasks = 2 * self.plan.pp * self.plan.vpp * self.num_micro
        if tasks > MOST_TASKS:
            rule = f"would hold {tasks:,} chunks, at most {MOST_TASKS:,}"
            raise InputError(
                [Problem("timeline", tasks, rule, "give a smaller --global-batch: the steady state repeats")]
            )
        return tasks

    def _around(self, evaluation: Evaluation[float], stage: Stages[float], t: StageSeconds[float]) -> _Around:
        case = self.case
        passes = t.passes(covering_passes(evaluation.sizes, self.plan.schedule))
        shown, hidden, waits, covered = data_parallel_seconds(
            self.machine, case.recipe, evaluation.parts, stage, passes
        )
        shared = (self.machine, case.recipe, evaluation.sizes, evaluation.parts, stage)
        update = optimizer_seconds(*shared) + orthogonal_seconds(*shared)
        return _Around(
            gather=waits + self.num_micro * t.first,
            gather_hidden=covered,
            gradients=shown + self.num_micro * t.last,
            gradients_hidden=hidden,
            update=update,
        )

    def draw(self, evaluation: Evaluation[float]) -> StepTimeline:
        counts, timed = [s.count for s in evaluation.stages], evaluation.step.stages
        first = once_seconds(evaluation.sizes, counts, [self.num_micro * t.first for t in timed])
        last = once_seconds(evaluation.sizes, counts, [self.num_micro * t.last for t in timed])
        self._everywhere("dp", [a.gather for a in self.around], 0.0)
        end = self._pipeline(evaluation.step.parameters_exposed + first, evaluation)
        self._everywhere("dp", [a.gradients for a in self.around], end)
        end += evaluation.step.gradients_exposed - self.tied + last
        end = self._everywhere("tied", [self.tied * (i in (0, self.plan.pp - 1)) for i in range(self.plan.pp)], end)
        end = self._everywhere("optimizer", [a.update for a in self.around], end)
        end = self._everywhere("overhead", [evaluation.step.overhead] * self.plan.pp, end)
        return StepTimeline(
            plan=self.plan,
            spans=tuple(sorted(self.spans, key=lambda s: (s.stage, s.lane, s.start))),
            messages=tuple(self.messages),
            seconds=end,
            step_seconds=evaluation.step.total,
            detailed=self.detailed,
        )

    def _everywhere(self, kind: str, seconds: Sequence[float], at: float) -> float:
        """Draw what every stage does before any goes on; return when the last is done."""
        for stage, each in enumerate(seconds):
            self._put(Span(stage=stage, lane="stage", kind=kind, start=at, end=at + each))
        return at + max(seconds)

    def _put(self, span: Span) -> None:
        if span.end > span.start:
            self.spans.append(span)

    def _pipeline(self, at: float, evaluation: Evaluation[float]) -> float:
        """Draw the micro-batches of a step that start at `at`; return when the last of them is done."""
        timed = [evaluation.step.stages[i] for i in self.runs]
        chunks = [
            Chunk(
                forward=t.forward - t.first, backward_input=t.backward_input - t.last, backward_weight=t.backward_weight
            )
            for t in timed
        ]
        shape: PipelineShape[float] = PipelineShape(
            num_stages=self.plan.pp,
            num_chunks=self.plan.vpp,
            num_micro=self.num_micro // self.drains,
            send=self.send,
            overlap_send=self.overlaps,
        )
        once = simulate(self.plan.schedule, chunks, shape)
        end = at + self.drains * once.seconds
        drawn = [
            _later(evaluation, i * once.seconds, i * (self.num_micro // self.drains))
            for i in range(self.drains)
            for evaluation in once.events
        ]
        events = sorted(drawn, key=lambda event: (event.stage, event.start))
        for stage, own in groupby(events, key=lambda event: event.stage):
            self._stage(stage, list(own), (at, end))
        self._messages(drawn, at)
        return end

    def _stage(self, stage: int, events: Sequence[Event], pipeline: tuple[float, float]) -> None:
        """Draw the chunks of one stage, its bubbles, and what its data parallelism hides behind them."""
        at, end = pipeline
        done, last = at, at
        for _, slot in groupby(events, key=lambda event: (event.start, event.end)):
            tasks = list(slot)
            begin, last = at + tasks[0].start, at + tasks[0].end
            self._put(Span(stage=stage, lane="stage", kind="bubble", start=done, end=max(begin, done)))
            self._put(self._slot(stage, tasks, at))
            done = last
            if any(self._target(t) is not None for t in tasks):
                sent = last + self.send
                lane: Lane = "sends" if self.overlaps else "stage"
                self._put(Span(stage=stage, lane=lane, kind="send", start=last, end=sent, hidden=self.overlaps))
                done = last if self.overlaps else sent
        self._put(Span(stage=stage, lane="stage", kind="bubble", start=done, end=max(end, done)))
        self._hidden(stage, at, last)

    def _hidden(self, stage: int, at: float, last: float) -> None:
        """Draw the weights gathered behind the first chunks and the gradients reduced behind the last ones."""
        around = self.around[stage]
        self._put(
            Span(stage=stage, lane="data parallel", kind="dp", start=at, end=at + around.gather_hidden, hidden=True)
        )
        begin = max(last - around.gradients_hidden, at + around.gather_hidden)
        self._put(Span(stage=stage, lane="data parallel", kind="dp", start=begin, end=last, hidden=True))

    def _slot(self, stage: int, tasks: Sequence[Event], at: float) -> Span:
        """Return the span of a task, or of the two of a pair, one after the other for the eye."""
        spans, begin = [], at + tasks[0].start
        each = [self._seconds(stage, t) for t in tasks]
        for task, seconds in zip(tasks, each, strict=True):
            close = at + task.end if task is tasks[-1] else begin + seconds
            spans.append(self._task(stage, task, (begin, close)))
            begin = close
        if len(spans) == 1:
            return spans[0]
        start, end = at + tasks[0].start, at + tasks[0].end
        return Span(stage=stage, lane="stage", kind="pair", start=start, end=end, parts=tuple(spans))

    def _place(self, stage: int, chunk: int) -> int:
        """Return which stage's layers a task runs: with DualPipe the second direction is mirrored."""
        return self.plan.pp - 1 - stage if find_schedule(self.plan.schedule).mirrored and chunk else stage

    def _cut(self, stage: int, task: Event) -> list[_Part]:
        parts = self.cuts[self._place(stage, task.chunk)].of(task.kind)
        return [(kind, seconds / self.plan.vpp) for kind, seconds in parts if seconds > 0]

    def _seconds(self, stage: int, task: Event) -> float:
        return sum(seconds for _, seconds in self._cut(stage, task))

    def _task(self, stage: int, task: Event, ends: tuple[float, float]) -> Span:
        made: list[Span] = []
        at, close = ends
        cut = self._cut(stage, task) if self.detailed else []
        for i, (kind, seconds) in enumerate(cut):
            # The last part ends with its chunk: rounding must not let it stand out.
            end = close if i == len(cut) - 1 else min(at + seconds, close)
            made.append(Span(stage=stage, lane="stage", kind=kind, start=at, end=end))
            at = end
        own: dict[str, Any] = {"micro_batch": task.micro_batch, "chunk": task.chunk}
        return Span(stage=stage, lane="stage", kind=task.kind, start=ends[0], end=close, parts=tuple(made), **own)

    def _depth(self, task: Event) -> int:
        """Return how many chunks a micro-batch has come through before a task's."""
        return find_rules(self.plan.schedule).piece(self.plan.pp, task.stage, task.chunk)

    def _target(self, task: Event) -> tuple[bool, int, int] | None:
        """Return (forward, micro-batch, place) of the task that waits for a task's message, None where none does."""
        place = self._depth(task) + (1 if task.kind == F else -1)
        stays = find_rules(self.plan.schedule).stays(self.plan.pp, self._depth(task), place)
        if task.kind == W or stays or not 0 <= place < self.plan.pp * self.plan.vpp:
            return None
        return task.kind == F, task.micro_batch, place

    def _messages(self, events: Sequence[Event], at: float) -> None:
        made = {(t.kind == F, t.micro_batch, self._depth(t)): t for t in events if t.kind != W}
        for task in events:
            target = self._target(task)
            if target is not None and made[target].stage != task.stage:
                to = made[target]
                self.messages.append(
                    TimelineMessage(stage=task.stage, to_stage=to.stage, sent=at + task.end, used=at + to.start)
                )


def _job(case: TrainingCase, costs: CostModel[float], evaluation: Evaluation[float]) -> StepJob[float]:
    boundary = evaluation.layout.residual("boundary", case.model.hidden, "").size_bytes
    return step_job(case, evaluation.parts, send_of(case, costs, evaluation.sizes, boundary))


def timeline_of(case: TrainingCase, evaluation: Evaluation[float]) -> StepTimeline:
    """Return one step of an evaluated case, in seconds; raises `InputError` where it has too many chunks to draw."""
    return _Drawing(case, evaluation).draw(evaluation)
