"""What is evaluated of a part of a space: its rows, cells of rows, modes and places, and the keys of their plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field
from typing import Any

import numpy as np

from shardwise.records import dataclass
from shardwise.search._batch import Degrees, Key, key_of, key_table
from shardwise.search._blocks import BlockKeys
from shardwise.search._columns import Columns
from shardwise.search._grid import PlanGrid
from shardwise.search._placements import GroupShape


def scattered(chosen: Any, rows: Any, size: int) -> Any:
    """Return which of so many rows are chosen, given which of some of them are."""
    found = np.zeros(size, bool)
    found[rows] = chosen
    return found


def pieces(rows: Any, places: Any, most: int) -> Iterator[Any]:
    """Yield rows in pieces of at most so many places, or of one row."""
    ends = np.cumsum(places)
    start = 0
    while start < len(rows):
        done = ends[start - 1] if start else 0
        end = max(int(np.searchsorted(ends, done + most, side="right")), start + 1)
        yield rows[start:end]
        start = end


@dataclass(frozen=True, slots=True)
class Cells:
    """Plans to be evaluated: their rows, the place of each and the row of each place, and modes where they are flat."""

    rows: Any
    place: Any
    row: Any
    modes: Any = None
    groups: dict[bool, GroupShape] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanKeys:
    """The keys of evaluated plans: of one by its flat index, or of many as rows of a table."""

    columns: Columns
    grid: PlanGrid
    composed: tuple[str, int, str]
    cells: Cells

    def __call__(self, index: int) -> Key:
        mode, row, place = self._at(index)
        values = {name: column[row] for name, column in self.columns.items()}
        return key_of(values, self.grid, self.composed, mode, place)

    def table(self, indices: Any) -> Any:
        """Return the keys of flat indices, a row each."""
        mode, rows, places = self._at(indices)
        values = {name: column[rows] for name, column in self.columns.items()}
        return key_table(values, self.grid, self.composed, mode, places)

    def _at(self, index: Any) -> tuple[Any, Any, Any]:
        """Return mode, row and place of a flat index, or of many."""
        mode, at = divmod(index, len(self.cells.row))
        row = self.cells.row[at]
        return (mode if self.cells.modes is None else self.cells.modes[row]), self.cells.rows[row], self.cells.place[at]


@dataclass(frozen=True, slots=True)
class Fitting:
    """PlanGrid of which some plan fits: bytes of their plans and which of them fit, by sharding."""

    rows: Any
    held: dict[str, Any]
    fits: dict[str, Any]


@dataclass(frozen=True, slots=True)
class PlanPart:
    """The rows of a part of the base from `start`, the sets of degrees that they have, and the keys of their blocks."""

    columns: Columns
    degrees: dict[Degrees, int]
    keys: BlockKeys
    start: int
