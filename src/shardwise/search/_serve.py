"""Deployments evaluated as columns: layouts and batches along one axis, formats and engines one after another.

The formulas are those of `shardwise.serving`; a law is asked of every layout as `infer` asks it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from shardwise.errors import InputError, Problem, Problems
from shardwise.hardware import Cluster
from shardwise.models import Model, MoE
from shardwise.plans import Plan, Serving, spans
from shardwise.plans._values import divisors
from shardwise.search._search import part_of
from shardwise.search._serve_space import LIMITS, ServingSpace, ServingWish
from shardwise.serving._case import Case
from shardwise.serving._evaluate import evaluate
from shardwise.serving._resolve import Question, complete, complete_plan
from shardwise.serving._sizes import Sizes, sizes_of_columns

CELLS = 16_384
MEMORY = "memory"
FORMATS = "formats"
Word = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns of plans: which setup and layout and batch, and what `infer` says of each."""

    setup: Any
    layout: Any
    batch: Any
    devices: Any
    ttft_seconds: Any
    tpot_seconds: Any
    request_seconds: Any
    tokens_per_second: Any
    usd: Any
    short_by_bytes: Any

    @property
    def tokens_per_second_per_gpu(self) -> Any:
        """Tokens a second and device, prefill included: output tokens, or input where nothing is generated."""
        return self.tokens_per_second / self.devices

    @property
    def fits(self) -> Any:
        """Which plans fit."""
        return self.short_by_bytes <= 0

    def take(self, rows: Any) -> Table:
        """Return some rows."""
        return Table(**{f.name: getattr(self, f.name)[rows] for f in fields(Table)})


def stacked(tables: Sequence[Table]) -> Table:
    """Return the rows of several tables."""
    return Table(**{f.name: np.concatenate([getattr(t, f.name) for t in tables]) for f in fields(Table)})


