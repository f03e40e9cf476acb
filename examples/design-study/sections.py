"""The questions of the study: which searches each takes, and what is read from the answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from cases import (
    COUNTS,
    DOMAINS,
    GENERATIONS,
    JOBS,
    LAYOUTS,
    NETWORK,
    PUBLISHED,
    STACK,
    SYSTEMS,
    TITLES,
    WIDER,
    Published,
    cluster_of,
    model_of,
)
from searches import Answer, Ask, Best, days

import shardwise as sw
from shardwise.search import IntRanges, upto

MAP_COUNT, MAP_DOMAIN = 8192, 8
# Each model on the maps with the layout that serves it best in fast domains of 8.
MAP_LAYOUT = {"gpt3-1t": "1d", "vit-era5": "cp"}
UNBOUND = (("memory_bytes", 10**15), ("usable_memory_bytes", 10**15))


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is asked: the whole study, or a part of it."""

    systems: tuple[str, ...] = tuple(SYSTEMS)
    domains: tuple[int, ...] = DOMAINS
    counts: tuple[int, ...] = COUNTS
    capacities: int = 32
    bandwidths: int = 28
    generations: tuple[str, ...] = tuple(GENERATIONS)
    steps: tuple[int, int] = (3, 7)  # columns and rows of the second map between two generations
    whole: bool = True


QUICK = Size(
    systems=("B200",), domains=(8, 64), counts=(512, 4096, 16384), capacities=8, bandwidths=3,
    generations=("A100", "B200"), steps=(1, 1), whole=False,
)  # fmt: skip


def linspace(low: float, high: float, count: int) -> list[float]:
    """Return so many values from the one to the other, both included."""
    return [low + (high - low) * i / (count - 1) for i in range(count)]


def ratios(low: float, high: float, count: int) -> list[float]:
    """Return so many values in equal ratios from the one to the other, both included."""
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def scaling_asks(size: Size) -> list[Ask]:
    """Return the searches of strong scaling: every count at once, for each system, domain and layout."""
    return [
        Ask(model=model, system=system, domain=domain, layout=layout, counts=size.counts, detail=True)
        for model in JOBS
        for system in size.systems
        for domain in size.domains
        for layout in LAYOUTS
    ]


@dataclass(frozen=True)
class Scaling:
    """Strong scaling: answers by model, system, domain and layout."""

    found: dict[tuple[str, str, int, str], Answer]

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Scaling:
        """Return the answers by what was asked."""
        return cls({(a.ask.model, a.ask.system, a.ask.domain, a.ask.layout): a for a in answers})

    def one(self, model: str, system: str, domain: int, layout: str, count: int) -> Best | None:
        """Return the best plan of a layout, None where nothing fits."""
        return self.found[model, system, domain, layout].best.get(count)

    def any(self, model: str, system: str, domain: int, count: int) -> tuple[str, Best] | None:
        """Return the best plan of all layouts and its layout, None where nothing fits."""
        plans = [(name, best) for name in LAYOUTS if (best := self.one(model, system, domain, name, count))]
        return min(plans, key=lambda found: found[1].seconds, default=None)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A row of plans in which one degree stands and others trade: what stands, the plans' names, and their searches."""

    model: str
    layout: str
    stands: str
    names: tuple[str, ...]
    asks: tuple[Ask, ...]
    found: tuple[Best, ...] = field(default=())

    def minima(self) -> list[int]:
        """Return the places whose neighbours are both slower: more than one, and the row is not convex."""
        return minima([best.seconds for best in self.found])


def _sweep(model: str, layout: str, stands: str, rows: Sequence[dict[str, int]], micro_batch: int) -> Sweep:
    """Return a row; micro-batch 0 leaves it open, and memory is not asked, so that no plan is missing."""
    asks, names = [], []
    for row in rows:
        fixed: list[tuple[str, Any]] = [(name, IntRanges(((n, n),))) for name, n in row.items()]
        fixed += [("micro_batch", IntRanges(((micro_batch, micro_batch),)))] if micro_batch else []
        asks.append(Ask(model=model, system="B200", domain=8, layout=layout, space=tuple(fixed), rates=UNBOUND,
                        detail=True))  # fmt: skip
        names.append("\n".join(f"{name} {n}" for name, n in row.items()))
    stands += f", micro-batch {micro_batch}" if micro_batch else ", best micro-batch"
    return Sweep(model=model, layout=layout, stands=stands, names=tuple(names), asks=tuple(asks))


