"""Print how predictions of the frozen cases moved, or freeze them anew: `python -m accuracy frozen --update`.

Of the shipped measurements one a source, metric and kind of model, of those that no constant rests on one a source and
metric; a commit that moves one shows it. They stand for the whole tables, which take minutes to predict.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from accuracy import unseen
from accuracy.files import RESULTS, shipped
from accuracy.published import KINDS, Published, released
from shardwise.measured import Comparison, compared, read_table

FROZEN = RESULTS / "frozen_cases.json"
TOLERANCE = 1e-9


def cases() -> dict[str, dict[str, Any]]:
    """Return the present predictions of the cases by their names."""
    chosen: dict[tuple[str, ...], Comparison] = {}
    for row in released().predicted:
        if row.kind in ("training", "inference"):
            chosen.setdefault((row.source, row.metric, row.family), row)
    every = (*chosen.values(), *_first_of_each(unseen.FILES))
    return {name_of(row.case_id, row.metric): figures(row) for row in every}


def _first_of_each(files: Iterable[Path]) -> Iterator[Comparison]:
    """Yield of each source and metric of some files the first row that is predicted; others are not predicted."""
    chosen = set[tuple[str, str]]()
    for path in files:
        table, context = read_table(str(path), KINDS), Published(path.parent)
        for raw in table.rows:
            key = raw.get("source", ""), raw.get("metric", "")
            for row in () if key in chosen else compared(replace(table, rows=(raw,)), context):
                if row.status == "predicted":
                    chosen.add(key)
                    yield row


def again(names: frozenset[str]) -> dict[str, dict[str, Any]]:
    """Return the present predictions of the cases of these names alone, without those of any other row."""
    found: dict[str, dict[str, Any]] = {}
    for path in (*shipped(), *map(str, unseen.FILES)):
        table = read_table(path, KINDS)
        own = tuple(row for row in table.rows if name_of(row.get("case_id", ""), row.get("metric", "")) in names)
        for row in compared(replace(table, rows=own), Published(Path(path).parent)):
            if row.status == "predicted":
                found.setdefault(name_of(row.case_id, row.metric), figures(row))
    return found


def name_of(case: str, metric: str) -> str:
    """Return the name of a case, by which it is frozen."""
    return f"{case} {metric}"


def figures(row: Comparison) -> dict[str, Any]:
    """Return what is frozen of a prediction."""
    said = {"model": row.model, "device": row.device}
    return {**said, "predicted": row.predicted, "low": row.low, "high": row.high}


def moved(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each figure that moved, appeared or went away."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new or name not in old:
            yield f"{name}: {'new' if name in new else 'gone'}"
            continue
        for key in ("predicted", "low", "high"):
            before, after = old[name][key], new[name][key]
            if None in (before, after):
                if before != after:
                    yield f"{name}: {key} {before} -> {after}"
            elif abs(after - before) > TOLERANCE * abs(before):
                yield f"{name}: {key} {before:.6g} -> {after:.6g} ({after / before - 1:+.2%})"


def stored() -> dict[str, Any]:
    """Return the frozen predictions."""
    if not FROZEN.exists():
        return {}
    found: dict[str, Any] = json.loads(FROZEN.read_text(encoding="ascii"))
    return found
