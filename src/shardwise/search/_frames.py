"""Every legal plan of a space as a frame, from the columns that the searches evaluate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.cost import tie_factor
from shardwise.errors import InputError, Problem
from shardwise.frames import Frame
from shardwise.plans import DEGREES
from shardwise.search._batch import AHEAD, FIELDS
from shardwise.search._columns import distinct_rows, tied
from shardwise.search._evaluator import Evaluator
from shardwise.search._grid import PlanGrid
from shardwise.search._options import OBJECTIVES, SERVING_OBJECTIVES, SearchOptions
from shardwise.search._serving_space import WORDS as SETUP_WORDS
from shardwise.training import TrainingCase

if TYPE_CHECKING:
    from shardwise.search._serving_grid import ServingGrid
    from shardwise.search._serving_table import ServingTable

MOST_ROWS = 5_000_000
# The numbers of a key in their order (`plan_of` of _batch.py).


def training_frame(grids: Sequence[PlanGrid], options: SearchOptions) -> Frame:
    """Return every legal plan of the grids of a search, with what tells these apart where there are several."""
    columns, left = list[dict[str, Any]](), MOST_ROWS
    for grid in grids:
        columns.append(_grid_columns(grid, options, left))
        left -= len(columns[-1]["devices"])
    sizes = [len(some["devices"]) for some in columns]
    if len(columns) == 1:
        return Frame({**columns[0], "group": _groups(columns[0], grids, sizes, options)})
    columns_of = {name: [value for some in columns for value in some[name]] for name in columns[0]}
    shared = [_shared(grid.case) for grid in grids]
    apart = {name: [s[name] for s, size in zip(shared, sizes, strict=True) for _ in range(size)] for name in shared[0]}
    arrays = {name: np.array(v) if isinstance(columns[0][name], np.ndarray) else v for name, v in columns_of.items()}
    return Frame({**apart, **arrays, "group": _groups(arrays, grids, sizes, options)})


def _groups(columns: dict[str, Any], grids: Sequence[PlanGrid], sizes: Sequence[int], options: SearchOptions) -> Any:
    """Return the group of ties of every plan, as pages have them in rows."""
    choice, weight = (
        np.repeat([getattr(grid.variant, name) for grid in grids], sizes) for name in ("choice", "weight")
    )
    seconds, device_bytes, devices = columns["step_seconds"] * weight, columns["device_bytes"], columns["devices"]
    sets = [choice, devices, *(columns[name] for name in DEGREES if name != "vpp")]
    values = OBJECTIVES[options.objective](seconds, device_bytes, devices)
    return groups_of(sets, values, columns["fits_at_risk"], tie_factor(options.headline))


def _shared(case: TrainingCase) -> dict[str, Any]:
    """Return what all plans of a grid share and those of another may not."""
    words = {name: "+".join(getattr(case.plan, name)) for name in ("offload", "modules")}
    shift = case.stack.partition.partition(" ")[2] or "usual"
    job, precision = case.job, case.recipe.precision.name
    chosen = {"device": case.cluster.device.name, "precision": precision, "optimizer": job.optimizer}
    numbers = {"shard": case.plan.shard, "stage_layers": shift, "recompute_layers": case.plan.recompute_layers}
    return {**chosen, "global_batch": job.global_batch, **words, **numbers}


def _grid_columns(grid: PlanGrid, options: SearchOptions, most: int) -> dict[str, Any]:
    """Return the columns of every legal plan of a grid, at most so many."""
    # Without a limit of bytes every legal plan "fits".
    evaluator = Evaluator(grid, math.inf, prune=False)
    keys, numbers, count = [], [], 0
    for start, end in grid.chunks(options.rows):
        for batch in evaluator.batches(start, end):
            legal = np.flatnonzero(batch.fits)
            keys.append(batch.key.table(legal)[:, AHEAD:])
            # Copies: the next batch is computed in the same memory.
            columns = batch.step_seconds, batch.device_bytes, batch.required_bytes, batch.host_short_bytes
            numbers.append([column.reshape(-1)[legal] for column in columns])
            count += len(legal)
            if count > most:
                rule = f"has more than {MOST_ROWS:,} legal plans"
                raise InputError([Problem("space", None, rule, "name fewer values, such as tp 1..8")])
    table = np.concatenate(keys) if keys else np.zeros((0, len(FIELDS)), np.int64)
    numbers_of = [np.concatenate(some) for some in zip(*numbers, strict=True)] or [np.zeros(0)] * 4
    return {**_plan_columns(grid.space, table), **_answers(grid.case, options.risk, table[:, 0], numbers_of)}


def _plan_columns(space: Any, table: Any) -> dict[str, Any]:
    """Return the fields of plans from the numbers of their keys."""
    own = dict(zip(FIELDS, table.T, strict=True))
    columns = {name: own[name] for name in ("devices", *DEGREES, "micro_batch", "panels")}
    columns["sequence_parallel"] = own["sequence_parallel"].astype(bool)
    words = {name: known for name, known in space.words.items() if name != "order"}
    return columns | {name: np.array(known)[own[name]].tolist() for name, known in words.items()}


def _answers(case: TrainingCase, risk: float, devices: Any, parts: Sequence[Any]) -> dict[str, Any]:
    """Return seconds, bytes, rates and dollars of plans."""
    step, device, required, short = parts
    rate = case.job.tokens_per_step / step / devices
    limit, band, usable_bytes = case.cluster.device.usable_memory_bytes, case.memory_band, short == 0
    columns = {
        "step_seconds": step,
        "device_bytes": device,
        "host_short_bytes": short,
        "tokens_per_second_per_gpu": rate,
        "fits": usable_bytes & (device <= limit),
        "fits_at_risk": usable_bytes & (required * max(1.0, band.at(risk)) <= limit),
    }
    price = case.cluster.usd_per_device_hour
    if price is not None and case.job.run_tokens:
        columns["usd"] = price / 3600 * case.job.run_tokens / rate
    return columns


def groups_of(sets: Sequence[Any], values: Any, feasible: Any, tie: float) -> Any:
    """Return the group of ties of every row, from 1: of its set of degrees, by the best feasible row; 0 without one.

    >>> degrees, seconds = np.array([1, 1, 2, 3, 4]), np.array([1.0, 5.0, 1.1, 1.3, 0.5])
    >>> groups_of([degrees], seconds, np.array([True, True, True, True, False]), 1.2).tolist()
    [1, 1, 1, 2, 0]
    """
    if not len(values):
        return np.zeros(0, np.int64)
    first, which = distinct_rows(sets)
    best = np.full(len(first), np.inf)
    np.minimum.at(best, which, np.where(feasible, values, np.inf))
    known = np.sort(best[np.isfinite(best)])
    starts = known[[start for start, _ in tied(known, tie)]]
    return np.where(np.isfinite(best), np.searchsorted(starts, best, side="right"), 0)[which]


def serving_frame(grid: ServingGrid, table: ServingTable | None) -> Frame:
    """Return every legal deployment of a search."""
    if table is None:
        return Frame({})
    degrees = {name: grid.layouts.columns[name][grid.layouts.legal][table.layout] for name in grid.own_degrees}
    names = ("batch", "devices", "ttft_seconds", "tpot_seconds", "request_seconds", "request_ttft_seconds",
             "request_tpot_seconds", "tokens_per_second")  # fmt: skip
    words = list(zip(*(word for word, _ in grid.setups), strict=True))
    setup_words = {
        name: [str(column[setup] or "") for setup in table.setup.tolist()]
        for name, column in zip(SETUP_WORDS, words, strict=True)
    }
    numbers = {
        name: getattr(table, name)
        for name in (*names, "tokens_per_second_per_gpu", "short_by_bytes", "fits", "fits_at_risk")
    }
    price = {} if grid.cluster.usd_per_device_hour is None else {"usd": table.usd}
    sets = [table.setup, *(degrees[name] for name in grid.own_degrees)]
    values = SERVING_OBJECTIVES[grid.options.objective](table)
    groups = groups_of(sets, values, table.fits_at_risk, tie_factor(grid.options.serving_headline))
    return Frame({**degrees, **setup_words, **numbers, **price, "group": groups})
