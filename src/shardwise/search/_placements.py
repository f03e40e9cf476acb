"""Ways to place the axes of a plan: how many ranks of each share the fastest domain."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from shardwise.plans import AXES, WholeNumbers, dense_group_shapes, divisors
from shardwise.records import dataclass
from shardwise.search._columns import Columns, distinct, distinct_rows, spread
from shardwise.search._space import AxisOrder, SearchSpace

COLUMNS = WholeNumbers(gcd=np.gcd, largest=np.maximum)
ShapeColumns = dict[str, tuple[Any, ...]]
_AT_ONCE = 1 << 17
"""Rows that are placed together: every way to fill a domain is tried with all of them."""
_DEFAULT: AxisOrder = AXES


@dataclass(frozen=True, kw_only=True, slots=True)
class Placements:
    """Placements of the rows of a base, one after the other: `count` of each row, from `start`.

    `fast` holds the ranks of each axis in the fastest domain, none where the order of the axes fills it; `order` is the
    index of that order, `group_shapes` the ranks of each axis in one domain of each tier, as float64.
    """

    start: Any
    count: Any
    fast: Any
    order: Any
    group_shapes: ShapeColumns

    def among(self, rows: Any) -> Placements:
        """Return the places of some rows of the base."""
        index, count = spread(self.start[rows], self.count[rows])
        return Placements(
            start=np.cumsum(count) - count,
            count=count,
            fast=self.fast[index],
            order=self.order[index],
            group_shapes={axis: tuple(t[index] for t in tiers) for axis, tiers in self.group_shapes.items()},
        )


@lru_cache(maxsize=64)
def fillings(domain: int) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each axis that together divide a domain.

    >>> len(fillings(8)), (4, 1, 1, 2, 1) in fillings(8)
    (56, True)
    """
    rows: list[tuple[int, ...]] = [()]
    for _ in AXES:
        rows = [(*f, n) for f in rows for n in divisors(domain) if domain % (prod(f) * n) == 0]
    return tuple(rows)


@lru_cache(maxsize=1024)
def _primes(number: int) -> tuple[int, ...]:
    return tuple(p for p in divisors(number) if p > 1 and len(divisors(p)) == 2)


def _is_full(fast: tuple[int, ...], degrees: Any, domain: int) -> Any:
    """Return for which rows the ranks are some of each axis, and none could have more of them."""
    ranks = np.array(fast)[:, None]
    fits = (degrees % ranks == 0).all(axis=0)
    for prime in _primes(domain // prod(fast)):
        fits &= (degrees // ranks % prime != 0).all(axis=0)
    return fits


def places_of(columns: Columns, space: SearchSpace, domains: Sequence[int]) -> Placements:
    """Return the places of rows of degrees that put other ranks into the domains than the places before them."""
    size = len(columns["devices"])
    if size > _AT_ONCE:
        parts = ({c: v[at : at + _AT_ONCE] for c, v in columns.items()} for at in range(0, size, _AT_ONCE))
        return _joined([places_of(part, space, domains) for part in parts])
    degrees = np.stack([columns[axis] for axis in AXES])
    inner = len(AXES) * (len(domains) - 1)
    rows, fast, order, group_shapes = [], [], [], []
    for way, i in _ways(space, domains):
        apt = _is_full(way, degrees, domains[0]) if way else np.ones(degrees.shape[1], bool)
        # Where one domain holds all devices there is nothing to choose.
        chosen = np.flatnonzero(apt & ((columns["devices"] > domains[0]) | (not way)))
        placed = _group_shapes(columns, chosen, way, space.placed_orders[i], domains)
        groups = np.array([t for axis in AXES for t in placed[axis][:-1]], np.int64).reshape(inner, len(chosen))
        wanted = np.ones(len(chosen), bool)
        for axis in AXES:
            wanted &= np.isin(placed[axis][0], space.fast_of(axis).of(distinct(placed[axis][0]).tolist()))
        rows.append(chosen[wanted])
        group_shapes.append(groups[:, wanted])
        fast.append(np.tile(np.array(way or (0,) * len(AXES)), (int(wanted.sum()), 1)))
        order.append(np.full(int(wanted.sum()), i))
    row = np.concatenate(rows)
    first, _ = distinct_rows([row, *np.concatenate(group_shapes, axis=1)])
    kept = first[np.lexsort([first, row[first]])]
    row, ways, orders = row[kept], np.concatenate(fast)[kept], np.concatenate(order)[kept]
    count = np.bincount(row, minlength=degrees.shape[1])
    return Placements(
        start=np.cumsum(count) - count,
        count=count,
        fast=ways,
        order=orders,
        group_shapes=_all_group_shapes(columns, row, (ways, orders), space, domains),
    )


def _joined(parts: Sequence[Placements]) -> Placements:
    """Return the places of rows that were placed apart, one after the other."""
    count = np.concatenate([one.count for one in parts])
    return Placements(
        start=np.cumsum(count) - count,
        count=count,
        fast=np.concatenate([one.fast for one in parts]),
        order=np.concatenate([one.order for one in parts]),
        group_shapes={
            axis: tuple(map(np.concatenate, zip(*(one.group_shapes[axis] for one in parts), strict=True)))
            for axis in AXES
        },
    )


def _ways(space: SearchSpace, domains: Sequence[int]) -> list[tuple[tuple[int, ...], int]]:
    """Return (ranks of each axis in the fastest domain, index of an order) to try, that of the order alone first."""
    alone: list[tuple[tuple[int, ...], int]] = [((), i) for i in range(len(space.placed_orders))]
    if space.orders or len(domains) == 1:
        return alone if space.orders else alone[:1]
    # Orders of what does not share the fastest domain matter where there are tiers between it and the cluster.
    outer = range(len(space.placed_orders)) if len(domains) > 2 else range(1)
    return [*alone[: len(outer)], *product(fillings(domains[0]), outer)]


def _group_shapes(
    columns: Columns, rows: Any, fast: tuple[int, ...], order: AxisOrder, domains: Sequence[int]
) -> ShapeColumns:
    part: dict[str, int] | None = dict(zip(AXES, fast, strict=True)) if fast else None
    return dense_group_shapes({axis: columns[axis][rows] for axis in AXES}, order, domains, COLUMNS, part)


def _all_group_shapes(
    columns: Columns, row: Any, chosen: tuple[Any, Any], space: SearchSpace, domains: Sequence[int]
) -> ShapeColumns:
    """Return the group shapes of places, those of one way together."""
    ways, orders = chosen
    shapes: ShapeColumns = {axis: tuple(np.zeros(len(row)) for _ in domains) for axis in AXES}
    both = np.column_stack([ways, orders])
    chosen_ways, which = np.unique(both, axis=0, return_inverse=True)
    for i, one in enumerate(chosen_ways.tolist()):
        here = np.flatnonzero(which.ravel() == i)
        fast = tuple(one[:-1]) if one[0] else ()
        placed = _group_shapes(columns, row[here], fast, space.placed_orders[one[-1]], domains)
        for axis, tiers in placed.items():
            for into, tier in zip(shapes[axis], tiers, strict=True):
                into[here] = tier
    return shapes
