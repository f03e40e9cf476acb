"""The search of training plans: every legal plan of a space, evaluated and ranked, with what became of all others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardwise.cost import band_of
from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training, find_stack
from shardwise.plans.laws import stack_problems
from shardwise.records import dataclass
from shardwise.search._batch import Entry, PlanBatch, plan_of
from shardwise.search._evaluator import Evaluator
from shardwise.search._executor import Executor, Part, SerialExecutor
from shardwise.search._frames import training_frame
from shardwise.search._grid import PlanGrid
from shardwise.search._launch import within
from shardwise.search._limits import PlanLimits, limits_of
from shardwise.search._options import OBJECTIVES, SearchOptions
from shardwise.search._ranking import ParetoFront, TopN
from shardwise.search._remedies import Remedies, report_on
from shardwise.search._remedy import Remedy
from shardwise.search._result import Counts, Rejection, Reports, SearchResult
from shardwise.search._space import SearchSpace
from shardwise.training import TrainingCase, TrainReport

if TYPE_CHECKING:
    from shardwise.frames import Frame


@dataclass(slots=True)
class PartialResult:
    """What became of the plans of some parts of a space; `nearest` is short of memory, `closest` misses a limit."""

    top: TopN
    front: ParetoFront
    counts: Counts = field(default_factory=Counts)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Problem] = field(default_factory=dict)
    nearest: Entry | None = None
    closest: Entry | None = None
    parts: int = 0

    @property
    def known(self) -> tuple[TopN, ParetoFront]:
        """The best plans and the front of the parts."""
        return self.top, self.front

    def merge(self, other: PartialResult) -> None:
        """Take in what became of the plans of other parts."""
        self.top.merge(other.top)
        self.front.merge(other.front)
        for name in ("legal", "fitting", "evaluated", "too_large"):
            setattr(self.counts, name, getattr(self.counts, name) + getattr(other.counts, name))
        self.rejected += other.rejected
        for name, problem in sorted(other.examples.items()):
            kept = self.examples.get(name, problem)
            self.examples[name] = min(kept, problem, key=str)
        self.nearest = _least(self.nearest, other.nearest)
        self.closest = _least(self.closest, other.closest)
        self.parts += other.parts


def _least(one: Entry | None, other: Entry | None) -> Entry | None:
    return min(one, other) if one is not None and other is not None else one or other


@dataclass(slots=True)
class SearchTask:
    """Evaluates parts of a space; it travels to other processes, and what it saw first helps to leave out later plans.

    A plan is left out only where seconds that its step is never shorter than put it behind plans already found.
    """

    grid: PlanGrid
    options: SearchOptions
    limits: PlanLimits = field(init=False)
    top: TopN = field(init=False)
    front: ParetoFront = field(init=False)
    evaluator: Evaluator | None = None

    def __post_init__(self) -> None:
        self.limits = limits_of(self.grid, self.options)
        self.top, self.front = TopN(self.options.top, self.options.objective), ParetoFront()

    @property
    def exhaustive(self) -> bool:
        """Whether every plan that fits is timed: limits are counted exactly, and lost time is in no bound."""
        lossy = self.limits.lossy and len(self.grid.device_counts) > 1
        return bool(not self.options.prune or self.limits.asked or lossy)

    @property
    def limit_bytes(self) -> float:
        """Bytes up to which a prediction fits with the wanted chance, at most those of the device."""
        band = self.grid.case.memory_band
        return self.grid.case.cluster.device.usable_memory_bytes / max(1.0, band.at(self.options.risk))

    def _may(self, batch: PlanBatch) -> Any:
        return self.top.may(batch) | self.front.may(batch)

    @property
    def known(self) -> tuple[TopN, ParetoFront]:
        """The best plans and the front so far."""
        return self.top, self.front

    def learn(self, known: tuple[TopN, ParetoFront]) -> None:
        """Take in the best plans and the front of other parts."""
        self.top.merge(known[0])
        self.front.merge(known[1])

    def recorded(self) -> Evaluator:
        """Return what evaluates parts, with the blocks of the model recorded."""
        if self.evaluator is None:
            may = None if self.exhaustive else self._may
            self.evaluator = Evaluator(self.grid, self.limit_bytes, prune=self.options.prune, may=may)
        return self.evaluator

    def __call__(self, parts: Sequence[Part]) -> PartialResult:
        """Return what became of the plans of the parts."""
        evaluator = self.recorded().fresh()
        rejected, closest = Counter[str](), None
        for start, end in parts:
            for batch in evaluator.batches(start, end):
                lasting, broken, near = self.limits.kept(batch)
                rejected += broken
                closest = _least(closest, near)
                self.top.add(lasting)
                self.front.add(replace(lasting, step_seconds=batch.step_seconds))
        evaluator.counts.fitting -= sum(rejected.values())
        partial = PartialResult(self.top.copied(), self.front.copied(), counts=evaluator.counts, parts=len(parts))
        partial.rejected = rejected + Counter(evaluator.constraints.rejected)
        partial.examples.update(evaluator.constraints.examples)
        partial.nearest, partial.closest = evaluator.nearest, closest
        return partial


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingResult(SearchResult[TrainReport]):
    """The answer of a search of training plans; `covered` is the share of the space that was evaluated."""

    task: SearchTask
    partial: PartialResult
    seconds: float
    covered: float

    def frame(self) -> Frame:
        """Return every legal plan of the space as a row, whether it fits or not."""
        return training_frame(self.grid, self.options)

    @property
    def options(self) -> SearchOptions:  # type: ignore[override]
        """What was wanted."""
        return self.task.options

    @property
    def grid(self) -> PlanGrid:
        """The plans of the space."""
        return self.task.grid

    @property
    def num_plans(self) -> int:
        """Plans of the space, legal or not."""
        return self.grid.num_plans

    @property
    def counts(self) -> Counts:
        """Plans that are legal, feasible, and were evaluated in memory and time."""
        return self.partial.counts

    @cached_property
    def best(self) -> tuple[TrainReport, ...]:
        """The best plan of each of the best sets of degrees, as `train` answers it."""
        return tuple(self.report(entry) for entry in self.partial.top.entries)

    def alternatives(self, report: TrainReport) -> tuple[float, ...]:
        """Return seconds of the best plans of a row's degrees within its band, the row's own first."""
        # The seconds of the ranking include the time lost to failures.
        found = [e.step_seconds * report.goodput for e in self.partial.top.like(plan_degrees(report.plan))]
        band = band_of("step_seconds", report.conditions)
        return tuple(s for s in found if s <= report.step_seconds * band.high / band.low)

    @cached_property
    def front(self) -> Sequence[TrainReport]:
        """Plans that none beats in step time, memory and devices at once."""
        return Reports(self.partial.front.plans(), self.report)

    @cached_property
    def nearest(self) -> TrainReport | None:
        """The plan that misses the limits by the least where none keeps them, else that short of the least memory."""
        entry = self.partial.nearest if self.best or self.partial.closest is None else self.partial.closest
        return self.report(entry) if entry is not None else None

    def report(self, entry: Entry) -> TrainReport:
        """Return the report of a ranked plan."""
        return report_on(self.grid, plan_of(entry.key, self.grid))

    def value(self, report: TrainReport) -> float:
        """Return the objective of a plan as it is ranked, less being better."""
        measure = OBJECTIVES[self.options.objective]
        return float(measure(report.step_seconds / report.goodput, report.device_bytes, report.plan.num_devices))

    @cached_property
    def remedies(self) -> Remedies:
        """What would help the plans that were rejected."""
        return Remedies(
            limits=self.task.limits,
            limit_bytes=self.task.limit_bytes,
            grid=self.grid,
            counts=self.counts,
            rejections=self.partial.rejected,
            examples=self.partial.examples,
            best=self.best,
            nearest=self.nearest,
        )

    def remedy(self, name: str) -> Remedy | None:
        """Return what would help plans that a law or a limit rejected, None where nothing is known."""
        return self.remedies.of(name)

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans each rejected and a remedy."""
        return self.remedies.rejected


