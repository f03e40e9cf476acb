"""Deployments evaluated by programs: layouts and batches along one axis, formats and engines one after another.

The formulas are those of `shardwise.serving`; a law is asked of every layout as `infer` asks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster, part_of
from shardwise.ledger.number import largest
from shardwise.ledger.symbol import Graph
from shardwise.models import Block, Model
from shardwise.plans import Plan, Serving, dense_group_shapes, divisors, with_groups
from shardwise.plans.fields import DEPLOYED
from shardwise.plans.laws import all_blocks, expert_laws, tensor_laws
from shardwise.records import dataclass
from shardwise.search._columns import bisected, distinct_rows
from shardwise.search._options import SearchOptions
from shardwise.search._placements import COLUMNS
from shardwise.search._program import ROW, Program, ProgramShape
from shardwise.search._serving_space import Layouts, ServingSpace, law_key, law_keys
from shardwise.search._space import Order
from shardwise.serving._batch import evaluate, request_seconds
from shardwise.serving._case import ServingCase, ServingQuestion, complete, complete_plan
from shardwise.serving._report import beside_cache_band
from shardwise.serving._sizes import ServingSizes, sizes_of_columns

CELLS = 16_384
MEMORY = "memory"
FORMATS = "formats"
Word = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaColumns:
    """Columns of what one replica of a kind of layout does with a batch."""

    ttft_seconds: Any
    tpot_seconds: Any
    request_seconds: Any
    request_ttft_seconds: Any
    request_tpot_seconds: Any
    short_by_bytes: Any
    short_at_risk_bytes: Any

    @property
    def fits(self) -> Any:
        """Which plans fit as predicted."""
        return self.short_by_bytes <= 0

    @property
    def fits_at_risk(self) -> Any:
        """Which plans fit with the chance that is asked."""
        return self.short_at_risk_bytes <= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingTable(ReplicaColumns):
    """Columns of plans: which setup and layout and batch, and what `infer` says of each."""

    setup: Any
    layout: Any
    batch: Any
    devices: Any
    tokens_per_second_per_gpu: Any
    usd: Any

    @property
    def tokens_per_second(self) -> Any:
        """Tokens a second of all devices, prefill included: output tokens, or input where nothing is generated."""
        return self.tokens_per_second_per_gpu * self.devices

    def take(self, rows: Any) -> ServingTable:
        """Return some rows."""
        return ServingTable(**{f.name: getattr(self, f.name)[rows] for f in fields(ServingTable)})


def stacked(tables: Sequence[ServingTable]) -> ServingTable:
    """Return the rows of several tables."""
    return ServingTable(**{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(ServingTable)})


_LAW_OF = {"tp": "tensor", "ep": "experts", "etp": "experts", "pp": "pipeline", "stage_layers": "pipeline"}
TITLES = {
    "tensor": "tensor parallelism divides heads and widths",
    "experts": "experts divide over ranks",
    "pipeline": "stages divide the layers",
    FORMATS: "the engine and the device run the format",
    MEMORY: "more memory than the engine has, with the wanted chance to fit",
}


@dataclass(frozen=True, kw_only=True)
class ServingGrid:
    """The question of a search, and its layouts and setups."""

    model: Model
    cluster: Cluster
    job: Serving
    space: ServingSpace
    options: SearchOptions

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(tier.size for tier in self.cluster.tiers)

    @cached_property
    def layouts(self) -> Layouts:
        """Every layout of the space, judged by the laws."""
        columns = self._placed(np.array(list(self._degrees()), np.int64).reshape(-1, len(DEPLOYED)))
        complete: dict[tuple[Any, ...], tuple[Plan, tuple[Problem, ...]]] = {}
        names: dict[str, int] = {}
        law = np.full(len(columns["order"]), -1)
        keys = law_keys(columns)
        first, back = distinct_rows(keys)
        found = Layouts(columns=columns, orders=self.space.orders, law=law, laws=(), complete=complete)
        said = []
        for row in first.tolist():
            plan = found.bare(row)
            complete[law_key(plan)] = self._judged_plan(plan)
            problems = complete[law_key(plan)][1]
            field = problems[0].field if problems else ""
            said.append(names.setdefault(_LAW_OF.get(field, field), len(names)) if field else -1)
        law = np.array(said, np.int64)[back] if said else law
        return replace(found, law=law, laws=tuple(names))

    def _judged_plan(self, plan: Plan) -> tuple[Plan, tuple[Problem, ...]]:
        """Return a complete plan and what is wrong with it; laws of fewer fields first, each asked once a value."""
        legal = replace(plan, sequence_parallel=plan.tp > 1)
        stage = plan.tp * plan.dp % (plan.ep * plan.etp) == 0
        asked = (((plan.tp,), tensor_laws), ((plan.tp, plan.ep, plan.etp, stage), expert_laws))
        for key, law in asked:
            if key not in self._laws_said:
                found = Problems()
                law(self.model, self._blocks, legal, found)
                self._laws_said[key] = tuple(found.items)
            if self._laws_said[key]:
                return plan, self._laws_said[key]
        problems = Problems()
        whole = part_of(self.cluster, plan.num_devices)
        question = ServingQuestion(model=self.model, cluster=whole, plan=plan, job=self.job)
        return complete_plan(question, problems, []), tuple(problems.items)

    @cached_property
    def _laws_said(self) -> dict[tuple[Any, ...], tuple[Problem, ...]]:
        return {}

    @cached_property
    def _blocks(self) -> tuple[Block, ...]:
        return tuple(all_blocks(self.model))

    def _degrees(self) -> Iterator[tuple[int, ...]]:
        """Yield tp, pp, dp, ep and etp of every layout, whatever the laws say of it."""
        s, n = self.space, self.cluster.num_devices
        for count in s.devices.of(range(1, n + 1)) if s.devices.ranges else [n]:
            ways = divisors(count)
            for tp, pp in product(s.tp.of(ways), s.pp.of(w for w in ways if w <= self.model.num_layers)):
                dp = count // (tp * pp)
                if count % (tp * pp) == 0 and s.dp.of([dp]):
                    for ep, etp in self._experts(tp, divisors(tp * dp)):
                        yield tp, pp, dp, ep, etp

    def _experts(self, tp: int, ways: list[int]) -> list[tuple[int, int]]:
        """Return (ep, etp) as engines have it: etp divides the tensor-parallel ranks, and experts fill those at least.

        Weights that replicas share leave experts within the tensor-parallel ranks. vLLM docs, expert parallel
        deployment; SGLang docs, --ep-size and --moe-dp-size (2026).
        """
        if not self.has_experts:
            return [(1, 1)]
        every = product(self.space.ep.of(ways), self.space.etp.of(w for w in ways if tp % w == 0))
        most = tp if self.job.shard_weights else self.cluster.num_devices**2
        return [(ep, etp) for ep, etp in every if (ep * etp >= tp or tp % ep) and ep * etp <= most]

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return self.model.has_experts

    def plan(self, layout: int) -> Plan:
        """Return the complete plan of a legal layout."""
        return self.layouts.plan(int(self.layouts.legal[layout]))

    @property
    def own_degrees(self) -> tuple[str, ...]:
        """The degrees that change what a replica does: their number does where they share weights."""
        return tuple(name for name in DEPLOYED if name != "dp" or name in self._talking)

    @property
    def _talking(self) -> tuple[str, ...]:
        """The axes that send messages; replicas do where they share weights."""
        experts = ("ep", "etp") if self.has_experts else ()
        return ("tp", "pp", *experts, *(("dp",) if self.job.shard_weights else ()))

    def _placed(self, degrees: Any) -> dict[str, Any]:
        """Return a row for each order of the axes that places its messages otherwise, and the number of its place."""
        sizes = dict(zip(DEPLOYED, degrees.T, strict=True))
        orders, rows = len(self.space.orders), len(degrees)
        each = [self._place(sizes, order) for order in self.space.orders]
        spans = [np.concatenate(tiers) for tiers in zip(*each, strict=True)]
        _, place = distinct_rows(spans) if spans else (None, np.zeros(orders * rows, np.int64))
        codes = place.reshape(orders, rows)
        fresh = np.ones_like(codes, bool)
        for i in range(1, len(codes)):
            fresh[i] = (codes[:i] != codes[i]).all(axis=0)
        row, order = np.nonzero(fresh.T)
        return {**{name: size[row] for name, size in sizes.items()}, "order": order, "place": codes.T[fresh.T]}

    def _place(self, sizes: dict[str, Any], order: Order) -> list[Any]:
        """Return the ranks of each axis that sends messages in one domain of each tier."""
        one = np.ones_like(sizes["tp"])
        dense = dense_group_shapes({**sizes, "tp2": one, "cp": one}, order, self.domains, COLUMNS)
        groups = {"dp": sizes["dp"], "shard": sizes["dp"], "ep": sizes["ep"], "etp": sizes["etp"]}
        placed = with_groups(dense, groups, COLUMNS)
        return [placed[axis][tier] for axis, tier in product(self._talking, range(len(self.domains) - 1))]

    @cached_property
    def setups(self) -> list[tuple[Word, ServingCase]]:
        """Every (engine, weights, kv_cache, compute) that the device can run, those that come to the same once."""
        return [(word, case) for word, case in self._judged.values() if isinstance(case, ServingCase)]

    @cached_property
    def unusable(self) -> list[tuple[Word, Problem]]:
        """Every (engine, weights, kv_cache, compute) that the device cannot run, and why."""
        return [(word, why) for word, why in self._judged.values() if isinstance(why, Problem)]

    @cached_property
    def _judged(self) -> dict[Any, tuple[Word, ServingCase | Problem]]:
        found: dict[Any, tuple[Word, ServingCase | Problem]] = {}
        for word in self.space.setups(self.job):
            engine, weights, kv_cache, compute = word
            job = replace(self.job, batch=1, weights=weights, kv_cache=kv_cache, compute=compute)
            one = Plan(dp=self.cluster.num_devices)
            try:
                question = ServingQuestion(
                    model=self.model, cluster=self.cluster, plan=one, job=job, engine=engine,
                    efficiencies=self.options.efficiencies,
                )  # fmt: skip
                case, _ = complete(question)
            except InputError as error:
                others = [p for p in error.problems if p.field not in ("compute", "dtype", "weights", "kv_cache")]
                if others:
                    raise InputError(others) from None
                found[word] = word, _unusable(error.problems[0])
                continue
            key = case.engine, case.format, case.dtype, case.compute, case.cache_element_bytes
            found.setdefault(key, (word, replace(case, job=case.capped(case.job))))
        return found

    @cached_property
    def kinds(self) -> tuple[Any, Any]:
        """Return one legal layout of each kind, and the kind of every legal layout: replicas alike are one kind."""
        c, legal = self.layouts.columns, self.layouts.legal
        alike = [c[name][legal] for name in (*self.own_degrees, "place")]
        first, back = distinct_rows(alike)
        return legal[first], back

    def sizes(self, model: Model) -> ServingSizes[Any]:
        """Return the numbers of one layout of each kind as columns, for the model as an engine runs it."""
        if model not in self._sizes:
            plans = [self.layouts.plan(row) for row in self.kinds[0].tolist()]
            self._sizes[model] = sizes_of_columns(model, plans, [1] * len(plans), self.domains)
        return self._sizes[model]

    @cached_property
    def _sizes(self) -> dict[Model, ServingSizes[Any]]:
        return {}

    @cached_property
    def programs(self) -> dict[int, _Recorded]:
        """What was recorded, by setup."""
        return {}


def _unusable(problem: Problem) -> Problem:
    """Return why a device cannot multiply in a format, said of the weights: their format is what can be chosen."""
    if problem.field != "dtype":
        return problem
    return replace(problem, field="weights", remedy=problem.remedy.replace("use ", "use --weights ", 1))


def counted_tokens(job: Serving) -> int:
    """Return the tokens of a request that rates and costs count: those generated, or the input where none are."""
    return job.output_tokens or job.input_tokens


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What `infer` says of one replica under a setup, recorded; `columns` are what it reads of the kinds of layouts."""

    program: Program
    columns: Mapping[str, Any]


