"""Every legal plan of a space as a frame, from the columns that the searches evaluate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwise.errors import InputError, Problem
from shardwise.frames import Frame
from shardwise.plans import CONTEXT_KINDS, DEGREES, LAYOUTS
from shardwise.search._batch import AHEAD
from shardwise.search._evaluator import Evaluator
from shardwise.search._grid import PlanGrid
from shardwise.search._options import SearchOptions
from shardwise.training import TrainingCase

if TYPE_CHECKING:
    from shardwise.search._serving_table import ServingGrid, ServingTable

MOST_ROWS = 5_000_000
# The numbers of a key in their order (`plan_of` of _batch.py).
_NUMBERS = (*DEGREES, "micro_batch", "panels")


def training_frame(grids: Sequence[PlanGrid], options: SearchOptions) -> Frame:
    """Return every legal plan of the grids of a search, with what tells these apart where there are several."""
    columns, left = list[dict[str, Any]](), MOST_ROWS
    for grid in grids:
        columns.append(_grid_columns(grid, options, left))
        left -= len(columns[-1]["devices"])
    if len(columns) == 1:
        return Frame(columns[0])
    found = {name: [value for some in columns for value in some[name]] for name in columns[0]}
    sizes = [len(some["devices"]) for some in columns]
    said = [_shared(grid.case) for grid in grids]
    apart = {name: [s[name] for s, size in zip(said, sizes, strict=True) for _ in range(size)] for name in said[0]}
    arrays = {name: np.array(v) if isinstance(columns[0][name], np.ndarray) else v for name, v in found.items()}
    return Frame({**apart, **arrays})


def _shared(case: TrainingCase) -> dict[str, Any]:
    """Return what all plans of a grid share and those of another may not."""
    words = {name: "+".join(getattr(case.plan, name)) for name in ("offload", "modules")}
    job = {name: getattr(case.job, name) for name in ("optimizer", "global_batch")}
    shift = case.stack.partition.partition(" ")[2] or "usual"
    precision = case.recipe.precision.name
    return {"device": case.cluster.device.name, "precision": precision, **job, **words, "shard": case.plan.shard,
            "stage_layers": shift, "recompute_layers": case.plan.recompute_layers}  # fmt: skip


def _grid_columns(grid: PlanGrid, options: SearchOptions, most: int) -> dict[str, Any]:
    """Return the columns of every legal plan of a grid, at most so many."""
    # Without a limit of bytes every legal plan "fits".
    evaluator = Evaluator(grid, math.inf, prune=False)
    keys, seconds, held, count = [], [], [], 0
    for start, end in grid.chunks(options.rows):
        for batch in evaluator.batches(start, end):
            legal = np.flatnonzero(batch.fits)
            keys.append(batch.key.table(legal)[:, AHEAD:])
            # Copies: the next batch is computed in the same memory.
            seconds.append(batch.step_seconds.reshape(-1)[legal])
            held.append(batch.device_bytes.reshape(-1)[legal])
            count += len(legal)
            if count > most:
                rule = f"has more than {MOST_ROWS:,} legal plans"
                raise InputError([Problem("space", None, rule, "name fewer values, such as tp 1..8")])
    table = np.concatenate(keys) if keys else np.zeros((0, 23), np.int64)
    return {**_plan_columns(grid.space, table), **_answers(grid.case, options.risk, table, seconds, held)}


def _plan_columns(space: Any, table: Any) -> dict[str, Any]:
    """Return the fields of plans from the numbers of their keys."""
    words = {
        "layout": (1, LAYOUTS),
        "cp_kind": (13, CONTEXT_KINDS),
        "schedule": (14, space.schedule),
        "sharding": (15, space.sharding),
        "recompute": (16, space.recompute),
    }
    found = {"devices": table[:, 0], **{name: table[:, 2 + i] for i, name in enumerate(_NUMBERS)}}
    found["sequence_parallel"] = table[:, 12].astype(bool)
    return found | {name: np.array(words_)[table[:, at]].tolist() for name, (at, words_) in words.items()}


def _answers(case: TrainingCase, risk: float, table: Any, seconds: list[Any], held: list[Any]) -> dict[str, Any]:
    """Return seconds, bytes, rates and dollars of plans."""
    step, device = (np.concatenate(one) if one else np.zeros(0) for one in (seconds, held))
    rate = case.job.tokens_per_step / step / table[:, 0]
    found = {"step_seconds": step, "device_bytes": device, "tokens_per_second_per_gpu": rate}
    limit, band = case.cluster.device.usable_memory_bytes, case.memory_band
    found |= {"fits": device <= limit, "fits_at_risk": device * max(1.0, band.at(risk)) <= limit}
    price = case.cluster.usd_per_device_hour
    if price is not None and case.job.run_tokens:
        found["usd"] = price / 3600 * case.job.run_tokens / rate
    return found


def serving_frame(grid: ServingGrid, table: ServingTable | None) -> Frame:
    """Return every legal deployment of a search."""
    if table is None:
        return Frame({})
    degrees = {name: grid.layouts.columns[name][grid.layouts.legal][table.layout] for name in grid.own_degrees}
    names = ("batch", "devices", "ttft_seconds", "tpot_seconds", "request_seconds", "request_ttft_seconds",
             "request_tpot_seconds", "tokens_per_second")  # fmt: skip
    words = list(zip(*(word for word, _ in grid.setups), strict=True))
    said = {
        name: [str(column[setup] or "") for setup in table.setup.tolist()]
        for name, column in zip(("engine", "weights", "kv_cache", "compute"), words, strict=True)
    }
    numbers = {
        name: getattr(table, name)
        for name in (*names, "tokens_per_second_per_gpu", "short_by_bytes", "fits", "fits_at_risk")
    }
    price = {} if grid.cluster.usd_per_device_hour is None else {"usd": table.usd}
    return Frame({**degrees, **said, **numbers, **price})
