"""Limits of a search of training plans: longest step and run, dearest run, least free memory.

A limit takes part after the laws and memory: a plan that breaks several counts under the first. With limits, every
plan that fits is timed, so that the counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from shardwise.errors import Problem, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model
from shardwise.plans import Plan, Training
from shardwise.search import _search
from shardwise.search._engine import Engine, Here, Part
from shardwise.search._mesh import Sheet
from shardwise.search._rank import Front, Top
from shardwise.search._rows import Rows
from shardwise.search._search import Found, Tally, Work, searched
from shardwise.search._space import Space
from shardwise.training import Case, TrainReport
from shardwise.units import show_bytes

TRAIN_LIMITS = {
    "max_step_seconds": "steps longer than asked",
    "max_run_seconds": "runs longer than asked",
    "max_usd": "runs dearer than asked",
    "min_free_bytes": "less free memory than asked",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish(_search.Wish):
    """What is wanted of a search of training plans, and limits; a limit of 0 is none.

    `max_run_seconds` and `max_usd` are of the job's token budget; `min_free_bytes` stay free on the fullest device.

    >>> Wish(objective="days", max_usd=2e6).top
    10
    """

    max_step_seconds: float = 0.0
    max_run_seconds: float = 0.0
    max_usd: float = 0.0
    min_free_bytes: float = 0.0

    def problems(self, cluster: Cluster, job: Training) -> tuple[Problem, ...]:
        """Return what is wrong with the limits for a job on a cluster."""
        found = Problems()
        for name in TRAIN_LIMITS:
            if not getattr(self, name) >= 0:
                found.add(name, getattr(self, name), "must not be negative", "leave it out for no limit")
        for name in ("max_run_seconds", "max_usd"):
            if getattr(self, name) and not job.token_budget:
                found.add(name, getattr(self, name), "needs the tokens of the run", "give for example --tokens 2T")
        if self.max_usd and cluster.usd_per_device_hour is None:
            found.add("max_usd", self.max_usd, "needs a price of the device", "give for example --price 2.5")
        limit = cluster.device.usable_memory_bytes
        if self.min_free_bytes >= limit:
            rule = f"is all that a device has, {show_bytes(limit)} to use"
            remedy = f"use less than {show_bytes(limit)}"
            found.add("min_free_bytes", show_bytes(self.min_free_bytes), rule, remedy)
        return tuple(found.items)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The limits of a wish as numbers that columns are held against; `goodput` by number of devices."""

    wish: Wish
    steps: float
    usd_per_device_second: float
    usable_bytes: float
    goodput: dict[int, float]

    def __deepcopy__(self, memo: dict[int, Any]) -> Bounds:
        return self

    def lasting(self, seconds: Any, devices: Any) -> Any:
        """Return seconds of a step with its share of the time lost to failures and checkpoints."""
        if all(share == 1 for share in self.goodput.values()):
            return seconds
        counts = np.array(sorted(self.goodput))
        shares = np.array([self.goodput[n] for n in counts.tolist()])
        return seconds / shares[np.searchsorted(counts, devices)]

    def ratios(self, seconds: Any, held: Any, devices: Any) -> dict[str, Any]:
        """Return by how much plans exceed each limit that was given, as ratios; up to 1 they keep it."""
        wish, run = self.wish, self.steps * self.lasting(seconds, devices)
        value: dict[str, Callable[[], Any]] = {
            "max_step_seconds": lambda: seconds / wish.max_step_seconds,
            "max_run_seconds": lambda: run / wish.max_run_seconds,
            "max_usd": lambda: run * devices * self.usd_per_device_second / wish.max_usd,
            "min_free_bytes": lambda: held / (self.usable_bytes - wish.min_free_bytes),
        }
        return {name: of() for name, of in value.items() if getattr(wish, name)}

    def judged(self, sheet: Sheet) -> tuple[Any, Counter[str]]:
        """Return which plans of a sheet keep the limits, and how many that fit fell to each."""
        left, fallen = sheet.fits, Counter[str]()
        for name, ratio in self.ratios(sheet.step_seconds, sheet.device_bytes, sheet.devices).items():
            kept = left & (ratio <= 1)
            fallen[name] += int(np.count_nonzero(left)) - int(np.count_nonzero(kept))
            left = kept
        return left, fallen