def sweeps(full: bool) -> list[Sweep]:
    """Return the rows at 16,384 B200 in domains of 8."""
    gpt, vit = "gpt3-1t", "vit-era5"
    by_pp = [{"pp": 2**i, "dp": 2048 >> i} for i in range(8)]
    by_tp = [{"tp": 2**i, "dp": 256 >> i} for i in range(6)]
    stages = [{"tp": 4 << i, "pp": 128 >> i} for i in range(4)]
    found = [
        _sweep(gpt, "1d", "tp = 8", [{"tp": 8, **row} for row in by_pp], 1),
        _sweep(gpt, "1d", "pp = 64", [{"pp": 64, **row} for row in by_tp], 1),
    ]
    if not full:
        return found
    grid = [{"tp": 32 >> i, "tp2": 1 << i} for i in range(6)]
    by_context = [{"tp": 16 >> i, "cp": 1 << i} for i in range(5)]
    return [
        *found,
        _sweep(gpt, "1d", "dp = 32", [{"dp": 32, **row} for row in stages], 1),
        _sweep(gpt, "summa", "pp = 1", [{"pp": 1, **row} for row in grid], 8),
        _sweep(vit, "cp", "pp = 2", [{"pp": 2, **row} for row in by_context], 1),
        _sweep(vit, "cp", "pp = 16", [{"pp": 16, **row} for row in by_context], 1),
    ]


@dataclass(frozen=True, kw_only=True)
class Landscape:
    """Step times over two degrees, data parallelism taking the rest of the devices; None where no plan is legal."""

    model: str
    layout: str
    stands: tuple[tuple[str, int], ...]
    across: tuple[str, tuple[int, ...]]
    up: tuple[str, tuple[int, ...]]
    found: tuple[tuple[Best | None, ...], ...] = ()

    def asks(self) -> list[Ask]:
        """Return one search for each cell, row by row; memory is not asked."""
        asks = []
        for y in self.up[1]:
            for x in self.across[1]:
                degrees = (*self.stands, (self.up[0], y), (self.across[0], x))
                fixed = tuple((name, IntRanges(((n, n),))) for name, n in degrees)
                asks.append(
                    Ask(model=self.model, system="B200", domain=8, layout=self.layout, rates=UNBOUND, space=fixed)
                )
        return asks

    def filled(self, answers: Sequence[Answer]) -> Landscape:
        """Return the landscape with its plans."""
        width = len(self.across[1])
        cells = [a.best.get(NETWORK) for a in answers]
        return replace(self, found=tuple(tuple(cells[i : i + width]) for i in range(0, len(cells), width)))

    def seconds(self, limit_bytes: float) -> list[list[float | None]]:
        """Return the seconds of the plans that take no more bytes."""
        return [[b.seconds if b and b.held_bytes <= limit_bytes else None for b in row] for row in self.found]

    def rows(self, limit_bytes: float) -> list[tuple[str, list[float]]]:
        """Return every row in which one degree stands, by name: the cells of three plans or more that fit."""
        cells = self.seconds(limit_bytes)
        found = [(f"{self.up[0]} {n}", row) for n, row in zip(self.up[1], cells, strict=True)]
        columns = zip(*cells, strict=True)
        found += [(f"{self.across[0]} {n}", list(c)) for n, c in zip(self.across[1], columns, strict=True)]
        width, height = len(self.across[1]), len(cells)
        for total in range(width + height - 1):
            line = [cells[y][total - y] for y in range(height) if 0 <= total - y < width]
            found.append((f"dp of diagonal {total}", line))
        kept = [(name, [t for t in row if t is not None]) for name, row in found]
        return [(name, row) for name, row in kept if len(row) > 2]

    def bent(self, limit_bytes: float) -> tuple[int, int]:
        """Return how many rows have more than one local minimum, and how many there are."""
        rows = self.rows(limit_bytes)
        return sum(len(minima(row)) > 1 for _, row in rows), len(rows)


def minima(times: Sequence[float]) -> list[int]:
    """Return the places whose neighbours are both slower, by more than rounding."""
    padded = [float("inf"), *times, float("inf")]
    return [
        i for i in range(len(times)) if padded[i] > padded[i + 1] * 1.0001 and padded[i + 2] > padded[i + 1] * 1.0001
    ]


def landscapes(full: bool) -> list[Landscape]:
    """Return the landscapes at 16,384 B200 in domains of 8."""
    powers = tuple(2**i for i in range(8))
    if not full:
        return []
    return [
        Landscape(
            model="gpt3-1t", layout="1d", stands=(("micro_batch", 1),), across=("pp", powers), up=("tp", powers[:6])
        ),
        Landscape(
            model="vit-era5",
            layout="cp",
            stands=(("micro_batch", 1), ("pp", 1)),
            across=("cp", powers[:5]),
            up=("tp", powers[:6]),
        ),
    ]


