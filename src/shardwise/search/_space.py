"""The space of a search: what each field of a plan may be, and which choices have no effect.

A plan of the space is a tuple of fields. Where a choice has no effect, one value stands for all of them, so that no
plan is counted twice: sequence parallelism needs tp, a schedule needs pp, sharding needs copies, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from itertools import permutations
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, Problem, Problems
from shardwise.field_types import typed
from shardwise.plans import AXES, CONTEXT_KINDS, LAYOUTS, OPTIMIZERS, RECOMPUTES, SCHEDULES, SHARDINGS, SHIFTS, Schedule
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.models import Model
    from shardwise.search._serving_space import ServingSpace

AxisOrder = tuple[str, ...]
ORDERS: tuple[AxisOrder, ...] = tuple(permutations(AXES))
WORDS = {"layout": LAYOUTS, "cp_kind": CONTEXT_KINDS}
"""The words of columns that hold an index whatever the space: all that plans may say."""
_KNOWN = {
    **WORDS,
    "schedule": SCHEDULES,
    "sharding": SHARDINGS,
    "recompute": RECOMPUTES,
    "stage_layers": tuple(SHIFTS),
    "optimizer": tuple(OPTIMIZERS),
}


@dataclass(frozen=True, slots=True)
class IntRanges:
    """Ranges of whole numbers, both ends included; no range allows every number."""

    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def single(self) -> frozenset[int]:
        """The numbers that are given one by one, not as ends of a range."""
        return frozenset(low for low, high in self.ranges if low == high)

    @classmethod
    @typed
    def parse(cls, text: str) -> IntRanges:
        """Return the set that text such as "1..8", "1,2,4" or "4" describes; raises `InputError` for other text.

        >>> IntRanges.parse("1..4,16").of([1, 2, 8, 16])
        [1, 2, 16]
        """
        ranges = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,15})(?:\.\.(\d{1,15}))?\s*", part, re.ASCII)
            low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
            if not 1 <= low <= high:
                rule = "must be whole numbers from 1, and ranges of them that rise"
                raise InputError([Problem("values", text, rule, "write for example 1,2,4 or 1..8")])
            ranges.append((low, high))
        return cls(tuple(ranges))

    def of(self, values: Iterable[int]) -> list[int]:
        """Return the values that are in the set, in their order.

        >>> IntRanges.parse("4..5,3..4").of(range(1, 2**40))
        [3, 4, 5]
        """
        if self.ranges and isinstance(values, range) and values.step == 1:
            # Numbers without a gap may be many more than those of the set.
            parts = (range(max(low, values.start), min(high + 1, values.stop)) for low, high in self.ranges)
            return sorted({v for part in parts for v in part})
        return [v for v in values if not self.ranges or any(low <= v <= high for low, high in self.ranges)]


def upto(most: int) -> IntRanges:
    """Return the whole numbers from 1.

    >>> upto(4).of([2, 8])
    [2]
    """
    return IntRanges(((1, most),))


def multiples(step: int, most: int) -> IntRanges:
    """Return the multiples of a number up to another; all numbers up to it where there is none.

    >>> multiples(2, 5).of(range(1, 9)), multiples(8, 4).of([2, 8])
    ([2, 4], [2])
    """
    return IntRanges(tuple((n, n) for n in range(step, most + 1, step))) if 1 < step <= most else upto(most)


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """What each field of a plan may be; `devices` are counts of devices, by default all of the cluster.

    Words that are left out are those of the framework (`_launch.within`).

    The last eight are tried where they are given, one value for all plans of a grid (`_variants.grids_of`): how layers
    lie on stages (`SHIFTS`), of how many layers of a stage the blocks are recomputed (0 for all), what is offloaded or
    recomputed besides, ranks of a sharding group, and the job.

    Degrees are further bound by what divides the devices, the micro-batch by what divides the global batch. Every way
    to fill the fastest domain with ranks of the axes is tried, within `fast_tp` to `fast_pp`; with `orders`, only those
    in which the first axes of an order fill it.

    >>> SearchSpace(tp=upto(8)).tp.of([4, 16])
    [4]
    """

    devices: IntRanges = IntRanges()
    tp: IntRanges = IntRanges()
    tp2: IntRanges = IntRanges()
    cp: IntRanges = IntRanges()
    pp: IntRanges = IntRanges()
    vpp: IntRanges = IntRanges()
    dp: IntRanges = IntRanges()
    ep: IntRanges = IntRanges()
    etp: IntRanges = IntRanges(((1, 8),))
    micro_batch: IntRanges = IntRanges(((1, 1024),))
    panels: IntRanges = IntRanges(((1, 8),))
    layout: tuple[str, ...] = ()
    sequence_parallel: tuple[bool, ...] = ()
    cp_kind: tuple[str, ...] = ()
    schedule: tuple[Schedule, ...] = ()
    sharding: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    orders: tuple[AxisOrder, ...] = ()
    fast_tp: IntRanges = IntRanges()
    fast_tp2: IntRanges = IntRanges()
    fast_cp: IntRanges = IntRanges()
    fast_dp: IntRanges = IntRanges()
    fast_pp: IntRanges = IntRanges()
    stage_layers: tuple[str, ...] = ()
    recompute_layers: tuple[int, ...] = ()
    offload: tuple[tuple[str, ...], ...] = ()
    modules: tuple[tuple[str, ...], ...] = ()
    shard: IntRanges = IntRanges()
    precision: tuple[str, ...] = ()
    optimizer: tuple[str, ...] = ()
    global_batch: tuple[int, ...] = ()

    @property
    def placed_orders(self) -> tuple[AxisOrder, ...]:
        """Orders of the axes outwards from the fastest domain: those given, or all, the plain one first."""
        return self.orders or (AXES, *(order for order in ORDERS if order != AXES))

    @property
    def words(self) -> dict[str, tuple[Any, ...]]:
        """What the numbers of a plan's key stand for, by its fields that are words."""
        own = {name: getattr(self, name) for name in ("schedule", "sharding", "recompute")}
        return {**WORDS, **own, "order": self.placed_orders}

    def fast_of(self, axis: str) -> IntRanges:
        """Return how many ranks of an axis may share the fastest domain."""
        ranges: IntRanges = getattr(self, f"fast_{axis}")
        return ranges

    def check(self) -> None:
        """Raise `InputError` for choices that are not known or named twice."""
        problems = Problems()
        for name, known in _KNOWN.items():
            _check(problems, name, getattr(self, name), known)
        _check(problems, "sequence_parallel", self.sequence_parallel, (False, True))
        for name in ("recompute_layers", "offload", "modules", "precision", "global_batch"):
            _check(problems, name, getattr(self, name), getattr(self, name))
        if self.orders:
            _check(problems, "order", self.orders, ORDERS)
        check_ranges(problems, self)
        problems.raise_if_any()


