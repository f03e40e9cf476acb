"""Columns of plans: rows that differ, ranges one after the other, sums of counts; none of it can overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.errors import InputError, Problem

Columns = dict[str, Any]
ColumnsRead = Mapping[str, Any]
# Codes stay below it, so that one more column never wraps around.
_MOST = 2**62
MOST_DEGREES = 3_000_000
"""Most sets of degrees of all grids of a search."""


def check_degrees(size: int, num_devices: int) -> None:
    """Raise `InputError` where grids have more sets of degrees, of up to so many devices, than memory should hold."""
    if size > MOST_DEGREES:
        rule = f"can be written as a product of degrees in more than {MOST_DEGREES:,} ways, more than a search holds"
        remedy = "name fewer counts of devices, or fewer degrees, such as tp 1..8"
        raise InputError([Problem("devices", num_devices, rule, remedy)])


class ChosenRows(Mapping[str, Any]):
    """Some rows of columns, each gathered when it is first read: most laws read few of them.

    >>> ChosenRows({"tp": np.array([1, 2, 4]), "pp": np.array([4, 2, 1])}, np.array([0, 2]))["tp"].tolist()
    [1, 4]
    """

    def __init__(self, columns: ColumnsRead, rows: Any) -> None:
        self.columns, self.rows = columns, rows
        self.gathered: Columns = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.gathered:
            self.gathered[name] = self.columns[name][self.rows]
        return self.gathered[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __len__(self) -> int:
        return len(self.columns)


def distinct_rows(columns: Sequence[Any]) -> tuple[Any, Any]:
    """Return where each distinct row of some columns stands first, rows in order, and for each row which it is.

    >>> first, which = distinct_rows([np.array([2, 1, 2]), np.array([0.5, 9.0, 0.5])])
    >>> first.tolist(), which.tolist()
    ([1, 0], [1, 0, 1])
    """
    code, codes = np.zeros(len(columns[0]), np.int64), 1
    for column in columns:
        if (column == column[:1]).all():
            continue
        count, at = _ranked(column)
        if codes * count > _MOST:
            codes, code = _ranked(code)
        code, codes = code * count + at, codes * count
    count, which = _ranked(code)
    first = np.empty(count, np.int64)
    # Where several rows write to one place the last does: backwards, the first row.
    first[which[::-1]] = np.arange(len(which))[::-1]
    return first, which


def _ranked(column: Any) -> tuple[int, Any]:
    """Return how many distinct values a column has, and for each row the rank of its own."""
    if _is_dense(column):
        place = np.cumsum(np.bincount(column) > 0) - 1
        return int(place[-1]) + 1, place[column.astype(np.int64)]
    values, at = np.unique(column, return_inverse=True)
    return len(values), at


def _is_dense(column: Any) -> bool:
    """Return whether values are not much larger than there are rows: counting is then quicker than sorting."""
    whole = column.dtype.kind in "bi" and len(column) > 0
    return bool(whole and column.min() >= 0 and column.max() <= 8 * len(column))


def distinct(values: Any) -> Any:
    """Return the distinct values of a column in order; `np.unique` alone would load masked arrays (10 ms).

    >>> distinct(np.array([3, 1, 3])).tolist(), distinct(np.zeros(0)).tolist()
    ([1, 3], [])
    """
    values = np.ravel(values)
    if _is_dense(values):
        return np.flatnonzero(np.bincount(values))
    values = np.sort(values)
    return values[_begins(values)]


def runs(values: Any) -> tuple[Any, Any]:
    """Return where runs of equal values begin, and for each value the number of its run.

    >>> [rows.tolist() for rows in runs(np.array([5, 5, 7, 5]))]
    [[0, 2, 3], [0, 0, 1, 2]]
    """
    start = np.flatnonzero(_begins(values))
    return start, np.repeat(np.arange(len(start)), np.diff(start, append=len(values)))


def _begins(values: Any) -> Any:
    """Return which values are not the one before."""
    new = np.ones(len(values), bool)
    np.not_equal(values[1:], values[:-1], out=new[1:])
    return new


def least_of_runs(columns: Any, start: Any) -> Any:
    """Return the least number of each run along the last axis, given where runs begin, the first one at 0.

    >>> least_of_runs(np.array([3.0, 2.0, 5.0, 1.0]), np.array([0, 1, 3])).tolist()
    [3.0, 2.0, 1.0]
    """
    # Most runs are of one number: to reduce each takes four times as long as to copy it.
    ends = np.append(start[1:], columns.shape[-1])
    longer = np.flatnonzero(ends - start > 1)
    least = columns.take(start, axis=-1)
    if len(longer):
        between = np.column_stack([start[longer], ends[longer]]).ravel()
        between = between[: len(between) - int(between[-1] == columns.shape[-1])]
        least[..., longer] = np.minimum.reduceat(columns, between, axis=-1)[..., ::2]
    return least


def spread(start: Any, count: Any) -> tuple[Any, Any]:
    """Return the numbers of ranges one after the other, given where each starts and how many it has.

    >>> spread(np.array([5, 0]), np.array([2, 1]))[0].tolist()
    [5, 6, 0]
    """
    ends = np.cumsum(count)
    shift = np.repeat(start - (ends - count), count)
    return np.arange(len(shift)) + shift, count


def scattered(chosen: Any, rows: Any, size: int) -> Any:
    """Return which of so many rows are chosen, given which of some of them are."""
    mask = np.zeros(size, bool)
    mask[rows] = chosen
    return mask


def exact_sum(counts: Any) -> int:
    """Return the sum of a column of whole numbers, however large it is.

    >>> exact_sum(np.full(4, 2**62)) == 2**64
    True
    """
    counts = np.asarray(counts, np.int64)
    if abs(counts.sum(dtype=np.float64)) < _MOST:
        return int(counts.sum())
    return (int((counts >> 32).sum()) << 32) + int((counts & (2**32 - 1)).sum())


def products(factors: Sequence[Sequence[int]], whole: int) -> Any:
    """Return every tuple of one factor from each list whose product divides a number, a row each, in order.

    Products are formed one factor at a time and dropped where they do not divide, so that none exceeds the number.

    >>> products([[1, 2, 4], [1, 3]], 12).tolist()
    [[1, 1], [1, 3], [2, 1], [2, 3], [4, 1], [4, 3]]
    """
    rows, used = np.zeros((1, 0), np.int64), np.ones(1, np.int64)
    for values in factors:
        column = np.array(values, np.int64)
        left = whole // used
        row, at = np.nonzero(left[:, None] % column == 0)
        rows, used = np.column_stack([rows[row], column[at]]), used[row] * column[at]
    return rows


def bisected(rows: Any, between: tuple[int, int], will_do: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return the rows for which the least value will do, and for each a value that does while the next one does not.

    >>> rows, value = bisected(np.arange(3), (2, 64), lambda row, n: n * n <= 50 * row)
    >>> rows.tolist(), value.tolist()
    ([1, 2], [7, 10])
    """
    if not len(rows):
        return rows, np.zeros(0, np.int64)
    low = np.full(len(rows), between[0])
    kept = will_do(rows, low)
    rows, low = rows[kept], low[kept]
    high = np.full(len(rows), between[1] + 1)
    while len(rows) and (high - low > 1).any():
        middle = (low + high) // 2
        good = will_do(rows, middle)
        low, high = np.where(good, middle, low), np.where(good, high, np.maximum(middle, low + 1))
    return rows, low