def capacity_asks(size: Size) -> list[Ask]:
    """Return one search for each bandwidth: its front answers every capacity."""
    most = (("memory_bytes", 10**12), ("usable_memory_bytes", 10**12))
    return [
        Ask(model=model, system="B200", domain=MAP_DOMAIN, layout=MAP_LAYOUT[model], counts=(MAP_COUNT,),
            rates=(("memory_bytes_per_second", rate), *most))
        for model in JOBS
        for rate in ratios(500e9, 16000e9, size.bandwidths)
    ]  # fmt: skip


def through(size: Size, fact: int, steps: int) -> list[float]:
    """Return a fact of the generations in so many equal steps from each to the next."""
    rows = [GENERATIONS[name][fact] for name in size.generations]
    found = [rows[0]]
    for a, b in pairwise(rows):
        found += [a + (b - a) * i / steps for i in range(1, steps + 1)]
    return found


def generation_asks(size: Size) -> list[Ask]:
    """Return the searches of the second map: memory of a generation with the FLOP rates of another."""
    columns, rows = size.steps
    capacity, bandwidth = [int(c) for c in through(size, 0, columns)], through(size, 1, columns)
    matrix, vector = through(size, 2, rows), through(size, 3, rows)
    return [
        Ask(model=model, system="B200", domain=MAP_DOMAIN, layout=MAP_LAYOUT[model], counts=(MAP_COUNT,),
            rates=(("memory_bytes", c), ("usable_memory_bytes", c), ("memory_bytes_per_second", b),
                   ("matrix_flops.bf16", m), ("vector_flops", v)))
        for model in JOBS
        for c, b in zip(capacity, bandwidth, strict=True)
        for m, v in zip(matrix, vector, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True)
class Field:
    """A map of days: values by row (y) and column (x), None where nothing fits."""

    title: str
    xs: Sequence[float]
    ys: Sequence[float]
    values: Sequence[Sequence[float | None]]


def _days_or_none(model: str, seconds: float | None) -> float | None:
    return None if seconds is None else days(model, seconds)


def capacity_fields(size: Size, found: Sequence[Answer]) -> list[Field]:
    """Return the first map of each model: days over capacity (GB) and bandwidth (TB/s), from one front a row."""
    capacities = linspace(80e9, 1000e9, size.capacities)
    fields = []
    for model, title in TITLES.items():
        rows = [a for a in found if a.ask.model == model]
        values = [[_days_or_none(model, a.within(c, MAP_COUNT)) for c in capacities] for a in rows]
        bandwidths = [dict(a.ask.rates)["memory_bytes_per_second"] / 1e12 for a in rows]
        fields.append(Field(title, [c / 1e9 for c in capacities], bandwidths, values))
    return fields


def generation_fields(size: Size, found: Sequence[Answer]) -> list[Field]:
    """Return the second map of each model: days over memory (GB) and FLOP rate (TFLOP/s)."""
    columns, rows = size.steps
    xs, ys = [c / 1e9 for c in through(size, 0, columns)], [m / 1e12 for m in through(size, 2, rows)]
    fields = []
    for model, title in TITLES.items():
        mine = [a.best.get(MAP_COUNT) for a in found if a.ask.model == model]
        by_column = [mine[i * len(ys) : (i + 1) * len(ys)] for i in range(len(xs))]
        values = [[_days_or_none(model, b.seconds if b else None) for b in row] for row in zip(*by_column, strict=True)]
        fields.append(Field(title, xs, ys, values))
    return fields


def swept(row: Sweep, found: Sequence[Answer]) -> Sweep:
    """Return a row with its plans."""
    return replace(row, found=tuple(a.best[NETWORK] for a in found))


def judged(plan: Published) -> sw.TrainReport:
    """Return what a published best plan takes here."""
    cluster = cluster_of("B200", plan.domain, NETWORK)
    return sw.train(model_of(plan.model), cluster, plan.plan(), JOBS[plan.model], sw.TrainingOptions(stack=STACK))


def all_judged() -> list[tuple[Published, sw.TrainReport]]:
    """Return every published best plan and what it takes here."""
    return [(plan, judged(plan)) for plan in PUBLISHED]


def wider_asks() -> list[Ask]:
    """Return searches beyond the published space and with the rates of the catalogue."""
    free = tuple(WIDER.items())
    found = []
    for model in JOBS:
        layout = MAP_LAYOUT[model]
        found.append(Ask(model=model, system="B200", domain=8, layout=layout, space=free, detail=True))
        found += [
            Ask(model=model, system="B200 of the catalogue", domain=8, layout=name, space=(("tp", upto(64)),),
                detail=True)
            for name in LAYOUTS
        ]  # fmt: skip
    return found