def _recorded(grid: ServingGrid, setup: int) -> _Recorded:
    case, graph, columns = grid.setups[setup][1], Graph(), dict[str, Any]()

    def symbols(value: Any, name: str) -> Any:
        """Return a tree of sizes with a symbol for each column that is not the same throughout."""
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{f.name: symbols(getattr(value, f.name), f"{name}.{f.name}") for f in fields(value)}
            )
        if isinstance(value, tuple):
            return tuple(symbols(item, f"{name}.{i}") for i, item in enumerate(value))
        if isinstance(value, dict):
            return {key: symbols(item, f"{name}.{key}") for key, item in value.items()}
        if isinstance(value, bool):
            return value
        if (value == value[0]).all():
            return float(value[0])
        columns[name] = value
        return graph.given(name, ROW)

    z = replace(symbols(grid.sizes(case.model), "sizes"), batch=graph.given("batch", ROW))
    e = evaluate(case, z)
    short = largest([m.kv_cache - m.cache_budget for m in e.memory])
    # Weights and working memory that measure more than predicted: `InferReport.chance_to_fit` is the risk.
    more = max(1.0, beside_cache_band(case, e.family).at(grid.options.risk))
    at_risk = largest([short, *(m.kv_cache + more * m.beside_cache - m.limit for m in e.on_devices)])
    found = (e.prefill.seconds, e.decode.seconds, e.request_seconds, *request_seconds(case, e), short, at_risk)
    return _Recorded(Program(dict(zip((f.name for f in fields(ReplicaColumns)), found, strict=True))), columns)


