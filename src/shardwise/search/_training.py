"""The search of training plans: every legal plan of a space, evaluated and ranked, with what became of all others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from shardwise.cost import band_of, tie_factor
from shardwise.errors import Problems
from shardwise.field_types import typed
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training, sharding_stack
from shardwise.records import dataclass, replace
from shardwise.search._batch import FrontPlan, PlanBatch, PlanKey, RankedPlan, grid_of, plan_of
from shardwise.search._columns import check_degrees
from shardwise.search._evaluator import Evaluator
from shardwise.search._executor import Executor, PartRange
from shardwise.search._grid import PlanGrid
from shardwise.search._limits import PlanLimits, goodput_of, limits_of
from shardwise.search._options import OBJECTIVES, SearchOptions
from shardwise.search._ranking import ParetoFront, PartialResult, TopN, WantedPlans, least
from shardwise.search._remedies import Remedies, case_of, report_on
from shardwise.search._result import PlanCounts, PlanGroup, Rejection, Remedy, Reports, SearchResult, TiedPlan, loss_of
from shardwise.search._space import SearchSpace, check_experts
from shardwise.search._variants import grids_of
from shardwise.training import TrainingCase, TrainReport, with_values

if TYPE_CHECKING:
    from shardwise.frames import Frame


@dataclass(slots=True)
class SearchTask:
    """Evaluates parts of a space; it travels to other processes, and what it saw first helps to leave out later plans.

    A plan is left out only where seconds that its step is never shorter than put it behind plans already found.
    `others` search further grids, whose plans are ranked with its own; their parts come behind its own.
    """

    grid: PlanGrid
    options: SearchOptions
    others: tuple[SearchTask, ...] = ()
    limits: PlanLimits = field(init=False)
    top: TopN = field(init=False)
    front: ParetoFront = field(init=False)
    evaluator: Evaluator | None = None

    def __post_init__(self) -> None:
        self.limits = limits_of(self.grid, self.options)
        self.top, self.front = (
            TopN(self.options.top, self.options.objective, tie_factor(self.options.headline)),
            ParetoFront(),
        )
        for other in self.others:
            other.top, other.front = self.top, self.front

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """What travels to a process that starts anew; what evaluates parts is made again there."""
        return None, {one.name: getattr(self, one.name) for one in fields(self)} | {"evaluator": None}

    @property
    def tasks(self) -> tuple[SearchTask, ...]:
        """The searches of all grids, its own first."""
        return self, *self.others

    @property
    def weight(self) -> float:
        """What makes seconds of a step comparable to those of other grids."""
        return self.grid.variant.weight

    @property
    def num_plans(self) -> int:
        """Plans of all grids, legal or not."""
        return sum(task.grid.num_plans for task in self.tasks)

    def parts(self) -> list[PartRange]:
        """Return slices of the rows of all grids, numbered one after the other."""
        tasks, start = list[PartRange](), 0
        for task in self.tasks:
            tasks += [(start + low, start + high) for low, high in task.grid.chunks(self.options.rows)]
            start += len(task.grid.base["tp"])
        return tasks

    def _own(self, part: PartRange) -> tuple[SearchTask, PartRange]:
        """Return the search that a part is of, and its rows there."""
        start = 0
        for task in self.tasks:
            size = len(task.grid.base["tp"])
            if part[0] < start + size:
                return task, (part[0] - start, part[1] - start)
            start += size
        raise IndexError(part)

    @property
    def exhaustive(self) -> bool:
        """Whether every plan that fits is timed: limits are counted exactly, and lost time is in no bound."""
        lossy = (self.limits.lossy or self.limits.generation) and self.grid.space.devices.ranges
        return bool(not self.options.prune or self.limits.asked or lossy)

    @property
    def limit_bytes(self) -> float:
        """Bytes up to which a prediction fits with the wanted chance, at most those of the device."""
        band = self.grid.case.memory_band
        return self.grid.case.cluster.device.usable_memory_bytes / max(1.0, band.at(self.options.risk))

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
            wanted = None if self.exhaustive else WantedPlans(self.top, self.front, self.weight)
            self.evaluator = Evaluator(self.grid, self.limit_bytes, prune=self.options.prune, wanted=wanted)
        return self.evaluator

    def __call__(self, parts: Sequence[PartRange]) -> PartialResult:
        """Return what became of the plans of the parts."""
        if not self.others:
            return self._searched(parts)
        whole = PartialResult(TopN(self.top.size, self.top.objective, self.top.tie), ParetoFront())
        for part in parts:
            task, own = self._own(part)
            whole.merge(task._relative(task._searched([own])))
        return whole

    def _relative(self, partial: PartialResult) -> PartialResult:
        """Return a result whose nearest plan is told by its share of the bytes of its own devices."""
        if partial.nearest is not None:
            partial.nearest = replace(partial.nearest, value=partial.nearest.value / self.limit_bytes)
        return partial

    def _searched(self, parts: Sequence[PartRange]) -> PartialResult:
        evaluator = self.recorded().fresh()
        rejected, closest = Counter[str](), None
        for start, end in parts:
            for batch in evaluator.batches(start, end):
                lasting, broken, near = self.limits.kept(batch)
                rejected += broken
                closest = least(closest, near)
                self.top.add(self._weighed(lasting, lasting.step_seconds))
                self.front.add(self._weighed(lasting, batch.step_seconds))
        evaluator.counts.fitting -= sum(rejected.values())
        partial = PartialResult(self.top.copied(), self.front.copied(), counts=evaluator.counts, parts=len(parts))
        partial.rejected = rejected + Counter(evaluator.constraints.rejected)
        partial.examples.update(evaluator.constraints.examples)
        partial.nearest, partial.closest = evaluator.nearest, closest
        return partial

    def _weighed(self, batch: PlanBatch, seconds: Any) -> PlanBatch:
        return replace(batch, step_seconds=seconds if self.weight == 1 else seconds * self.weight)


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingResult(SearchResult[TrainReport]):
    """The answer of a search of training plans; `finish` adds what none is ranked by, such as rollouts, to a report."""

    task: SearchTask
    partial: PartialResult
    seconds: float
    covered: float
    finish: Callable[[TrainReport], TrainReport] = lambda report: report

    def frame(self) -> Frame:
        """Return every legal plan as a row, fitting or not."""
        from shardwise.search._frames import training_frame

        return training_frame([task.grid for task in self.task.tasks], self.options)

    @property
    def options(self) -> SearchOptions:  # type: ignore[override]
        """What was wanted."""
        return self.task.options

    @property
    def grid(self) -> PlanGrid:
        """The plans of the space, of several grids those of the first."""
        return self.task.grid

    @property
    def num_plans(self) -> int:
        """Plans of the space, legal or not."""
        return self.task.num_plans

    @property
    def counts(self) -> PlanCounts:
        """Plans that are legal, feasible, and were evaluated in memory and time."""
        return self.partial.counts

    @cached_property
    def best(self) -> Sequence[TrainReport]:
        """The best plan of each of the best sets of degrees, as `train` answers it."""
        return Reports(self.partial.top.entries, self.report)

    @cached_property
    def groups(self) -> tuple[PlanGroup[TrainReport, TrainingCase], ...]:
        """The best plans in groups of ties: plans of other degrees that may be as quick as the first of a group."""
        return tuple(
            PlanGroup(first=self.report(first), ties=tuple(self._tie(entry, first) for entry in others))
            for first, *others in self.partial.top.groups()
        )

    def _tie(self, entry: RankedPlan, first: RankedPlan) -> TiedPlan[TrainingCase]:
        grid = self.task.tasks[grid_of(entry.key)].grid
        behind = loss_of(self.options.objective, entry.value, first.value)
        return TiedPlan(plan=plan_of(entry.key, grid), case=grid.case, behind=behind)

    def _task_of(self, report: TrainReport) -> SearchTask:
        """Return the search of the grid that a report is of, as far as its cluster and job tell."""
        same = (t for t in self.task.tasks if _asked(t.grid.case) == _asked(report.case))
        return next(same, self.task)

    def alternatives(self, report: TrainReport) -> tuple[float, ...]:
        """Return seconds of the best plans of a row's degrees within its band, the row's own first."""
        task, share = self._task_of(report), goodput_of(report.case, report.plan.num_devices)
        degrees = task.grid.variant.choice, *plan_degrees(report.plan)
        # The seconds of the ranking include the time lost to failures.
        ranked = [e.step_seconds / task.weight * share for e in self.partial.top.like(degrees)]
        seconds = [task.limits.trained(one, report.plan.num_devices) for one in ranked]
        band = band_of("step_seconds", report.conditions)
        return tuple(s for s in seconds if s <= report.step_seconds * band.high / band.low)

    @cached_property
    def front(self) -> Sequence[TrainReport]:
        """Plans that none beats in step time, memory and devices at once."""
        return Reports(self.partial.front.plans(), self.report)

    @cached_property
    def front_plans(self) -> tuple[FrontPlan, ...]:
        """Seconds and bytes of the plans of the front, as they were ranked."""
        ranked = [(self.task.tasks[grid_of(entry.key)], entry) for entry in self.partial.front.plans()]
        cases = [case_of(task.grid, plan_of(entry.key, task.grid)) for task, entry in ranked]
        each = zip(ranked, cases, strict=True)
        return tuple(FrontPlan(case, e.step_seconds / task.weight, e.device_bytes) for (task, e), case in each)

    @cached_property
    def nearest(self) -> TrainReport | None:
        """The plan that misses the limits by the least where none keeps them, else that short of the least memory."""
        entry = self.partial.nearest if self.best or self.partial.closest is None else self.partial.closest
        return self.report(entry) if entry is not None else None

    def report(self, entry: RankedPlan) -> TrainReport:
        """Return the report of a ranked plan, made once."""
        if entry.key not in self._reports:
            grid = self.task.tasks[grid_of(entry.key)].grid
            self._reports[entry.key] = self.finish(report_on(grid, plan_of(entry.key, grid)))
        return self._reports[entry.key]

    @cached_property
    def _reports(self) -> dict[PlanKey, TrainReport]:
        return {}

    def value(self, report: TrainReport) -> float:
        """Return the objective of a plan as it is ranked, less being better."""
        return self.value_at(report, report.step_seconds)

    def value_at(self, report: TrainReport, seconds: float) -> float:
        """Return the objective of a plan whose step takes so many seconds."""
        measure, task, devices = OBJECTIVES[self.options.objective], self._task_of(report), report.plan.num_devices
        lasting = task.limits.ranked(seconds, devices) / goodput_of(report.case, devices)
        return float(measure(lasting * task.weight, report.device_bytes, devices))

    @cached_property
    def remedies(self) -> Remedies:
        """What would help the plans that were rejected, in the grid of the best plan where there are several."""
        first = self.best[0] if self.best else self.nearest
        entries = self.partial.top.entries[:1] or [e for e in (self.partial.nearest,) if e is not None]
        searched = next((task for task in self.task.tasks if task.grid.num_plans), self.task)
        task = self.task.tasks[grid_of(entries[0].key)] if entries and first is not None else searched
        own = [e for e in self.partial.top.entries if grid_of(e.key) == task.grid.variant.number]
        return Remedies(
            limits=task.limits,
            limit_bytes=task.limit_bytes,
            grid=task.grid,
            counts=self.counts,
            rejections=self.partial.rejected,
            examples=self.partial.examples,
            plans=[plan_of(entry.key, task.grid) for entry in own],
            best=Reports(own, self.report),
            nearest=None if own else self.nearest,
        )

    def remedy(self, name: str) -> Remedy | None:
        """Return what would help plans that a law or a limit rejected, None where nothing is known."""
        return self.remedies.of(name)

    @cached_property
    def rejected(self) -> tuple[Rejection, ...]:
        """The laws and limits in the order in which they are asked, with how many plans each rejected and a remedy."""
        return self.remedies.rejected


def _asked(case: TrainingCase) -> tuple[object, ...]:
    """Return what tells the choices of a search apart: the device and the job."""
    return case.cluster.device, case.job


def plan_degrees(plan: Plan) -> tuple[int, ...]:
    """Return the devices and the degrees by which plans are told apart in a ranking."""
    return plan.num_devices, plan.tp, plan.tp2, plan.cp, plan.pp, plan.dp, plan.ep, plan.etp


@typed
def work_of(
    model: Model,
    cluster: Cluster | Sequence[Cluster],
    job: Training,
    space: SearchSpace | None,
    options: SearchOptions | None,
) -> SearchTask:
    """Return the task of a search, its input checked."""
    clusters = (cluster,) if isinstance(cluster, Cluster) else tuple(cluster)
    space, options, problems = space or SearchSpace(), (options or SearchOptions()).sought("step"), Problems()
    with problems.collect():
        space.check()
    check_experts(problems, space, model)
    batches = space.global_batch or (job.global_batch,)
    if min(batches) < 1:
        problems.add(
            "global_batch", min(batches) or None, "is needed: plans are compared for the same batch", "for example 1024"
        )
    if not clusters:
        problems.add("cluster", None, "is missing: there is none to search on", 'use Cluster.parse("8xh100")')
    for one in clusters:
        problems.items += options.training_problems(one, job)
    problems.items[:] = dict.fromkeys(problems.items)
    problems.raise_if_any()
    case = TrainingCase(
        model=with_values(model, job),
        cluster=clusters[0],
        job=job,
        stack=sharding_stack(options.stack, *space.sharding),
        plan=Plan(sequence_parallel=False),
        efficiencies=options.efficiencies,
        overlap=options.overlap,
    )
    return task_of(grids_of(case, clusters, space, options), options)


def task_of(grids: Sequence[PlanGrid], options: SearchOptions) -> SearchTask:
    """Return the task that searches some grids together; raises `InputError` where they are too large."""
    for size in accumulate(len(grid.base["tp"]) for grid in grids):
        check_degrees(size, grids[0].device_counts[-1])
    first, *others = grids
    return SearchTask(first, options, tuple(SearchTask(grid, options) for grid in others))


def searched(
    task: SearchTask, executor: Executor, progress: Callable[[PartialResult, float], Any] | None = None
) -> TrainingResult:
    """Return the answer of a task; an interrupt ends it with what was covered by then."""
    start, parts = time.perf_counter(), task.parts()
    whole = PartialResult(TopN(task.top.size, task.top.objective, task.top.tie), ParetoFront())
    try:
        # Processes that are forked have what is recorded before.
        for one in task.tasks if parts else ():
            one.recorded()
        for partial in executor.run(task, parts):
            whole.merge(partial)
            if progress is not None:
                progress(whole, whole.parts / len(parts))
    except KeyboardInterrupt:
        pass
    for one in task.tasks if parts else ():
        one.recorded().compositions.kept.write()
    covered = whole.parts / len(parts) if parts else 1.0
    return TrainingResult(task=task, partial=whole, seconds=time.perf_counter() - start, covered=covered)
