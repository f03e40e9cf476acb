"""Strong scaling: one job searched on more and more devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from shardwise.errors import InputError, Problem
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Training
from shardwise.search._engine import Here
from shardwise.search._limits import Wish, work_of
from shardwise.search._mesh import Counts
from shardwise.search._search import Found, Work, part_of, searched
from shardwise.search._space import Space, upto
from shardwise.training import TrainReport


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """The best plan on so many devices; `efficiency` is its tokens a second and device over the first row's."""

    num_devices: int
    found: Found
    efficiency: float | None

    @property
    def best(self) -> TrainReport | None:
        """The best plan, None where nothing fits."""
        return self.found.best[0] if self.found.best else None


@dataclass(frozen=True, kw_only=True)
class ScaledFound(Found):
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
    def front(self) -> tuple[TrainReport, ...]:
        """The best plan on each count."""
        return self.reports


def scaled_found(rows: Sequence[ScalingRow]) -> ScaledFound:
    """Return rows of strong scaling as one answer, whose front is the best plan on each count of devices."""
    last, counts = rows[-1].found, Counts()
    for row in rows:
        for one in fields(Counts):
            setattr(counts, one.name, getattr(counts, one.name) + getattr(row.found.counts, one.name))
    return ScaledFound(
        rows=last.rows,
        wish=last.wish,
        tally=replace(last.tally, counts=counts),
        seconds=sum(row.found.seconds for row in rows),
        covered=last.covered,
        reports=tuple(row.best for row in rows if row.best is not None),
        plans=sum(row.found.num_plans for row in rows),
    )


def doubling(low: int, high: int) -> tuple[int, ...]:
    """Return counts that double from the least, up to the most.

    >>> doubling(128, 1000)
    (128, 256, 512)
    """
    found = [low]
    while 2 * found[-1] <= high:
        found.append(2 * found[-1])
    return tuple(found)


def strong_scaling(
    model: Model,
    cluster: Cluster,
    job: Training,
    counts: Sequence[int],
    space: Space | None = None,
    wish: Wish | None = None,
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
    space, wish = space or Space(), wish or Wish(top=1)
    works = [(count, scaled_work(work_of(model, cluster, job, space, wish), count)) for count in counts]
    return tuple(scaled_rows(works, lambda work: searched(work, Here())))


def scaled_work(work: Work, count: int) -> Work:
    """Return the work of a search on the first so many devices of its cluster."""
    rows, case = work.rows, work.rows.case
    if count > case.cluster.num_devices:
        rule = f"needs {count} devices, and there are {case.cluster.num_devices}"
        raise InputError([Problem("scaling", count, rule, f"ask on {count} devices, or for fewer")])
    space = replace(rows.space, devices=upto(count)) if rows.space.devices.ranges else rows.space
    return work_of(case.model, part_of(case.cluster, count), case.job, space, work.wish)


def scaled_rows(works: Iterable[tuple[int, Work]], search: Callable[[Work], Found]) -> Iterator[ScalingRow]:
    """Yield the row of each count of devices; a search that was interrupted is the last."""
    first: float | None = None
    for count, work in works:
        found = search(work)
        rate = found.best[0].tokens_per_second_per_gpu if found.best else None
        first = first or rate
        yield ScalingRow(num_devices=count, found=found, efficiency=rate / first if rate and first else None)
        if found.covered < 1:
            return
