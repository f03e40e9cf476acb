"""Rows of plans whose weights, gradients and optimizer state alone are larger than a device: counted, not evaluated.

State depends on neither the micro-batch nor what is computed again: one number settles all plans of a set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from shardwise.records import dataclass
from shardwise.search._batch import PlanSelection
from shardwise.search._columns import runs
from shardwise.search._jobs import Job

# State is summed in another order than bytes are: so much of it may be rounding.
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class HopelessRows:
    """Rows of a job of which nothing fits, and bytes that no plan of each of them takes less than."""

    job: Job
    rows: Any
    least_bytes: Any

    def settle(self, most: int) -> None:
        """Count the rows; those that may hold the plan that is short of the least memory are judged by their bytes."""
        rows, least = self.rows, self.least_bytes
        while len(near := np.flatnonzero(least <= self.job.least_missed_bytes * _ROUNDING)):
            if len(near) > most:
                near = np.sort(near[np.argpartition(least[near], most - 1)[:most]])
            self.job.judge(rows[near])
            rows, least = np.delete(rows, near), np.delete(least, near)
        self.job.count_too_large(rows)


def hopeful(jobs: Sequence[Job], allowed: Any, sets: Any, limit_bytes: float) -> tuple[Any, list[HopelessRows]]:
    """Return those of some rows of which a plan may fit in one of the jobs and the others by job."""
    start, split = runs(sets[allowed])
    heads = PlanSelection(allowed[start], sets)
    each = [job.state(heads) for job in jobs]
    drop = (reduce(np.minimum, each) > limit_bytes * _ROUNDING)[split]
    if not drop.any():
        return allowed, []
    rows, own = allowed[drop], split[drop]
    return allowed[~drop], [HopelessRows(job, rows, state[own]) for job, state in zip(jobs, each, strict=True)]


def settle(hopeless: Iterable[HopelessRows], most: int) -> None:
    """Count rows of which nothing fits, those of the least bytes first."""
    for one in sorted(hopeless, key=lambda one: float(one.least_bytes.min())):
        one.settle(most)
