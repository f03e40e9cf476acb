"""Strong scaling: one job searched on more and more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property

from shardwise.errors import InputError, Problem
from shardwise.field_types import typed
from shardwise.hardware import Cluster, part_of
from shardwise.models import Model
from shardwise.notebook import PlainValues
from shardwise.plans import Training
from shardwise.records import dataclass, replace
from shardwise.search._executor import SerialExecutor
from shardwise.search._grid import PlanGrid
from shardwise.search._options import SearchOptions
from shardwise.search._result import PlanCounts
from shardwise.search._space import IntRanges, SearchSpace
from shardwise.search._training import SearchTask, TrainingResult, searched, task_of, work_of
from shardwise.training import TrainReport


@dataclass(frozen=True, kw_only=True)
class ScalingRow(PlainValues):
    """The best plan on so many devices; `efficiency` is its tokens a second and device over the first row's."""

    num_devices: int
    result: TrainingResult
    efficiency: float | None

    @property
    def best(self) -> TrainReport | None:
        """The best plan, None where nothing fits."""
        return self.result.best[0] if self.result.best else None


@dataclass(frozen=True, kw_only=True)
class ScalingResult(TrainingResult):
    """The answers on several counts of devices as one: the best on each count, the fastest first."""

    reports: tuple[TrainReport, ...]
    plans: int

    @property
    def num_plans(self) -> int:
        """Plans of all spaces together."""
        return self.plans

    @cached_property
    def best(self) -> tuple[TrainReport, ...]:
        """The best plan on each count, the fastest first."""
        return tuple(sorted(self.reports, key=lambda report: report.step_seconds))

    @cached_property
    def front(self) -> Sequence[TrainReport]:
        """The best plan on each count."""
        return self.reports


def scaled_result(rows: Sequence[ScalingRow]) -> ScalingResult:
    """Return rows of strong scaling as one answer, whose front is the best plan on each count of devices."""
    last, counts = rows[-1].result, PlanCounts()
    for row in rows:
        for one in fields(PlanCounts):
            setattr(counts, one.name, getattr(counts, one.name) + getattr(row.result.counts, one.name))
    return ScalingResult(
        task=last.task,
        partial=replace(last.partial, counts=counts),
        seconds=sum(row.result.seconds for row in rows),
        covered=last.covered,
        reports=tuple(row.best for row in rows if row.best is not None),
        plans=sum(row.result.num_plans for row in rows),
    )


def doubling(low: int, high: int) -> tuple[int, ...]:
    """Return counts that double from the least, up to the most.

    >>> doubling(128, 1000)
    (128, 256, 512)
    """
    counts = [low]
    while 2 * counts[-1] <= high:
        counts.append(2 * counts[-1])
    return tuple(counts)


@typed
def strong_scaling(
    model: Model,
    cluster: Cluster,
    job: Training,
    counts: Sequence[int],
    space: SearchSpace | None = None,
    options: SearchOptions | None = None,
) -> tuple[ScalingRow, ...]:
    """Return the best plan of the same job on each count of devices, the first devices of a cluster.

    A space that allows fewer devices than there are allows up to each count. Raises `InputError` where the cluster has
    fewer devices than a count.

    >>> from shardwise.models import load_model
    >>> on, job = Cluster.parse("8xa100-sxm-80gb"), Training(seq_len=1024, global_batch=64)
    >>> rows = strong_scaling(load_model("gpt2"), on, job, (2, 4, 8))
    >>> [row.num_devices for row in rows], rows[0].efficiency
    ([2, 4, 8], 1.0)
    """
    space, options = space or SearchSpace(), options or SearchOptions(top=1)
    if not counts or min(counts) < 1:
        rule, remedy = "must be counts of at least one device", "write for example (8, 16, 32)"
        raise InputError([Problem("counts", str(tuple(counts)), rule, remedy)])
    works = [(count, scaled_task(work_of(model, cluster, job, space, options), count)) for count in counts]
    return tuple(scaled_rows(works, lambda work: searched(work, SerialExecutor())))


def scaled_task(work: SearchTask, count: int) -> SearchTask:
    """Return the work of a search on the first so many devices of its cluster."""
    every = [task.grid for task in work.tasks]
    most = max(grid.case.cluster.num_devices for grid in every)
    if count > most:
        rule = f"needs {count} devices, and there are {most}"
        remedy = f"ask on as many devices as the largest of the range, or for at most {most}"
        raise InputError([Problem("scaling", count, rule, remedy)])
    # One device alone has a grid of its own, whatever the count; those of more leave it the count of 1.
    within = [grid for grid in every if not grid.space.devices.ranges or min(grid.space.devices.ranges)[0] <= count]
    return task_of([_scaled(grid, count) for grid in within or every], work.options)


def _scaled(grid: PlanGrid, count: int) -> PlanGrid:
    """Return a grid of at most so many devices."""
    cluster, devices = grid.case.cluster, grid.space.devices
    within = IntRanges(tuple((low, min(high, count)) for low, high in devices.ranges if low <= count))
    case = replace(grid.case, cluster=part_of(cluster, min(count, cluster.num_devices)))
    return replace(grid, case=case, space=replace(grid.space, devices=within))


def scaled_rows(
    works: Iterable[tuple[int, SearchTask]], search: Callable[[SearchTask], TrainingResult]
) -> Iterator[ScalingRow]:
    """Yield the row of each count of devices; a search that was interrupted is the last."""
    first: float | None = None
    for count, work in works:
        results = search(work)
        rate = results.best[0].tokens_per_second_per_gpu if results.best else None
        first = first or rate
        yield ScalingRow(num_devices=count, result=results, efficiency=rate / first if rate and first else None)
        if results.covered < 1:
            return
