"""Deployments evaluated by programs: layouts and batches along one axis, formats and engines one after another.

The formulas are those of `shardwise.serving`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from shardwise.ledger.number import largest
from shardwise.ledger.symbol import Graph
from shardwise.plans import Serving
from shardwise.records import dataclass, replace
from shardwise.search._columns import bisected
from shardwise.search._program import ROW, Program, ProgramShape
from shardwise.search._recordings import recordings_of
from shardwise.search._serving_grid import ServingGrid
from shardwise.serving import ServingCase, ServingSizes, beside_cache_band, evaluate, request_seconds

CELLS = 16_384


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


def counted_tokens(job: Serving) -> int:
    """Return the tokens of a request that rates and costs count: those generated, or the input where none are."""
    return job.output_tokens or job.input_tokens


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What `infer` says of one replica under a setup, recorded; `columns` are what it reads of the kinds of layouts."""

    program: Program
    columns: Mapping[str, Any]


def _recorded(grid: ServingGrid, setup: int) -> _Recorded:
    case, graph, columns, shared = grid.setups[setup][1], Graph(), dict[str, Any](), dict[str, float]()

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
            return shared.setdefault(name, float(value[0]))
        columns[name] = value
        return graph.given(name, ROW)

    sizes = replace(symbols(grid.sizes(case.model), "sizes"), batch=graph.given("batch", ROW))
    kept = recordings_of((case, grid.options.risk, shared, *columns))
    program = kept.programs.get("replica") or kept.put(
        "replica", Program(_replica_numbers(case, sizes, grid.options.risk))
    )
    kept.write()
    return _Recorded(program, columns)


def _replica_numbers(case: ServingCase, sizes: ServingSizes[Any], risk: float) -> dict[str, Any]:
    """Return what `infer` says of one replica by name; `risk` is the wanted chance to fit."""
    e = evaluate(case, sizes)
    short = largest([m.kv_cache - m.cache_budget for m in e.memory])
    # Weights and working memory that measure more than predicted: `InferReport.chance_to_fit` is the risk.
    more = max(1.0, beside_cache_band(case, e.family).at(risk))
    at_risk = largest([short, *(more * m.beside_cache - m.most_beside for m in e.on_devices)])
    seconds = (e.prefill.seconds, e.decode.seconds, e.request_seconds, *request_seconds(case, e), short, at_risk)
    return dict(zip((f.name for f in fields(ReplicaColumns)), seconds, strict=True))


def _evaluated(grid: ServingGrid, setup: int, kind: Any, batch: Any) -> ReplicaColumns:
    """Return what one replica of some kinds of layouts does, each with its batch, under one setup."""
    if setup not in grid.programs:
        grid.programs[setup] = _recorded(grid, setup)
    program, columns = grid.programs[setup].program, grid.programs[setup].columns
    evaluated: dict[str, Any] = {f.name: np.empty(len(kind)) for f in fields(ReplicaColumns)}
    for part in (slice(at, at + CELLS) for at in range(0, len(kind), CELLS)):
        own = kind[part]
        given = {name: columns[name][own] if name in columns else batch[part].astype(float) for name in program.inputs}
        for name, value in program.run(given, ProgramShape(rows=len(own), modes=1, row=own)).items():
            evaluated[name][part] = value
    return ReplicaColumns(**evaluated)


def _table(grid: ServingGrid, setup: int, cells: tuple[Any, Any, Any], each: ReplicaColumns) -> ServingTable:
    """Return the table of layouts with their batches, each from what one replica of its kind does."""
    layout, batch, at = cells
    columns, legal = grid.layouts.columns, grid.layouts.legal[layout]
    values = {f.name: getattr(each, f.name)[at] for f in fields(ReplicaColumns)}
    # Of one replica, so that replicas alike tie to the last bit and the fewest devices come first.
    replica = columns["tp"][legal] * columns["pp"][legal]
    rate = batch * counted_tokens(grid.setups[setup][1].job) / values["request_seconds"] / replica
    price = grid.cluster.usd_per_device_hour
    hourly = np.nan if price is None else price
    return ServingTable(
        setup=np.full(np.shape(batch), setup),
        layout=layout,
        batch=batch,
        devices=replica * columns["dp"][legal],
        tokens_per_second_per_gpu=rate,
        usd=hourly / 3600 / rate * 1e6,
        **values,
    )


def table_of(grid: ServingGrid, setup: int) -> Iterator[ServingTable]:
    """Yield the plans of one setup: layouts that its engine launches with every batch, then each with its largest."""
    one, kind = grid.kinds
    launched = grid.launches(grid.setups[setup][1])[kind]
    batches = np.array(grid.space.batches, np.int64)
    if not len(one):
        return
    each = _evaluated(grid, setup, np.repeat(np.arange(len(one)), len(batches)), np.tile(batches, len(one)))
    own = np.flatnonzero(launched)
    layout, place = np.repeat(own, len(batches)), np.tile(np.arange(len(batches)), len(own))
    yield _table(grid, setup, (layout, batches[place], kind[layout] * len(batches) + place), each)
    for between in grid.space.open_batches:
        some, batch = _largest(grid, setup, between)
        new = ~np.isin(batch, batches)
        if not new.any():
            continue
        some, batch = some[new], batch[new]
        at = np.full(len(one), -1)
        at[some] = np.arange(len(some))
        layout = np.flatnonzero((at[kind] >= 0) & launched)
        where = at[kind[layout]]
        yield _table(grid, setup, (layout, batch[where], where), _evaluated(grid, setup, some, batch))


def _largest(grid: ServingGrid, setup: int, between: tuple[int, int]) -> tuple[Any, Any]:
    """Return kinds of layouts and for each the largest batch of a range that will do, where the least does."""
    every = np.arange(len(grid.kinds[0]))
    return bisected(every, between, lambda kind, batch: grid.options.harmless(_evaluated(grid, setup, kind, batch)))
