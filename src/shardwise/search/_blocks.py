"""Blocks of many plans: recorded once for every way to split a layer, evaluated once for every distinct set of sizes.

What a block takes and keeps depends on how it is split and on the micro-batch (a row key), its time also on which ranks
share a domain (a place key). Numbers of the recompute modes that agree are one number, those that differ are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, fields
from typing import Any, Self

import numpy as np

from shardwise.ledger.symbol import Graph, Node, is_positive
from shardwise.ops.overlap import Pairing, pairing
from shardwise.plans import AXES, CONTEXT_KINDS, LAYOUTS, STAGE_AXES, with_groups
from shardwise.records import dataclass, replace
from shardwise.search._columns import Columns, distinct, distinct_rows, pieces, runs, spread
from shardwise.search._grid import PlanGrid, case_for
from shardwise.search._placements import COLUMNS, ShapeColumns
from shardwise.search._program import (
    BATCH,
    CELLS,
    MODE,
    PLACE,
    ROW,
    SPLIT,
    BlockColumn,
    BlockPrograms,
    Program,
    ProgramShape,
    axis_of,
)
from shardwise.search._recordings import Recordings
from shardwise.training import (
    BlockCost,
    FrozenWeights,
    ModelBlocks,
    ParameterCounts,
    PlanSizes,
    SharedWeights,
    Tables,
    machine_of,
    paired_blocks,
    tables_apart,
)

SIZES = ("tp", "tp2", "cp", "ep", "etp", "panels", "micro_batch")
# All of them but how experts are split: most of a layer does not read that.
_DENSE = tuple(name for name in SIZES if name not in ("ep", "etp"))
_SPLIT = ("layout", "sequence_parallel", "cp_kind")
NESTED = (ModelBlocks, BlockCost, ParameterCounts, FrozenWeights, SharedWeights)
"""Records of which the blocks of a model are trees."""


def joined(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Return trees of one shape as a single one, numbers in the same place joined; an absent key counts as zero."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, NESTED):
        return replace(first, **{f.name: joined([getattr(v, f.name) for v in values], join) for f in fields(first)})
    if isinstance(first, tuple):
        return tuple(joined(items, join) for items in zip(*values, strict=True))
    if isinstance(first, dict):
        return {key: joined([v.get(key, 0.0) for v in values], join) for key in {k: 0 for v in values for k in v}}
    return first if isinstance(first, bool) else join(values)


def _trimmed(parts: ModelBlocks[Any]) -> ModelBlocks[Any]:
    """Return the parts without what composition does not read: what pairing hides is known before."""
    gone: dict[str, Any] = {n: 0.0 for n in ("flops", "model_flops", "compute")}
    gone |= {n: {} for n in ("hidden", "exposed", "forward_exposed", "behind_pair", "windows")}
    ends: dict[str, Any] = {n: replace(getattr(parts, n), **gone) for n in ("embedding", "head", "loss")}
    return replace(parts, kinds=tuple(replace(kind, **gone) for kind in parts.kinds), **ends)


def _untimed(parts: ModelBlocks[Any]) -> ModelBlocks[Any]:
    """Return the parts without their times."""
    gone: dict[str, Any] = dict.fromkeys(("forward", "backward_input", "backward_weight", "replay"), 0.0)
    gone["replay_exposed"] = {}
    ends: dict[str, Any] = {n: replace(getattr(parts, n), **gone) for n in ("embedding", "head", "loss")}
    return replace(parts, kinds=tuple(replace(kind, **gone) for kind in parts.kinds), **ends)


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
            kept.words[f"{kind} ways"] = list(some.programs)
            for way, program in some.programs.items():
                kept.put(f"{kind} {tuple(way)}", program)
        return self

    @classmethod
    def kept(cls, kept: Recordings, num_modes: int) -> Self | None:
        """Return the blocks that were kept, if they were."""
        if not all(kind in kept.words for kind in _KINDS):
            return None

        def of(kind: str) -> BlockPrograms:
            leaves = tuple(BlockColumn(name, level) for name, level in kept.words[kind])
            ways = map(tuple, kept.words[f"{kind} ways"])
            return BlockPrograms(leaves, {way: kept.programs[f"{kind} {way}"] for way in ways})

        sizes, times = map(of, _KINDS)
        return cls(sizes, times, num_modes)


_KINDS = ("sizes", "times")


@dataclass(frozen=True)
class RecordedBlocks:
    """Blocks with the trees that they were recorded in.

    `parts` are those of the model as schedules run them that pair micro-batches alike, with a `BlockColumn` or a number
    in each place, `boundary` is the message between stages.
    """

    parts: Mapping[Pairing, ModelBlocks[Any]]
    boundary: Any
    blocks: PlanBlocks


def blocks_of(grid: PlanGrid) -> RecordedBlocks:
    """Return the blocks of the rows of a space, recorded."""
    base, space = grid.base, grid.space
    ways = [
        (layout, sequence, kind)
        for layout in distinct(base["layout"]).tolist()
        for sequence in (sorted(space.sequence_parallel) if LAYOUTS[layout] == "1d" else [False])
        for kind in map(CONTEXT_KINDS.index, space.cp_kind if (base["cp"] > 1).any() else space.cp_kind[:1])
    ]
    # Where tensor parallelism is one the sequence is not split either.
    if not space.sequence_parallel or False not in space.sequence_parallel:
        ways += [(layout, False, kind) for layout, sequence, kind in ways if sequence]
    recorded = {(a, int(b), c): _recorded(grid, a, bool(b), c) for a, b, c in ways}
    leaves: dict[tuple[Any, ...], BlockColumn] = {}
    named: dict[tuple[int, int, int], dict[str, Any]] = {way: {} for way in recorded}

    def join(values: Sequence[Any]) -> Any:
        """One number of all ways and modes: known, or a leaf."""
        modes = len(grid.space.recompute)
        per_way = [values[i : i + modes] for i in range(0, len(values), modes)]
        first = values[0]
        if not isinstance(first, Node) and all(not isinstance(v, Node) and v == first for v in values):
            return first
        known = leaves.get(tuple(values))
        if known is not None:
            return known
        level = ROW
        for v in values:
            level |= v.level & ~SPLIT if isinstance(v, Node) else 0
        if any(any(v is not own[0] and v != own[0] for v in own) for own in per_way):
            level |= MODE | BATCH
        leaf = leaves[tuple(values)] = BlockColumn(f"block {len(leaves)}", level, all(map(is_positive, values)))
        for way, own in zip(recorded, per_way, strict=True):
            for mode, v in enumerate(own if level & MODE else own[:1]):
                named[way][f"{leaf.name}/{mode}"] = v
        return leaf

    trees = [tree for modes in recorded.values() for tree in modes]
    # Leaves of sizes come first, so that those which times add are known.
    joined([_untimed(tree[1]) for tree in trees], join)
    sizes = {leaf for leaf in leaves.values() if not leaf.level & PLACE}
    boundary, *parts = (joined([tree[i] for tree in trees], join) for i in range(len(trees[0])))
    both = [tuple(leaf for leaf in leaves.values() if (leaf in sizes) is first) for first in (True, False)]
    of_sizes, of_times = (BlockPrograms(some, _programs(named, some)) for some in both)
    parts_of = dict(zip(_pairings(grid), parts, strict=True))
    return RecordedBlocks(parts_of, boundary, PlanBlocks(of_sizes, of_times, len(grid.space.recompute)))


def _programs(named: Mapping[Any, Mapping[str, Any]], leaves: Sequence[BlockColumn]) -> dict[Any, Program]:
    """Return the programs of some leaves, one for each way to split a layer."""
    chosen = {leaf.name for leaf in leaves}
    return {
        way: Program({name: value for name, value in outputs.items() if name.partition("/")[0] in chosen})
        for way, outputs in named.items()
    }


def known_sizes(grid: PlanGrid) -> dict[str, float]:
    """Return the degrees that all rows of a space share."""
    shared = {name: distinct(grid.base[name]) for name in STAGE_AXES}
    return {name: float(values[0]) for name, values in shared.items() if len(values) == 1}


def sizes_given(graph: Graph, grid: PlanGrid, fixed: Mapping[str, Any]) -> PlanSizes[Any]:
    """Return the sizes of a plan as symbols; what all rows of the space share, and what is fixed, is known."""
    known = {**fixed, **known_sizes(grid)}
    if not grid.has_experts:
        known["ep"] = known["etp"] = 1.0
    names = (*SIZES, "dp", "num_micro")
    # A split has the same dense layer in blocks; in pipelines, where degrees are fixed, all but the micro-batch.
    dense, whole = (ROW, SPLIT) if fixed else (SPLIT if grid.has_experts else ROW, ROW)
    levels = {**dict.fromkeys((*SIZES, "dp"), whole), **({} if fixed else dict.fromkeys(_DENSE, dense))}
    levels["micro_batch"] = ROW if fixed else dense | BATCH
    values: dict[str, Any] = {
        name: known[name] if name in known else graph.given(name, levels.get(name, ROW), True) for name in names
    }
    tiers = len(grid.case.domains)

    def tier(axis: str, i: int) -> Any:
        if i == tiers - 1:
            return values[axis] if axis in values else known.get(axis, graph.given(f"{axis}/{i}", whole, True))
        flat = axis in ("ep", "etp") and not grid.has_experts
        return 1.0 if flat else graph.given(f"{axis}/{i}", ROW | PLACE, True)

    axes = (*AXES, "dp_cp", "shard", "replicate", "etp", "ep", "edp", "expert_shard", "expert_replicate")
    groups = {axis: tuple(tier(axis, i) for i in range(tiers)) for axis in axes}
    shard = float(grid.case.plan.shard) if grid.case.plan.shard > 1 else values["dp"]
    return PlanSizes(pp=known.get("pp", 1.0), vpp=known.get("vpp", 1.0), shard=shard, group_shapes=groups, **values)


def _pairings(grid: PlanGrid) -> tuple[Pairing, ...]:
    """Return the ways in which the schedules of a space pair micro-batches."""
    return tuple(dict.fromkeys(pairing(grid.case.stack, one) for one in grid.space.schedule))


def _recorded(grid: PlanGrid, layout: int, sequence: bool, kind: int) -> list[tuple[Any, ...]]:
    """Return for each recompute mode the bytes sent, and the blocks of one way to split them for each pairing.

    What pairs hide is taken off each block, so that a bound of DualPipe can count the messages that they do not hide.
    """
    case = case_for(grid.case, layout=LAYOUTS[layout], sequence_parallel=sequence, cp_kind=CONTEXT_KINDS[kind])
    sizes = sizes_given(Graph(), grid, {})
    machine = machine_of(case, sizes.group_shapes)
    rows, known = [], dict[Any, Any]()
    for mode in grid.space.recompute:
        tables: Tables[Any] = tables_apart(case_for(case, recompute=mode), machine, sizes, known)
        parts = (_trimmed(paired_blocks(machine, when, tables.parts)) for when in _pairings(grid))
        rows.append((tables.boundary_bytes, *parts))
    return rows


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

    def column(self, name: str, least: bool) -> tuple[Any, Any]:
        """Return the column of a leaf, or the least of the places of each row key, and the key of each row."""
        if name in self.sizes.columns:
            return self.sizes.column(name, least)
        column = self.columns[name]
        if least and column.shape[-1] != len(self.first) and name not in self.lows:
            self.lows[name] = np.minimum.reduceat(column, self.first, axis=-1)
        return (self.lows.get(name, column) if least else column), self.key


@dataclass(frozen=True, kw_only=True)
class BlockKeys:
    """The row keys of some rows, all that differ in a block: `columns` of sizes are known, times computed when asked.

    `key` is the key of each row and `values` the fields of each key; `part` of the base they come from.
    """

    blocks: PlanBlocks
    grid: PlanGrid
    part: tuple[int, int]
    columns: Mapping[str, Any]
    key: Any
    values: Columns

    def column(self, name: str, least: bool) -> tuple[Any, Any]:
        """Return the column of a leaf and the key of each row."""
        return self.columns[name], self.key

    def timed(self, some: Any) -> BlockTable:
        """Return the blocks of some of the rows with their times; other rows have no key."""
        size = len(self.values["tp"])
        mine = np.flatnonzero(np.bincount(self.key[some], minlength=size))
        number = np.full(size, -1)
        number[mine] = np.arange(len(mine))
        keys = {name: v[mine] for name, v in self.values.items()}
        group, start, count, domain_of, shown = _domains(self.grid, self.part)
        own = group[keys["base"] - self.part[0]]
        which, sizes = spread(start[own], count[own])
        row = np.repeat(np.arange(len(mine)), sizes)
        groups = _groups_of(keys, row, shown[which], self.grid)
        columns = _filled_columns(self.blocks, self.blocks.times, (keys, groups, row))
        return BlockTable(self, columns, number[self.key], np.cumsum(sizes) - sizes, domain_of)


def tabulate(blocks: PlanBlocks, grid: PlanGrid, columns: Columns, part: tuple[int, int]) -> BlockKeys:
    """Return the keys of rows that come from one part of the base, with the sizes of their blocks."""
    heads, split = runs(columns["set"])
    # Rows of a set differ in the last size alone, the micro-batch.
    _, own = distinct_rows([columns[name][heads] for name in (*_SPLIT, *SIZES[:-1])])
    first, key = distinct_rows([own[split], columns[SIZES[-1]]])
    keys = {name: v[first] for name, v in columns.items()}
    key_columns = _filled_columns(blocks, blocks.sizes, (keys, {}, np.empty(0, np.int64)))
    return BlockKeys(blocks=blocks, grid=grid, part=part, columns=key_columns, key=key, values=keys)


def _filled_columns(
    blocks: PlanBlocks, some: BlockPrograms, known: tuple[Columns, ShapeColumns, Any]
) -> dict[str, Any]:
    """Return the columns of some leaves for keys, given the ranks of their places and the key of each place."""
    keys, groups, row = known
    columns: dict[str, Any] = {}
    count = np.bincount(row, minlength=len(keys["tp"])) + 1
    for way in some.programs:
        here = np.logical_and.reduce([keys[name] == value for name, value in zip(_SPLIT, way, strict=True)])
        # Keys are sorted by how a layer is split first, so those of one way follow each other, and so do their places.
        for some_keys in pieces(np.flatnonzero(here), count[here], CELLS):
            low, high = int(some_keys[0]), int(some_keys[-1]) + 1
            mine, at = slice(low, high), slice(*np.searchsorted(row, (low, high)).tolist())
            first, split = distinct_rows([keys[name][mine] for name in _DENSE])
            shape = ProgramShape(rows=high - low, modes=1, row=row[at] - low, splits=len(first), split=split)
            results = some.programs[way].run(_given(some.programs[way], keys, groups, (mine, at, first + low)), shape)
            _fill(columns, (some, results, blocks.num_modes), (mine, at, len(keys["tp"]), len(row)), shape)
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


def _groups_of(keys: Columns, row: Any, shown: Any, grid: PlanGrid) -> ShapeColumns:
    """Return the ranks of each axis in one domain of each tier, for row keys with a place that has their domain."""
    dense = {axis: tuple(t[shown].astype(np.int64) for t in tiers) for axis, tiers in grid.places.group_shapes.items()}
    if not grid.has_experts:
        return dense
    dp = dense["dp"][-1]
    sizes = {"dp": dp, "shard": grid.shard(dp), "ep": keys["ep"][row], "etp": keys["etp"][row]}
    return with_groups(dense, sizes, COLUMNS)


def _given(program: Program, keys: Columns, groups: ShapeColumns, chosen: tuple[slice, slice, Any]) -> dict[str, Any]:
    """Return the inputs of a program for some keys, their places and the first key of each split."""
    mine, at, first = chosen
    given: dict[str, Any] = {}
    for name, level in program.inputs.items():
        if level & PLACE:
            axis, tier = name.split("/")
            given[name] = groups[axis][int(tier)][at].astype(np.float64)
        else:
            given[name] = keys[name][first if axis_of(level) == SPLIT else mine].astype(np.float64)
    return given


def _fill(
    into: dict[str, Any], done: tuple[BlockPrograms, Any, int], at: tuple[slice, slice, int, int], shape: ProgramShape
) -> None:
    """Put the results for some keys and places into the columns of all."""
    some, results, num_modes = done
    for leaf in some.leaves:
        where, size = (at[1], at[3]) if leaf.level & PLACE else (at[0], at[2])
        if leaf.name not in into:
            into[leaf.name] = np.zeros((num_modes, size) if leaf.level & MODE else size)
        for mode, column in enumerate(np.atleast_2d(into[leaf.name])):
            column[where] = _wide(results[f"{leaf.name}/{mode}"], leaf, shape)


def _wide(value: Any, leaf: BlockColumn, shape: ProgramShape) -> Any:
    """Return a result for every place of a leaf that varies with them, also where this way to split does not."""
    if leaf.level & PLACE and np.ndim(value) and len(value) != len(shape.row):
        return value[shape.row]
    return value