def _evaluated(grid: ServingGrid, setup: int, kind: Any, batch: Any) -> ReplicaColumns:
    """Return what one replica of some kinds of layouts does, each with its batch, under one setup."""
    if setup not in grid.programs:
        grid.programs[setup] = _recorded(grid, setup)
    program, columns = grid.programs[setup].program, grid.programs[setup].columns
    found: dict[str, Any] = {f.name: np.empty(len(kind)) for f in fields(ReplicaColumns)}
    for part in (slice(at, at + CELLS) for at in range(0, len(kind), CELLS)):
        own = kind[part]
        given = {name: columns[name][own] if name in columns else batch[part].astype(float) for name in program.inputs}
        for name, value in program.run(given, ProgramShape(rows=len(own), modes=1, row=own)).items():
            found[name][part] = value
    return ReplicaColumns(**found)


def _table(grid: ServingGrid, setup: int, cells: tuple[Any, Any, Any], each: ReplicaColumns) -> ServingTable:
    """Return the table of layouts with their batches, each from what one replica of its kind does."""
    layout, batch, at = cells
    c, legal = grid.layouts.columns, grid.layouts.legal[layout]
    values = {f.name: getattr(each, f.name)[at] for f in fields(ReplicaColumns)}
    # Of one replica, so that replicas alike tie to the last bit and the fewest devices come first.
    replica = c["tp"][legal] * c["pp"][legal]
    rate = batch * counted_tokens(grid.setups[setup][1].job) / values["request_seconds"] / replica
    price = grid.cluster.usd_per_device_hour
    hourly = np.nan if price is None else price
    return ServingTable(
        setup=np.full(np.shape(batch), setup),
        layout=layout,
        batch=batch,
        devices=replica * c["dp"][legal],
        tokens_per_second_per_gpu=rate,
        usd=hourly / 3600 / rate * 1e6,
        **values,
    )


