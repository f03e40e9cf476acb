"""Blocks of many plans: recorded once for every way to split a layer, evaluated once for every distinct set of sizes.

What a block takes and keeps depends on how it is split and on the micro-batch (a row key), its time also on which ranks
share a domain (a place key), that of its dense part on fewer of both. Numbers of the recompute modes that agree are one
number, those that differ are stacked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Self

import numpy as np

from shardwise.plans import expert_groups
from shardwise.records import dataclass
from shardwise.search._columns import (
    ChosenRows,
    Columns,
    ColumnsRead,
    distinct_rows,
    least_of_runs,
    pieces,
    runs,
    spread,
)
from shardwise.search._grid import PlanGrid
from shardwise.search._placements import COLUMNS, ShapeColumns
from shardwise.search._program import (
    CELLS,
    MODE,
    PLACE,
    ROW,
    SITE,
    SPLIT,
    BlockColumn,
    BlockPrograms,
    Program,
    ProgramShape,
    axis_of,
)
from shardwise.search._recordings import Recordings

SIZES = ("tp", "tp2", "cp", "ep", "etp", "panels", "micro_batch")
# All of them but how experts are split: most of a layer does not read that.
DENSE = tuple(name for name in SIZES if name not in ("ep", "etp"))
_SPLIT = ("layout", "sequence_parallel", "cp_kind")


@dataclass(frozen=True)
class PlanBlocks:
    """The blocks of a model under every way of a space to split them; `sizes` are all leaves that memory reads."""

    sizes: BlockPrograms
    times: BlockPrograms
    num_modes: int

    def keep(self, kept: Recordings) -> Self:
        """Put the programs to those that are kept."""
        for kind in _KINDS:
            some: BlockPrograms = getattr(self, kind)
            kept.words[kind] = [[leaf.name, leaf.level] for leaf in some.leaves]
            kept.words[f"{kind} ways"] = [*some.first.items()]
            for way in some.first.values():
                kept.put(f"{kind} {way}", some.programs[way])
        return self

    @classmethod
    def kept(cls, kept: Recordings, num_modes: int) -> Self | None:
        """Return the blocks that were kept, if they were."""
        if not all(kind in kept.words for kind in _KINDS):
            return None

        def of(kind: str) -> BlockPrograms:
            leaves = tuple(BlockColumn(name, level) for name, level in kept.words[kind])
            ways = [(tuple(way), tuple(first)) for way, first in kept.words[f"{kind} ways"]]
            return BlockPrograms(leaves, {way: kept.programs[f"{kind} {first}"] for way, first in ways})

        sizes, times = map(of, _KINDS)
        return cls(sizes, times, num_modes)


_KINDS = ("sizes", "times")


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The times of blocks of some rows: a column for each leaf over row keys or place keys, and the key of each row.

    `first` is the place key of a row key and its first domain; places add `domain_of` to it. `sizes` are of all rows.
    """

    sizes: BlockKeys
    columns: Mapping[str, Any]
    key: Any
    first: Any
    domain_of: Any
    lows: dict[str, Any] = field(default_factory=dict)
    onwards: dict[str, Any] = field(default_factory=dict)

    def column(self, name: str, least: bool) -> tuple[Any, Any]:
        """Return the column of a leaf, or the least of the places of each row key, and the key of each row."""
        if name in self.sizes.columns:
            return self.sizes.column(name, least)
        column = self.columns[name]
        if least and column.shape[-1] != len(self.first) and name not in self.lows:
            self.lows[name] = least_of_runs(column, self.first)
        return (self.lows.get(name, column) if least else column), self.key

    def onward(self, name: str) -> Any:
        """Return the least of each mode and of those after it, of the least column of a leaf that varies with modes.

        Modes of a key stand beside each other: rows in order read them in order.
        """
        if name not in self.onwards:
            column, _ = self.column(name, least=True)
            onward = column.T.copy()
            for mode in reversed(range(len(column) - 1)):
                np.minimum(onward[:, mode], onward[:, mode + 1], out=onward[:, mode])
            self.onwards[name] = onward
        return self.onwards[name]