def bounds_of(rows: Rows, wish: Wish) -> Bounds:
    """Return the limits of a wish on the plans of a space."""
    case = rows.case
    price = case.cluster.usd_per_device_hour or 0.0
    return Bounds(
        wish=wish,
        steps=case.job.token_budget / case.job.tokens_per_step,
        usd_per_device_second=price / 3600,
        usable_bytes=case.cluster.device.usable_memory_bytes,
        goodput={n: goodput_of(case, n) for n in rows.device_counts},
    )


def goodput_of(case: Case, num_devices: int) -> float:
    """Return the share of time that trains on so many devices, as the report of a plan has it."""
    one = TrainReport(case=replace(case, plan=Plan(dp=num_devices)), evaluation=cast(Any, None), assumptions=())
    return one.goodput


@dataclass(slots=True)
class LimitedTop(Top):
    """The best plans among those that keep the limits, and how many that fit fell to each limit."""

    bounds: Bounds | None = None
    fallen: Counter[str] = field(default_factory=Counter)

    def add(self, sheet: Sheet) -> None:
        """Take the plans of a sheet that belong to the best."""
        if self.bounds is None:
            raise LookupError("bounds")
        fits, fallen = self.bounds.judged(sheet)
        self.fallen.update(fallen)
        seconds = self.bounds.lasting(sheet.step_seconds, sheet.devices)
        Top.add(self, replace(sheet, fits=fits, step_seconds=seconds))


@dataclass(slots=True)
class LimitedFront(Front):
    """The front among plans that keep the limits."""

    bounds: Bounds | None = None

    def add(self, sheet: Sheet) -> None:
        """Take the plans of a sheet that belong to the front."""
        if self.bounds is None:
            raise LookupError("bounds")
        Front.add(self, replace(sheet, fits=self.bounds.judged(sheet)[0]))


@dataclass(slots=True)
class LimitedWork(Work):
    """Evaluates parts of a space under limits; every plan that fits is timed."""

    def __post_init__(self) -> None:
        bounds = bounds_of(self.rows, cast(Wish, self.wish))
        self.top = LimitedTop(self.wish.top, self.wish.objective, bounds=bounds)
        self.front = LimitedFront(bounds=bounds)

    def _may(self, least_seconds: Any, held: Any, devices: Any) -> Any:
        return np.ones(np.broadcast_shapes(np.shape(least_seconds), np.shape(held), np.shape(devices)), bool)

    def __call__(self, parts: Sequence[Part]) -> Tally:
        """Return what became of the plans of the parts."""
        tally, top = Work.__call__(self, parts), cast(LimitedTop, self.top)
        tally.fallen.update(top.fallen)
        tally.counts.fitting -= sum(top.fallen.values())
        top.fallen = Counter()
        return tally


def work_of(model: Model, cluster: Cluster, job: Training, space: Space | None, wish: _search.Wish | None) -> Work:
    """Return the work of a search, its input checked."""
    found = Problems()
    wish = wish or Wish()
    with found.collect():
        work = _search.work_of(model, cluster, job, space, wish)
    if isinstance(wish, Wish):
        found.items += wish.problems(cluster, job)
    found.raise_if_any()
    limited = isinstance(wish, Wish) and any(getattr(wish, name) for name in TRAIN_LIMITS)
    lossy = job.failures_per_device_hour and len(work.rows.device_counts) > 1
    if isinstance(wish, Wish) and (limited or lossy):
        return LimitedWork(work.rows, wish)
    return work


def plan_training(
    model: Model,
    cluster: Cluster,
    job: Training,
    space: Space | None = None,
    wish: _search.Wish | None = None,
    *,
    engine: Engine | None = None,
) -> Found:
    """Return the best plans of a space for a training job; raises `InputError` where the job or the space is wrong.

    The answer is the optimum of the model over the space: plans are left out only where a law forbids them, they
    take more memory than there is or they break a limit.

    >>> from shardwise.models import load_model
    >>> job = Training(seq_len=1024, global_batch=64)
    >>> found = plan_training(load_model("gpt2"), Cluster.parse("4xa100-sxm-80gb"), job)
    >>> found.counts.fitting > 0 and found.best[0].fits
    True
    """
    return searched(work_of(model, cluster, job, space, wish), engine or Here())
