"""The space of a search for a way to serve a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.errors import Problem, Problems
from shardwise.plans import AXES, Plan, Serving
from shardwise.plans.fields import DEPLOYED
from shardwise.records import dataclass, replace
from shardwise.search._space import AxisOrder, IntRanges, check_ranges, upto
from shardwise.serving import Engine, cache_bytes, engine_on, find_format, stages_together

EVERY, BATCHES = IntRanges(), upto(4096)
MOST_BATCHES = 10_000
WORDS = ("engine", "weights", "kv_cache", "compute")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingSpace:
    """What each field of a deployment may be; `devices` are counts of devices, by default all of the cluster.

    Batches are those given one by one; of a range its ends, the powers of two inside, the multiples of `batch_step`
    where it is not 0, and for each deployment the largest batch that fits and keeps the limits on latency. Empty words
    for formats follow the job, and where that is silent the checkpoint.

    >>> ServingSpace(batch=IntRanges.parse("3,8..20")).batches
    (3, 8, 16, 20)
    """

    devices: IntRanges = EVERY
    tp: IntRanges = EVERY
    pp: IntRanges = EVERY
    dp: IntRanges = EVERY
    ep: IntRanges = EVERY
    etp: IntRanges = EVERY
    batch: IntRanges = BATCHES
    batch_step: int = 0
    engine: tuple[str | Engine, ...] = ("vllm",)
    weights: tuple[str, ...] = ("",)
    kv_cache: tuple[str, ...] = ("",)
    compute: tuple[str, ...] = ("",)
    orders: tuple[AxisOrder, ...] = (AXES,)
    """The axes from the fastest links outwards; `AXES` stands for the order that engines have (`stages_together`)."""

    @property
    def open_batches(self) -> tuple[tuple[int, int], ...]:
        """Ranges of more than one batch, in which the largest that will do is sought."""
        return tuple((low, high) for low, high in self.batch.ranges if low < high)

    @property
    def batches(self) -> tuple[int, ...]:
        """Batches that every deployment is tried with."""
        batches_of: set[int] = set()
        for low, high in self.batch.ranges:
            batches_of |= {low, high}
            batches_of |= {2**k for k in range(high.bit_length()) if low <= 2**k}
            if self.batch_step:
                batches_of |= set(range(-(-low // self.batch_step) * self.batch_step, high + 1, self.batch_step))
        return tuple(sorted(batches_of))

    def setups(self, job: Serving) -> list[tuple[Any, ...]]:
        """Return every (engine, weights, kv_cache, compute), what the job says in place of empty words."""
        own = {name: getattr(job, name) for name in ("weights", "kv_cache", "compute")}
        return list(product(self.engine, *([word or own[name] for word in getattr(self, name)] for name in own)))

    def check(self) -> None:
        """Raise `InputError` for choices that are not known, named twice or left empty."""
        problems = Problems()
        for name in (*WORDS, "orders"):
            values = getattr(self, name)
            if not values or len(set(map(str, values))) < len(values):
                shown = ",".join(map(str, values))
                problems.add(name, shown, "must name each of its choices once", "leave out what stands twice")
        for order in self.orders:
            if sorted(order) != sorted(AXES):
                problems.add("order", ",".join(order), "must name every axis once", f"for example {','.join(AXES)}")
        if not self.batch.ranges:
            problems.add("batch", "", "must have a largest value", "use for example 1..4096")
        if not isinstance(self.batch_step, int) or self.batch_step < 0:
            problems.add("batch_step", self.batch_step, "must be a whole number of at least 0", "use 0 to leave it out")
        elif self.batch_step:
            self._check_steps(problems)
        self._check_names(problems)
        check_ranges(problems, self)
        problems.raise_if_any()

    def _check_steps(self, problems: Problems) -> None:
        widest = max((high - low for low, high in self.batch.ranges), default=0)
        if widest // self.batch_step > MOST_BATCHES:
            rule = (
                f"tries {widest // self.batch_step:,} batches of every layout, and at most {MOST_BATCHES:,} are tried"
            )
            least = f"use at least {-(-widest // MOST_BATCHES)}, or 0: the largest batch that fits is found anyway"
            problems.add("batch_step", self.batch_step, rule, least)

    def _check_names(self, problems: Problems) -> None:
        finders: tuple[tuple[Sequence[Any], Callable[[Any], Any]], ...] = (
            (self.engine, engine_on),
            (self.weights, find_format),
            (self.kv_cache, cache_bytes),
        )
        for words, find in finders:
            for word in filter(None, words):
                with problems.collect():
                    find(word)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """The layouts of a space as columns, and what the laws say of each; `order` is an index of the space's orders."""

    columns: dict[str, Any]
    orders: tuple[AxisOrder, ...]
    law: Any
    laws: tuple[str, ...]
    complete: dict[tuple[Any, ...], tuple[Plan, tuple[Problem, ...]]]

    @property
    def count(self) -> int:
        """Layouts in all."""
        return len(self.law)

    @cached_property
    def legal(self) -> Any:
        """PlanGrid of the layouts that obey the laws."""
        return np.flatnonzero(self.law < 0)

    @cached_property
    def rejected(self) -> dict[str, Any]:
        """PlanGrid of the layouts that fell, by law."""
        every = {name: np.flatnonzero(self.law == i) for i, name in enumerate(self.laws)}
        return {name: rows for name, rows in every.items() if len(rows)}

    def bare(self, row: int) -> Plan:
        """Return the plan of a row as it was tried."""
        values: dict[str, Any] = {name: int(self.columns[name][row]) for name in DEPLOYED}
        return Plan(**values, order=self.orders[int(self.columns["order"][row])])  # type: ignore[arg-type]

    def plan(self, row: int) -> Plan:
        """Return the complete plan of a legal row."""
        bare = self.bare(row)
        return stages_together(replace(self.complete[law_key(bare)][0], dp=bare.dp, order=bare.order))

    def problem(self, row: int) -> Problem:
        """Return the first problem of a row that fell."""
        return self.complete[law_key(self.bare(row))][1][0]


def law_key(plan: Plan) -> tuple[Any, ...]:
    """Return what the laws read of a layout: replicas matter where experts divide over them."""
    return plan.tp, plan.pp, plan.ep, plan.etp, plan.tp * plan.dp % (plan.ep * plan.etp) == 0


def law_keys(columns: dict[str, Any]) -> list[Any]:
    """Return the columns that the laws read."""
    c = columns
    whole = c["tp"] * c["dp"] % (c["ep"] * c["etp"]) == 0
    return [c["tp"], c["pp"], c["ep"], c["etp"], whole]