def plan_degrees(plan: Plan) -> tuple[int, ...]:
    """Return the devices and the degrees by which plans are told apart in a ranking."""
    return plan.num_devices, plan.tp, plan.tp2, plan.cp, plan.pp, plan.dp, plan.ep, plan.etp


def plan_training(
    model: Model,
    cluster: Cluster,
    job: Training,
    space: SearchSpace | None = None,
    options: SearchOptions | None = None,
    *,
    executor: Executor | None = None,
) -> TrainingResult:
    """Return the best plans of a space for a training job; raises `InputError` where the job or the space is wrong.

    The answer is the optimum of the model over the space: plans are left out only where a law forbids them, they
    take more memory than there is or they break a limit.

    >>> from shardwise.models import load_model
    >>> job = Training(seq_len=1024, global_batch=64)
    >>> found = plan_training(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), job)
    >>> found.counts.fitting > 0 and found.best[0].fits
    True
    """
    return searched(work_of(model, cluster, job, space, options), executor or SerialExecutor())


def work_of(
    model: Model, cluster: Cluster, job: Training, space: SearchSpace | None, options: SearchOptions | None
) -> SearchTask:
    """Return the task of a search, its input checked."""
    space, options, found = space or SearchSpace(), (options or SearchOptions()).sought("step"), Problems()
    with found.collect():
        space.check()
    if job.global_batch < 1:
        rule = "is needed: plans are compared for the same batch"
        found.add("global_batch", job.global_batch, rule, "for example 1024")
    found.items += options.training_problems(cluster, job)
    found.raise_if_any()
    case = TrainingCase(
        model=model,
        cluster=cluster,
        job=job,
        stack=find_stack(options.stack) if isinstance(options.stack, str) else options.stack,
        plan=Plan(sequence_parallel=False),
        efficiencies=options.efficiencies,
        overlap=options.overlap,
    )
    if not options.explore:
        _check_job(case)
    grid = PlanGrid(case=case, space=within(space, case.stack, options.explore), explore=options.explore)
    return SearchTask(grid, options)


def _check_job(case: TrainingCase) -> None:
    """Raise `InputError` for a precision or an optimizer that the framework does not run."""
    job = {"precision": case.recipe.precision.name, "optimizer": case.job.optimizer}
    problems = [p for p in stack_problems(case.stack, Plan(sequence_parallel=False), **job) if p.field in job]
    if problems:
        raise InputError([replace(p, remedy=f"{p.remedy}, or --explore") for p in problems])


def searched(
    task: SearchTask, executor: Executor, progress: Callable[[PartialResult, float], Any] | None = None
) -> TrainingResult:
    """Return the answer of a task; an interrupt ends it with what was covered by then."""
    start = time.perf_counter()
    parts = task.grid.chunks(task.options.rows)
    whole = PartialResult(TopN(task.top.size, task.top.objective), ParetoFront())
    try:
        if parts:
            # Processes that are forked have what is recorded before.
            task.recorded()
        for partial in executor.run(task, parts):
            whole.merge(partial)
            if progress is not None:
                progress(whole, whole.parts / len(parts))
    except KeyboardInterrupt:
        pass
    seconds = time.perf_counter() - start
    covered = whole.parts / len(parts) if parts else 1.0
    return TrainingResult(task=task, partial=whole, seconds=seconds, covered=covered)
