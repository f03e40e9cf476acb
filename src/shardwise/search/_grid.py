"""Plans as rows of columns: degrees and places first, and the choices of each row when its turn comes.

Columns of words hold their index: `layout` in LAYOUTS, `cp_kind` in CONTEXT_KINDS, `order` in the orders of the space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from itertools import product
from typing import Any, cast

import numpy as np

from shardwise.plans import CONTEXT_KINDS, LAYOUTS, Plan, Schedule, divisors, find_rules, split_layers, with_groups
from shardwise.plans.laws import all_blocks
from shardwise.records import dataclass
from shardwise.search._columns import (
    Columns,
    ColumnsRead,
    check_degrees,
    crossed,
    distinct,
    exact_sum,
    looked_up,
    products,
    spread,
)
from shardwise.search._constraints import Constraints, Law, laws_of
from shardwise.search._launch import STACK, launched, runs_whole, stack_law
from shardwise.search._placements import COLUMNS, Placements, ShapeColumns, places_of
from shardwise.search._space import SearchSpace
from shardwise.training import PricedBlocks, TrainingCase, stage_layers
from shardwise.training.schedules import find_schedule

SUMMA = LAYOUTS.index("summa")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """Which of several grids of a search one is: its number, and that of its cluster and job.

    `weight` makes seconds of its steps comparable: for as many tokens as a step of the first, for cost at its price.
    Plans that are cut as one of `partitions` would cut them belong to a grid before it, and with `copies_alone` those
    of which nothing is held more than once.
    """

    number: int = 0
    choice: int = 0
    weight: float = 1.0
    partitions: tuple[str, ...] = ()
    copies_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanGrid:
    """The rows of a space: one for each set of degrees and each place of the axes that differs.

    What all of its plans share beside the cluster and the job is in the plan of its case.
    """

    case: TrainingCase
    space: SearchSpace
    explore: bool = False
    variant: Variant = Variant()

    def __getstate__(self) -> dict[str, Any]:
        """What travels to a process that starts anew; laws and tables are made again there."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @cached_property
    def laws(self) -> dict[str, Law]:
        """The laws of the case by name, in the order in which they are counted, that of its framework last."""
        law_columns = laws_of(self.case)
        return law_columns if self.explore else {**law_columns, STACK: stack_law(self.case.stack, self.job)}

    @property
    def job(self) -> dict[str, str]:
        """What of the job a framework may not run."""
        return self.case.job_words

    def launched(self, columns: ColumnsRead, **fixed: Any) -> Any:
        """Return which rows the framework launches; `fixed` are fields that all of them share."""
        if self.explore:
            return np.ones(len(columns["pp"]), bool)
        plan = self.case.plan
        shared = {name: getattr(plan, name) for name in ("offload", "modules", "shard", "recompute_layers")}
        return launched(self.case.stack.runs, columns, {**self.job, **shared, **fixed})

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.case.model.has_experts

    @cached_property
    def device_counts(self) -> list[int]:
        """Counts of devices that plans may fill."""
        most = self.case.cluster.num_devices
        return self.space.devices.of(range(1, most + 1)) if self.space.devices.ranges else [most]

    @cached_property
    def base(self) -> Columns:
        """Degrees, sorted by how a layer is split, and how many places each set of them has."""
        blocks, size = list[Columns](), 0
        for n in self.device_counts:
            blocks.append(self._degrees(n))
            size += len(blocks[-1]["tp"])
            check_degrees(size, self.device_counts[-1])
        columns = {c: np.concatenate([f[c] for f in blocks]) for c in blocks[0]}
        by_split = np.lexsort([columns[c] for c in ("dp", "pp", "devices", "cp", "tp2", "tp", "layout")])
        columns = {c: v[by_split] for c, v in columns.items()}
        places = places_of(columns, self.space, self.case.domains)
        chosen = np.flatnonzero(places.count)
        self.__dict__["places"] = places.among(chosen)
        return {**{c: v[chosen] for c, v in columns.items()}, "places": places.count[chosen]}

    @cached_property
    def places(self) -> Placements:
        """Every way to fill the fastest domain, for each row of the base."""
        _ = self.base
        return cast(Placements, self.__dict__["places"])

    def _degrees(self, num_devices: int) -> Columns:
        """Every way to write the devices as a product of degrees."""
        space, layers = self.space, self.case.model.num_layers
        ways = divisors(num_devices)
        pipelines = space.pp.of(w for w in ways if w <= layers)
        axes = {"tp": space.tp.of(ways), "tp2": space.tp2.of(ways), "cp": space.cp.of(ways), "pp": pipelines}
        grid = products(list(axes.values()), num_devices)
        columns = dict(zip(axes, grid.T, strict=True))
        replicas = num_devices // grid.prod(axis=1, dtype=np.int64)
        whole = np.isin(replicas, space.dp.of(ways))
        if self.case.plan.shard > 1:
            # A group of all replicas is no group.
            whole &= (replicas % self.case.plan.shard == 0) & (replicas > self.case.plan.shard)
        columns = {**columns, "dp": replicas, "devices": np.full_like(replicas, num_devices)}
        kept = {c: v[whole] for c, v in columns.items()}
        flat = kept["tp2"] == 1
        sides = []
        for name in space.layout:
            # A grid of one device is the one-dimensional layout.
            one = kept["tp"] * kept["tp2"] == 1
            here = flat if name == "1d" else ~one | ("1d" not in space.layout)
            side = {c: v[here] for c, v in kept.items()}
            sides.append({**side, "layout": np.full(int(here.sum()), LAYOUTS.index(name))})
        return {c: np.concatenate([side[c] for side in sides]) for c in sides[0]}

    def groups(self, place: Any, experts: Columns) -> ShapeColumns:
        """Return the ranks of every group in one domain of each tier, as float64, for places and (ep, etp) of plans."""
        if not self.has_experts:
            return {axis: tuple(t[place] for t in tiers) for axis, tiers in self._dense_groups.items()}
        dense = {
            axis: tuple(t[place].astype(np.int64) for t in tiers) for axis, tiers in self.places.group_shapes.items()
        }
        dp = dense["dp"][-1]
        shapes = with_groups(dense, {"dp": dp, "shard": self.shard(dp), **experts}, COLUMNS)
        return {axis: tuple(t.astype(np.float64) for t in tiers) for axis, tiers in shapes.items()}

    def shard(self, dp: Any) -> Any:
        """Return the replicas that share one sharded copy: all of them unless the plan of the case says how many."""
        return np.full_like(dp, self.case.plan.shard) if self.case.plan.shard > 1 else dp

    @cached_property
    def _dense_groups(self) -> ShapeColumns:
        dense = {axis: tuple(t.astype(np.int64) for t in tiers) for axis, tiers in self.places.group_shapes.items()}
        dp = dense["dp"][-1]
        sizes = {"dp": dp, "shard": self.shard(dp), "ep": np.ones_like(dp), "etp": np.ones_like(dp)}
        shapes = with_groups(dense, sizes, COLUMNS)
        return {axis: tuple(t.astype(np.float64) for t in tiers) for axis, tiers in shapes.items()}

    @cached_property
    def priced(self) -> dict[int, PricedBlocks]:
        """Blocks that reports of its plans share, by the count of devices."""
        return {}

    @cached_property
    def micro_batches(self) -> list[int]:
        """Micro-batches that divide the global batch."""
        return self.space.micro_batch.of(divisors(self.case.job.global_batch))

    def expert_ways(self, devices: int) -> list[tuple[int, int]]:
        """Return the (ep, etp) to try on so many devices."""
        if not self.has_experts:
            return [(1, 1)]
        ways = divisors(devices)
        return list(product(self.space.ep.of(ways), self.space.etp.of(ways)))

    def compositions(self, pp: int) -> list[tuple[Schedule, int]]:
        """Return the (schedule, vpp) of a pipeline of so many stages."""
        layers = self.case.model.num_layers
        choices = chunk_choices(self.space, pp, layers)
        even = not (self.explore or self.case.stack.runs.uneven_stages)
        choices = [(schedule, vpp) for schedule, vpp in choices if not (even and layers % (pp * vpp))]
        beyond = pp > self.case.cluster.devices_per_node
        choices = [way for way in choices if not (beyond and find_rules(way[0]).one_process)]
        if self.case.plan.recompute_layers:
            choices = [way for way in choices if self._recomputes_part(pp, *way)]
        before, own = self.variant.partitions, self.case.stack.partition
        return [
            (schedule, vpp)
            for schedule, vpp in choices
            if not any(split_layers(layers, pp * vpp, p) == split_layers(layers, pp * vpp, own) for p in before)
        ]

    def _recomputes_part(self, pp: int, schedule: Schedule, vpp: int) -> bool:
        """Return whether so many layers of a stage are as many of each chunk, and fewer than the fullest stage has."""
        limit, layers = self.case.plan.recompute_layers, self.case.model.num_layers
        sizes = split_layers(layers, pp * vpp, self.case.stack.partition)
        sizes_of = stage_layers(tuple(range(layers)), pp, vpp, sizes, schedule)
        return limit < max(map(len, sizes_of)) and (self.explore or limit % vpp == 0)

    def counts(self, columns: Columns) -> dict[str, Any]:
        """Return for each choice how many values it has on each row."""
        space, size = self.space, len(columns["tp"])
        ones = np.ones(size, np.int64)
        flat = columns["layout"] == SUMMA
        pipes = {p: len(self.compositions(p)) for p in set(columns["pp"].tolist())}
        return {
            "places": columns["places"],
            "panels": np.where(flat, len(self.panels), ones),
            "experts": self._expert_choices(columns),
            "sharding": ones if self.has_experts else self._sharding_choices(columns),
            "sequence": np.where(flat | (columns["tp"] == 1), ones, len(space.sequence_parallel)),
            "context": np.where(columns["cp"] == 1, ones, len(space.cp_kind)),
            "batch": ones * len(self.micro_batches),
            "composition": looked_up(columns["pp"], pipes) * len(space.recompute),
        }

    def copied(self, columns: ColumnsRead) -> Any:
        """Return which rows hold something more than once, so that it matters what is sharded: a layer, or experts."""
        ranks = columns["tp"] * columns["tp2"] * columns["cp"] * columns["dp"]
        copies = columns["dp"] * columns["cp"] > 1
        return copies | (ranks > columns["ep"] * columns["etp"]) if self.has_experts else copies

    @cached_property
    def lone_shardings(self) -> tuple[str, ...]:
        """Shardings to try where nothing is held more than once: none stands for all, as shards save no bytes there.

        Each is tried where none is not of the space, where the framework does not run it with the job, and where shards
        free a gradient that is whole.
        """
        words, whole = self.space.sharding, Plan().sharding
        if self.variant.copies_alone:
            return ()
        stands = whole in words and not self.case.stack.whole_table_gradient
        return (whole,) if stands and runs_whole(self.case.stack, self.case.plan, self.job) else words

    def _sharding_choices(self, columns: Columns) -> Any:
        return np.where(self.copied(columns), len(self.space.sharding), len(self.lone_shardings))

    def _expert_choices(self, columns: Columns) -> Any:
        """Return for each row how many ways its experts have, times the shardings of each where there are experts."""
        choices = np.zeros(len(columns["tp"]), np.int64)
        for n in self.device_counts:
            for ep, etp in self.expert_ways(n):
                each = self._sharding_choices({**columns, "ep": ep, "etp": etp}) if self.has_experts else 1
                choices += np.where(columns["devices"] == n, each, 0)
        return choices

    @cached_property
    def panels(self) -> list[int]:
        """Panels to cut GEMMs of the two-dimensional layout into."""
        return self.space.panels.of(divisors(self.case.model.hidden))

    @cached_property
    def num_plans(self) -> int:
        """Plans of the space, legal or not."""
        return exact_sum(_weights(self.counts(self.base), ()))

    def constraints(self) -> Constraints:
        """Return the laws of the case, with nothing counted."""
        return Constraints(self.laws)

    def expand(self, columns: Columns, constraints: Constraints) -> Columns:
        """Return the rows of some degrees and places with their choices, all laws but that of the schedule obeyed."""
        counts = self.counts(columns)
        columns = {**columns, **{f"of {name}": count for name, count in counts.items()}}
        done: list[str] = []
        columns = self._apply(constraints, "tensor", columns, done)
        columns = crossed(columns, columns["layout"] == SUMMA, {"panels": self.panels}, {"panels": 1})
        columns = self._apply(constraints, "summa", columns, [*done, "panels"])
        done = ["panels"]
        columns = self._with_experts(columns)
        columns["of sharding"] = self._sharding_choices(columns)
        columns = self._with_sequence(columns)
        done += ["experts", "sequence"]
        columns = self._apply(constraints, "experts", columns, done)
        if "job" in constraints.laws:
            columns = self._apply(constraints, "job", columns, done)
        kinds = [CONTEXT_KINDS.index(k) for k in self.space.cp_kind]
        columns = crossed(columns, columns["cp"] > 1, {"cp_kind": kinds}, {"cp_kind": kinds[0]})
        columns = self._apply(constraints, "context", columns, [*done, "context"])
        return self._with_batches(columns, constraints, [*done, "context", "batch"])

    def _with_batches(self, columns: Columns, constraints: Constraints, done: Sequence[str]) -> Columns:
        """Return each row, a `set`, once for every micro-batch that its replicas allow, those of the others counted."""
        sizes, ways = np.array(self.micro_batches, np.int64), distinct(columns["dp"])
        pairs = {"dp": np.repeat(ways, len(sizes)), "micro_batch": np.tile(sizes, len(ways))}
        legal = constraints.check("batch", pairs).reshape(len(ways), len(sizes))
        way = np.searchsorted(ways, columns["dp"])
        left = {c[3:]: v for c, v in columns.items() if c.startswith("of ")}
        each, allowed = _weights(left, done), legal.sum(axis=1)
        constraints.reject("batch", each * (len(sizes) - allowed[way]))
        # The sizes that each number of replicas allows stand one after the other, from `start`.
        start, at = np.cumsum(allowed) - allowed, np.nonzero(legal)[1]
        index, times = spread(start[way], allowed[way])
        columns = {**columns, "set": np.arange(len(columns["dp"]))}
        repeated = {c: np.repeat(v, times) for c, v in columns.items() if not c.startswith("of ")}
        return {**repeated, "micro_batch": sizes[at][index]}

    def _apply(self, constraints: Constraints, name: str, columns: Columns, done: Sequence[str]) -> Columns:
        left = {c[3:]: v for c, v in columns.items() if c.startswith("of ")}
        return constraints.keep(name, columns, _weights(left, done), constraints.check(name, columns))

    def _with_experts(self, columns: Columns) -> Columns:
        blocks = []
        for n in self.device_counts:
            ways = self.expert_ways(n)
            rows = {c: v[columns["devices"] == n] for c, v in columns.items()}
            values = {"ep": [e for e, _ in ways], "etp": [e for _, e in ways]}
            blocks.append(crossed(rows, rows["tp"] > 0, values, {"ep": 1, "etp": 1}))
        return {c: np.concatenate([f[c] for f in blocks]) for c in blocks[0]}

    def _with_sequence(self, columns: Columns) -> Columns:
        matters = (columns["layout"] != SUMMA) & (columns["tp"] > 1)
        values = list(self.space.sequence_parallel)
        return crossed(columns, matters, {"sequence_parallel": values}, {"sequence_parallel": False})

    @cached_property
    def _lawful_ways(self) -> Any:
        """About how many ways each set of degrees has to split a layer that the laws allow."""
        columns, space = self.base, self.space
        flat, size = columns["layout"] == SUMMA, len(columns["tp"])
        grids = crossed({**columns, "row": np.arange(size)}, flat, {"panels": self.panels}, {"panels": 1})
        constraints = self.constraints()
        legal = constraints.check("tensor", grids) & constraints.check("summa", grids)
        lawful = np.bincount(grids["row"][legal], minlength=size) * np.where(columns["cp"] == 1, 1, len(space.cp_kind))
        if not self.has_experts:
            return lawful * np.where(flat | (columns["tp"] == 1), 1, len(space.sequence_parallel))
        moes = [b.experts for b in all_blocks(self.case.model) if b.experts]
        ways = np.zeros(size, np.int64)
        for n in self.device_counts:
            for ep, etp in self.expert_ways(n):
                if not any(m.experts % ep or m.ffn % etp for m in moes):
                    ways += (columns["devices"] == n) & (n // columns["pp"] % (ep * etp) == 0)
        return lawful * ways

    def chunks(self, most_rows: int) -> list[tuple[int, int]]:
        """Return slices of the base of about so many rows when expanded."""
        columns = self.base
        fitting = {
            d: sum(self.case.job.global_batch % (d * b) == 0 for b in self.micro_batches)
            for d in set(columns["dp"].tolist())
        }
        # Times of blocks are of places: rows of many of them count for more.
        sizes = self._lawful_ways * looked_up(columns["dp"], fitting) * np.maximum(columns["places"] // 4, 1)
        ranges, start = [], 0
        for end in range(1, len(sizes) + 1):
            if end == len(sizes) or sizes[start : end + 1].sum() > most_rows:
                ranges.append((start, end))
                start = end
        return ranges


def _weights(counts: dict[str, Any], done: Sequence[str]) -> Any:
    """Plans that each row stands for: the product of the choices it has yet to make."""
    weights: Any = 1
    for name, count in counts.items():
        if name not in done:
            weights = weights * count
    return weights


def chunk_choices(space: SearchSpace, pp: int, num_layers: int) -> list[tuple[Schedule, int]]:
    """Return the (schedule, vpp) of a pipeline: without one, 1F1B and ZB-H1 are the same and one stands for both.

    Chunks are those that cut the layers evenly, where the stages already do not, powers of two, and those that the
    space gives one by one. The laws decide later.

    >>> chunk_choices(SearchSpace(schedule=("1f1b", "zb-h1")), 1, 8)
    [('1f1b', 1)]
    >>> chunk_choices(SearchSpace(schedule=("interleaved",)), 2, 8)
    [('interleaved', 2), ('interleaved', 4)]
    """
    if pp == 1:
        single = [find_schedule(s) for s in space.schedule if not (find_rules(s).chunked or find_rules(s).even_stages)]
        alike = [s.name for s in single if not s.holds_heads][:1]
        return [(s, 1) for s in (*alike, *(s.name for s in single if s.holds_heads))]
    choices: list[tuple[Schedule, int]] = []
    odd = num_layers % pp
    several = [v for v in range(2, num_layers // pp + 1) if (v & (v - 1) if odd else num_layers % (pp * v)) == 0]
    several = sorted({*several, *(v for v in space.vpp.single if 1 < v <= num_layers // pp)})
    for schedule in space.schedule:
        chunks = find_rules(schedule).chunks_of([1, *several])
        choices += [(schedule, v) for v in space.vpp.of(chunks)]
    return choices