@dataclass(slots=True)
class Layouts:
    """The layouts of a space: those that obey the laws, and those that fell with the law and the first problem."""

    legal: list[Plan] = field(default_factory=list)
    fallen: list[tuple[str, Plan, Problem]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Layouts in all."""
        return len(self.legal) + len(self.fallen)


_LAW_OF = {"tp": "tensor", "ep": "experts", "etp": "experts", "pp": "pipeline", "stage_layers": "pipeline"}
TITLES = {
    "tensor": "tensor parallelism divides heads and widths",
    "experts": "experts divide over ranks",
    "pipeline": "stages divide the layers",
    FORMATS: "the device multiplies in the format",
    MEMORY: "more memory than the engine has",
}


@dataclass(frozen=True, kw_only=True)
class ServingRows:
    """The question of a search, and its layouts and setups."""

    model: Model
    cluster: Cluster
    job: Serving
    space: ServingSpace
    wish: ServingWish

    @cached_property
    def domains(self) -> tuple[int, ...]:
        """Devices in one domain of each tier."""
        return tuple(tier.size for tier in self.cluster.tiers)

    @cached_property
    def layouts(self) -> Layouts:
        """Every layout of the space, judged by the laws."""
        found, said = Layouts(), dict[Any, tuple[Plan, tuple[Problem, ...]]]()
        for plan in self._plans():
            key = (plan.tp, plan.pp, plan.ep, plan.etp, plan.dp if plan.ep * plan.etp > 1 else 1)
            if key not in said:
                problems = Problems()
                whole = part_of(self.cluster, plan.num_devices)
                question = Question(model=self.model, cluster=whole, plan=plan, job=self.job)
                said[key] = complete_plan(question, problems, []), tuple(problems.items)
            complete_one, problems_of_it = said[key]
            if problems_of_it:
                first = problems_of_it[0]
                found.fallen.append((_LAW_OF.get(first.field, first.field), plan, first))
            else:
                found.legal.append(replace(complete_one, dp=plan.dp, order=plan.order))
        return found

    def _plans(self) -> Iterator[Plan]:
        s, n = self.space, self.cluster.num_devices
        for count in s.devices.of(range(1, n + 1)) if s.devices.ranges else [n]:
            ways = divisors(count)
            for tp, pp in product(s.tp.of(ways), s.pp.of(w for w in ways if w <= self.model.num_layers)):
                dp = count // (tp * pp)
                if count % (tp * pp) or not s.dp.of([dp]):
                    continue
                for ep, etp in self._experts(tp, divisors(tp * dp)):
                    yield from self._placed(Plan(tp=tp, pp=pp, dp=dp, ep=ep, etp=etp))

    def _experts(self, tp: int, ways: list[int]) -> list[tuple[int, int]]:
        """Return (ep, etp) as engines have it: etp divides the tensor-parallel ranks, and experts fill those at least.

        vLLM docs, expert parallel deployment; SGLang docs, --ep-size and --moe-dp-size (2026).
        """
        if not self.has_experts:
            return [(1, 1)]
        every = product(self.space.ep.of(ways), self.space.etp.of(w for w in ways if tp % w == 0))
        return [(ep, etp) for ep, etp in every if ep * etp >= tp or tp % ep]

    @cached_property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return any(isinstance(b.feed_forward, MoE) for b in self.model.kinds)

    def _placed(self, plan: Plan) -> Iterator[Plan]:
        """Yield a layout for each order of the axes that places its messages otherwise; replicas send none."""
        seen, axes = set(), ("tp", "pp", "ep", "etp") if self.has_experts else ("tp", "pp")
        for order in self.space.orders:
            one: Plan = replace(plan, order=order)  # type: ignore[arg-type]
            placed = spans(one, self.domains)
            place = tuple(placed[axis][:-1] for axis in axes)
            if place not in seen:
                seen.add(place)
                yield one

    @cached_property
    def setups(self) -> list[tuple[Word, Case]]:
        """Every (engine, weights, kv_cache, compute) that the device can run, those that come to the same once."""
        return [(word, case) for word, case in self._judged.values() if isinstance(case, Case)]

    @cached_property
    def unusable(self) -> list[tuple[Word, Problem]]:
        """Every (engine, weights, kv_cache, compute) that the device cannot run, and why."""
        return [(word, why) for word, why in self._judged.values() if isinstance(why, Problem)]

    @cached_property
    def _judged(self) -> dict[Any, tuple[Word, Case | Problem]]:
        found: dict[Any, tuple[Word, Case | Problem]] = {}
        for word in self.space.setups(self.job):
            engine, weights, kv_cache, compute = word
            job = replace(self.job, batch=1, weights=weights, kv_cache=kv_cache, compute=compute)
            one = Plan(dp=self.cluster.num_devices)
            try:
                question = Question(
                    model=self.model, cluster=self.cluster, plan=one, job=job, engine=engine,
                    efficiencies=self.wish.efficiencies,
                )  # fmt: skip
                case, _ = complete(question)
            except InputError as error:
                others = [p for p in error.problems if p.field not in ("compute", "dtype")]
                if others:
                    raise InputError(others) from None
                found[word] = word, error.problems[0]
                continue
            key = case.engine, case.format, case.dtype, case.compute, case.cache_element_bytes
            found.setdefault(key, (word, case))
        return found

    @cached_property
    def sizes(self) -> Sizes[Any]:
        """The numbers of every legal layout, as columns."""
        plans = self.layouts.legal
        return sizes_of_columns(self.model, plans, [1] * len(plans), self.domains)

    @cached_property
    def devices(self) -> Any:
        """Devices of every legal layout."""
        return np.array([plan.num_devices for plan in self.layouts.legal], np.int64)


def counted_tokens(job: Serving) -> int:
    """Return the tokens of a request that rates and costs count: those generated, or the input where none are."""
    return job.output_tokens or job.input_tokens


def _taken(value: Any, rows: Any) -> Any:
    """Return some rows of every column in a tree of records, tuples and dicts."""
    if isinstance(value, np.ndarray):
        return value[rows]
    if isinstance(value, tuple):
        return tuple(_taken(item, rows) for item in value)
    if isinstance(value, dict):
        return {key: _taken(item, rows) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _taken(getattr(value, f.name), rows) for f in fields(value)})
    return value


def _evaluated(rows: ServingRows, setup: int, layout: Any, batch: Any) -> Table:
    """Return the table of some layouts, each with its batch, under one setup."""
    case = rows.setups[setup][1]
    z = replace(_taken(rows.sizes, layout), batch=batch.astype(np.float64))
    e = evaluate(case, z)
    devices = rows.devices[layout]
    size = np.shape(batch)
    held: Any = [np.broadcast_to(m.kv_cache - m.cache_budget, size) for m in e.memory]
    request = np.broadcast_to(e.request_seconds, size)
    rate = batch * z.dp * counted_tokens(case.job) / request
    price = rows.cluster.usd_per_device_hour
    hourly = np.nan if price is None else price
    return Table(
        setup=np.full(size, setup),
        layout=layout,
        batch=batch,
        devices=devices,
        ttft_seconds=np.broadcast_to(e.prefill.seconds, size),
        tpot_seconds=np.broadcast_to(e.decode.seconds, size),
        request_seconds=request,
        tokens_per_second=rate,
        usd=hourly * devices / 3600 / rate * 1e6,
        short_by_bytes=np.max(held, axis=0),
    )


def table_of(rows: ServingRows, setup: int) -> Iterator[Table]:
    """Yield the plans of one setup in parts of bounded size: every layout with every batch, then the largest ones."""
    layouts, batches = len(rows.layouts.legal), np.array(rows.space.batches, np.int64)
    if not layouts:
        return
    grid = np.arange(layouts * len(batches))
    for start in range(0, len(grid), CELLS):
        cells = grid[start : start + CELLS]
        yield _evaluated(rows, setup, cells // len(batches), batches[cells % len(batches)])
    for low, high in rows.space.open_batches:
        layout, batch = _largest(rows, setup, (low, high))
        new = ~np.isin(batch, batches)
        if new.any():
            yield _evaluated(rows, setup, layout[new], batch[new])


def _largest(rows: ServingRows, setup: int, between: tuple[int, int]) -> tuple[Any, Any]:
    """Return layouts and for each the largest batch of a range that will do, where the least does, by bisection."""
    every = np.arange(len(rows.layouts.legal))

    def will_do(layout: Any, batch: Any) -> Any:
        parts = [slice(at, at + CELLS) for at in range(0, len(layout), CELLS)]
        return np.concatenate([harmless(_evaluated(rows, setup, layout[p], batch[p]), rows.wish) for p in parts])

    return bisected(every, between, will_do)


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


def harmless(table: Table, wish: ServingWish) -> Any:
    """Return which plans fit and keep the limits that a larger batch makes harder."""
    found = table.fits
    for limit in LIMITS:
        if limit.grows and getattr(wish, limit.field):
            found = found & (limit.ratio(table, wish) <= 1)
    return found