def table_of(grid: ServingGrid, setup: int) -> Iterator[ServingTable]:
    """Yield the plans of one setup: every legal layout with every batch, then each with its largest ones."""
    one, kind = grid.kinds
    batches = np.array(grid.space.batches, np.int64)
    if not len(one):
        return
    each = _evaluated(grid, setup, np.repeat(np.arange(len(one)), len(batches)), np.tile(batches, len(one)))
    layout, place = np.repeat(np.arange(len(kind)), len(batches)), np.tile(np.arange(len(batches)), len(kind))
    yield _table(grid, setup, (layout, batches[place], kind[layout] * len(batches) + place), each)
    for between in grid.space.open_batches:
        some, batch = _largest(grid, setup, between)
        new = ~np.isin(batch, batches)
        if not new.any():
            continue
        some, batch = some[new], batch[new]
        at = np.full(len(one), -1)
        at[some] = np.arange(len(some))
        layout = np.flatnonzero(at[kind] >= 0)
        where = at[kind[layout]]
        yield _table(grid, setup, (layout, batch[where], where), _evaluated(grid, setup, some, batch))


def _largest(grid: ServingGrid, setup: int, between: tuple[int, int]) -> tuple[Any, Any]:
    """Return kinds of layouts and for each the largest batch of a range that will do, where the least does."""
    every = np.arange(len(grid.kinds[0]))
    return bisected(every, between, lambda kind, batch: grid.options.harmless(_evaluated(grid, setup, kind, batch)))
