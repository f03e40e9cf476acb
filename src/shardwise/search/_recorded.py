"""Blocks of a model recorded as symbols, once for every way to split a layer and every recompute mode.

Numbers of the recompute modes that agree are one number, those that differ are stacked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from shardwise.ledger.symbol import Graph, Node, is_positive
from shardwise.ops.overlap import Pairing, pairing
from shardwise.plans import AXES, CONTEXT_KINDS, LAYOUTS, STAGE_AXES
from shardwise.records import dataclass, replace
from shardwise.search._blocks import DENSE, SIZES, PlanBlocks
from shardwise.search._columns import distinct
from shardwise.search._grid import PlanGrid
from shardwise.search._program import BATCH, MODE, PLACE, ROW, SITE, SPLIT, BlockColumn, BlockPrograms, Program
from shardwise.training import (
    BlockCost,
    FrozenWeights,
    KnownPrices,
    ModelBlocks,
    ParameterCounts,
    PlanSizes,
    SharedWeights,
    Tables,
    TrainingCase,
    machine_of,
    paired_blocks,
    tables_apart,
)

NESTED = (ModelBlocks, BlockCost, ParameterCounts, FrozenWeights, SharedWeights)
"""Records of which the blocks of a model are trees."""


# Elements, rows and columns of a tensor that a layer split otherwise does not have.
_NO_TENSOR = (0.0, 1.0, 1.0)


def joined(values: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Any:
    """Return trees as a single one, numbers in the same place joined.

    An absent key counts as zero, an absent tensor as one of no elements.
    """
    first = values[0]
    if first is None:
        return None
    if isinstance(first, NESTED):
        return replace(first, **{f.name: joined([getattr(v, f.name) for v in values], join) for f in fields(first)})
    if isinstance(first, tuple):
        return tuple(joined(items, join) for items in zip_longest(*values, fillvalue=_NO_TENSOR))
    if isinstance(first, dict):
        absent = {key: () if isinstance(one, tuple) else 0.0 for v in values for key, one in v.items()}
        return {key: joined([v.get(key, none) for v in values], join) for key, none in absent.items()}
    return first if isinstance(first, bool) else join(values)


# What composition does not read of blocks, since what pairing hides is known before; and their times.
_UNREAD: dict[str, Any] = {n: 0.0 for n in ("flops", "model_flops", "compute")}
_UNREAD |= {n: {} for n in ("hidden", "exposed", "forward_exposed", "behind_pair", "windows")}
_TIMES: dict[str, Any] = {n: 0.0 for n in ("forward", "backward_input", "backward_weight", "replay")}


def _without(parts: ModelBlocks[Any], gone: dict[str, Any]) -> ModelBlocks[Any]:
    """Return the parts with other values in some fields of each block."""
    ends: dict[str, Any] = {n: replace(getattr(parts, n), **gone) for n in ("embedding", "head", "loss")}
    return replace(parts, kinds=tuple(replace(kind, **gone) for kind in parts.kinds), **ends)


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
    # Operators that two ways to split a layer have in common are recorded and priced once.
    shared = sizes_given(Graph(), grid, {}), KnownPrices[Any]()
    recorded = {(a, int(b), c): _recorded(grid, (a, bool(b), c), *shared) for a, b, c in ways}
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
        if level & SITE:
            level = level & ~SITE | PLACE
        leaf = leaves[tuple(values)] = BlockColumn(f"block {len(leaves)}", level, all(map(is_positive, values)))
        for way, own in zip(recorded, per_way, strict=True):
            for mode, v in enumerate(own if level & MODE else own[:1]):
                named[way][f"{leaf.name}/{mode}"] = v
        return leaf

    trees = [tree for modes in recorded.values() for tree in modes]
    # Leaves of sizes come first, so that those which times add are known.
    joined([_without(tree[1], {**_TIMES, "replay_exposed": {}}) for tree in trees], join)
    sizes = {leaf for leaf in leaves.values() if not leaf.level & PLACE}
    boundary, *parts = (joined([tree[i] for tree in trees], join) for i in range(len(trees[0])))
    both = [tuple(leaf for leaf in leaves.values() if (leaf in sizes) is first) for first in (True, False)]
    of_sizes, of_times = (BlockPrograms(some, _programs(named, some)) for some in both)
    parts_of = dict(zip(_pairings(grid), parts, strict=True))
    return RecordedBlocks(parts_of, boundary, PlanBlocks(of_sizes, of_times, len(grid.space.recompute)))


def _programs(named: Mapping[Any, Mapping[str, Any]], leaves: Sequence[BlockColumn]) -> dict[Any, Program]:
    """Return the programs of some leaves, one for each way to split a layer; ways of the same formulas share one."""
    chosen, known = {leaf.name for leaf in leaves}, dict[tuple[tuple[str, Any], ...], Program]()
    programs: dict[Any, Program] = {}
    for way, outputs in named.items():
        own = tuple((name, value) for name, value in outputs.items() if name.partition("/")[0] in chosen)
        if own not in known:
            known[own] = Program(dict(own))
        programs[way] = known[own]
    return programs


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
    levels = {**dict.fromkeys((*SIZES, "dp"), whole), **({} if fixed else dict.fromkeys(DENSE, dense))}
    levels["micro_batch"] = ROW if fixed else dense | BATCH
    values: dict[str, Any] = {
        name: known[name] if name in known else graph.given(name, levels.get(name, ROW), True, 1.0) for name in names
    }
    tiers = len(grid.case.domains)

    def tier(axis: str, i: int) -> Any:
        if i == tiers - 1:
            return values[axis] if axis in values else known.get(axis, graph.given(f"{axis}/{i}", whole, True))
        if axis in ("ep", "etp") and not grid.has_experts:
            return 1.0
        # Where splits have the same dense layer, so have sites.
        site = SPLIT | SITE if not fixed and dense == SPLIT and axis in DENSE else ROW | PLACE
        return graph.given(f"{axis}/{i}", site, True)

    axes = (*AXES, "dp_cp", "shard", "replicate", "etp", "ep", "edp", "expert_shard", "expert_replicate")
    groups = {axis: tuple(tier(axis, i) for i in range(tiers)) for axis in axes}
    shard = float(grid.case.plan.shard) if grid.case.plan.shard > 1 else values["dp"]
    return PlanSizes(pp=known.get("pp", 1.0), vpp=known.get("vpp", 1.0), shard=shard, group_shapes=groups, **values)


def _pairings(grid: PlanGrid) -> tuple[Pairing, ...]:
    """Return the ways in which the schedules of a space pair micro-batches."""
    return tuple(dict.fromkeys(pairing(grid.case.stack, one) for one in grid.space.schedule))


def _recorded(
    grid: PlanGrid, way: tuple[int, bool, int], sizes: PlanSizes[Any], priced: KnownPrices[Any]
) -> list[tuple[Any, ...]]:
    """Return for each recompute mode the bytes sent, and the blocks of one way to split them for each pairing.

    What pairs hide is taken off each block: a bound of DualPipe counts the messages that they do not hide.
    """
    layout, sequence, kind = way
    case = case_for(grid.case, layout=LAYOUTS[layout], sequence_parallel=sequence, cp_kind=CONTEXT_KINDS[kind])
    machine, rows = machine_of(case, sizes.group_shapes), []
    for mode in grid.space.recompute:
        tables: Tables[Any] = tables_apart(case_for(case, recompute=mode), machine, sizes, priced)
        parts = (_without(paired_blocks(machine, when, tables.parts), _UNREAD) for when in _pairings(grid))
        rows.append((tables.boundary_bytes, *parts))
    return rows


def case_for(case: TrainingCase, **fields: Any) -> TrainingCase:
    """Return the case under changed fields of its plan."""
    return replace(case, plan=replace(case.plan, **fields))