def check_ranges(problems: Problems, space: object) -> None:
    """Record ranges of a space that hold no number."""
    for one in fields(type(space)):  # type: ignore[arg-type]
        given = getattr(space, one.name)
        for low, high in given.ranges if isinstance(given, IntRanges) else ():
            if not 1 <= low <= high:
                problems.add(one.name, f"{low}..{high}", "holds no number of at least 1", "write for example 1..8")


def check_experts(problems: Problems, space: SearchSpace | ServingSpace, model: Model) -> None:
    """Record degrees of experts that a model without any is asked to have, none of which is 1."""
    for name in ("ep", "etp"):
        given: IntRanges = getattr(space, name)
        if not model.has_experts and given.ranges and not given.of([1]):
            low = given.ranges[0][0]
            problems.add(name, low, f"needs experts, and {model.name} has none", "use 1")


def _check(problems: Problems, name: str, values: Sequence[object], known: Sequence[object]) -> None:
    remedy = "use one or more of " + ", ".join(dict.fromkeys(map(_text, known[:8])))
    if len(set(values)) < len(values):
        problems.add(name, ",".join(map(_text, values)), "must name each of its choices once", remedy)
    for value in values:
        if value not in known:
            problems.add(name, _text(value), "is not a choice that can be searched", remedy)


def _text(value: object) -> str:
    """Return a choice as a flag takes it, an order with dashes.

    >>> _text(("tp", "cp")), _text(False)
    ('tp-cp', 'false')
    """
    return ("-".join(value) or "none") if isinstance(value, tuple) else str(value).lower()


def names() -> tuple[str, ...]:
    """Return the fields of a space that restrict a field of a plan.

    >>> "tp" in names()
    True
    """
    return tuple(
        f.name for f in fields(SearchSpace) if f.name not in ("devices", "orders") and not f.name.startswith("fast")
    )