@dataclass(frozen=True, kw_only=True)
class BlockKeys:
    """The row keys of some rows, all that differ in a block: `columns` of sizes are known, times computed when asked.

    `key` is the key of each row and `values` the fields of each key; `part` of the base they come from. `first` is for
    each set of rows the first whose plans take the same bytes, and how many rows ahead it is; nothing if all differ.
    """

    blocks: PlanBlocks
    grid: PlanGrid
    part: tuple[int, int]
    columns: Mapping[str, Any]
    key: Any
    values: ColumnsRead
    first: tuple[Any, Any] | None = None

    def column(self, name: str, least: bool) -> tuple[Any, Any]:
        """Return the column of a leaf and the key of each row."""
        return self.columns[name], self.key

    def of_bytes(self, rows: Any, sets: Any) -> tuple[Any, Any]:
        """Return rows of which bytes are asked for those of some, and where that of each of these stands among them."""
        if self.first is None:
            return rows, None
        own, (start, split) = sets[rows], runs(sets[rows])
        first, back = self.first[0][own[start]], self.first[1][own[start]]
        at = np.searchsorted(own[start], first).clip(max=len(start) - 1)
        number, shift = np.arange(len(rows)), np.where(own[start[at]] == first, start - start[at], 0)[split]
        # Rows whose first one is not among them are asked themselves.
        asked = (shift == 0) | (rows[number - shift] != rows - back[split])
        return rows[asked], (np.cumsum(asked) - 1)[np.where(asked, number, number - shift)]

    def timed(self, some: Any) -> BlockTable:
        """Return the blocks of some of the rows with their times; other rows have no key."""
        size = len(self.values["tp"])
        mine = np.flatnonzero(np.bincount(self.key[some], minlength=size))
        number = np.full(size, -1)
        number[mine] = np.arange(len(mine))
        keys = ChosenRows(self.values, mine)
        group, start, count, domain_of, shown = _domains(self.grid, self.part)
        own = group[keys["base"] - self.part[0]]
        which, sizes = spread(start[own], count[own])
        row = np.repeat(np.arange(len(mine)), sizes)
        groups = _groups_of(keys, row, shown[which], self.grid)
        columns = _filled_columns(self.blocks, self.blocks.times, (keys, groups, row, which))
        return BlockTable(self, columns, number[self.key], np.cumsum(sizes) - sizes, domain_of)


def tabulate(blocks: PlanBlocks, grid: PlanGrid, columns: Columns, part: tuple[int, int]) -> BlockKeys:
    """Return the keys of rows that come from one part of the base, with the sizes of their blocks."""
    heads, split = runs(columns["set"])
    # Rows of a set differ in the last size alone, the micro-batch.
    _, own = distinct_rows([columns[name][heads] for name in (*_SPLIT, *SIZES[:-1])])
    first, key = distinct_rows([own[split], columns[SIZES[-1]]])
    keys = ChosenRows(columns, first)
    nowhere = np.empty(0, np.int64)
    key_columns = _filled_columns(blocks, blocks.sizes, (keys, {}, nowhere, nowhere))
    first_set = _first_of_bytes(blocks.sizes, columns, heads)
    return BlockKeys(blocks=blocks, grid=grid, part=part, columns=key_columns, key=key, values=keys, first=first_set)


def _first_of_bytes(sizes: BlockPrograms, columns: Columns, heads: Any) -> tuple[Any, Any] | None:
    """Return the first of the sets that differ in the kind of context parallelism alone and whose blocks are as large.

    With it, how many rows ahead it begins; nothing where each set is that itself.
    """
    own = {name: v[heads] for name, v in columns.items() if name not in ("set", "micro_batch")}
    for way, first in sizes.first.items():
        if way != first and way[:2] == first[:2]:
            here = [own[name] == value for name, value in zip(_SPLIT, way, strict=True)]
            own["cp_kind"] = np.where(np.logical_and.reduce(here), first[2], own["cp_kind"])
    same = np.logical_and.reduce([v[1:] == v[:-1] for v in own.values()])
    if not same.any():
        return None
    number, sets = np.arange(len(heads)), columns["set"][heads]
    number[1:][same] = 0
    at = np.maximum.accumulate(number)
    # Sets of which no micro-batch is legal have no rows.
    first_set, ahead = np.zeros((2, int(sets[-1]) + 1), np.int64)
    first_set[sets], ahead[sets] = sets[at], heads - heads[at]
    return first_set, ahead