def tied(values: Any, tie: float) -> list[tuple[int, int]]:
    """Return where each group of ties begins and ends in sorted values: its first ties with no first before.

    >>> tied([1.0, 1.1, 1.2, 1.3, 2.0], 1.2), tied([1.0, 1.0], 1.0), tied([], 1.2)
    ([(0, 3), (3, 4), (4, 5)], [(0, 1), (1, 2)], [])
    """
    runs, start = list[tuple[int, int]](), 0
    while start < len(values):
        end = int(np.searchsorted(values, values[start] * tie, side="right")) if tie > 1 else start + 1
        runs.append((start, end))
        start = end
    return runs


def pieces(rows: Any, places: Any, most: int) -> Iterator[Any]:
    """Yield rows in pieces of at most so many places, or of one row."""
    ends = np.cumsum(places)
    start = 0
    while start < len(rows):
        done = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, done + most, side="right")), start + 1)
        yield rows[start:end]
        start = end


def looked_up(values: Any, table: dict[int, int]) -> Any:
    """Return what a table has for each of some values.

    >>> looked_up(np.array([4, 2, 4]), {2: 10, 4: 20}).tolist()
    [20, 10, 20]
    """
    keys = np.array(sorted(table), np.int64)
    return np.array([table[k] for k in keys.tolist()], np.int64)[np.searchsorted(keys, values)]


def crossed(columns: Columns, matters: Any, values: Mapping[str, Sequence[Any]], alone: Mapping[str, Any]) -> Columns:
    """Return each row once for every value where the choice matters, and once with the lone value elsewhere.

    >>> rows = {"tp": np.array([1, 2])}
    >>> panels = crossed(rows, rows["tp"] > 1, {"panels": [2, 4]}, {"panels": 1})
    >>> panels["tp"].tolist(), panels["panels"].tolist()
    ([1, 2, 2], [1, 2, 4])
    """
    num = len(next(iter(values.values())))
    times = np.where(matters, num, 1)
    row = np.repeat(np.arange(len(times)), times)
    starts = np.cumsum(times) - times
    at = np.arange(len(row)) - starts[row]
    rows = {c: v[row] for c, v in columns.items()}
    for name, options in values.items():
        rows[name] = np.where(matters[row], np.array(options)[at], alone[name])
    return rows