def _filled_columns(
    blocks: PlanBlocks, some: BlockPrograms, known: tuple[ColumnsRead, ShapeColumns, Any, Any]
) -> dict[str, Any]:
    """Return the columns of some leaves for keys, given ranks, key and domains of each place."""
    keys, groups, row, domain = known
    columns: dict[str, Any] = {}
    count = np.bincount(row, minlength=len(keys["tp"])) + 1
    for way in some.programs:
        here = np.logical_and.reduce([keys[name] == value for name, value in zip(_SPLIT, way, strict=True)])
        # Keys are sorted by how a layer is split first, so those of one way follow each other, and so do their places.
        for some_keys in pieces(np.flatnonzero(here), count[here], CELLS):
            low, high = int(some_keys[0]), int(some_keys[-1]) + 1
            mine, at = slice(low, high), slice(*np.searchsorted(row, (low, high)).tolist())
            first, split = distinct_rows([keys[name][mine] for name in DENSE])
            own = row[at] - low
            # The dense part of a block meets the same groups wherever domains are filled alike.
            sites, site = distinct_rows([split[own], domain[at]]) if len(own) else (own, own)
            shape = ProgramShape(
                rows=high - low, modes=1, row=own, splits=len(first), split=split, split_of=split[own][sites], site=site
            )
            chosen = {SPLIT: first + low, ROW: mine, PLACE: at, SITE: sites + at.start}
            program, size = some.programs[way], (len(keys["tp"]), len(row))
            into = _columns_of(columns, (some, blocks.num_modes), (mine, at), size)
            results = program.run(_given(program, keys, groups, chosen), shape, into)
            for name, column in into.items():
                if results[name] is not column:
                    column[:] = _wide(results[name], column, shape)
    return columns


def _domains(grid: PlanGrid, part: tuple[int, int]) -> tuple[Any, ...]:
    """Return how the domains of the rows of a part of the base are filled, as far as blocks can tell.

    For each row of the base its group (the same split), for each group where its domains start and how many there are,
    for each place the domain within the group, and for each domain a place that has it.
    """
    low, high = part
    base, places = grid.base, grid.places
    split = [base[name][low:high] for name in ("layout", "tp", "tp2", "cp")]
    _, group = distinct_rows(split)
    index, _ = spread(places.start[low:high], places.count[low:high])
    owner = np.repeat(group, places.count[low:high])
    columns = [owner]
    for tier in range(len(grid.case.domains) - 1):
        axes = [places.group_shapes[axis][tier][index] for axis in ("tp", "tp2", "cp")]
        if grid.has_experts:
            axes.append(axes[0] * axes[1] * axes[2] * places.group_shapes["dp"][tier][index])
        columns += axes
    first, at = distinct_rows(columns)
    count = np.bincount(owner[first], minlength=int(group.max()) + 1)
    start = np.cumsum(count) - count
    return group, start, count, at - start[owner], index[first]


def _groups_of(keys: ColumnsRead, row: Any, shown: Any, grid: PlanGrid) -> ShapeColumns:
    """Return the ranks of each axis of a stage in one domain of each tier, for row keys with a place of their domain.

    No part of a block asks where its replicas are.
    """
    dense = {axis: tuple(t[shown].astype(np.int64) for t in tiers) for axis, tiers in grid.places.group_shapes.items()}
    if not grid.has_experts:
        return dense
    return {**dense, **expert_groups(dense, {"ep": keys["ep"][row], "etp": keys["etp"][row]}, COLUMNS)}


def _given(program: Program, keys: ColumnsRead, groups: ShapeColumns, chosen: Mapping[int, Any]) -> dict[str, Any]:
    """Return the inputs of a program, given by axis which keys and places they are read of."""
    given: dict[str, Any] = {}
    for name, level in program.inputs.items():
        group, _, tier = name.partition("/")
        column = groups[group][int(tier)] if tier else keys[name]
        given[name] = column[chosen[axis_of(level)]].astype(np.float64)
    return given


def _columns_of(
    columns: dict[str, Any], leaves: tuple[BlockPrograms, int], where: tuple[slice, slice], size: tuple[int, int]
) -> dict[str, Any]:
    """Return by the names of results the parts of columns of some keys or places that they belong into."""
    some, num_modes = leaves
    into = dict[str, Any]()
    for leaf in some.leaves:
        placed = bool(leaf.level & PLACE)
        if leaf.name not in columns:
            columns[leaf.name] = np.zeros((num_modes, size[placed]) if leaf.level & MODE else size[placed])
        for mode, column in enumerate(np.atleast_2d(columns[leaf.name])):
            into[f"{leaf.name}/{mode}"] = column[where[placed]]
    return into


def _wide(value: Any, column: Any, shape: ProgramShape) -> Any:
    """Return a result for every place of a column that varies with them, also where this way to split does not."""
    return value[shape.row] if np.ndim(value) and len(value) != len(column) else value
