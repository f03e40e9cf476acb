"""Tables of measured kernels as columns, and how they are split into rows to fit and rows to check."""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from accuracy.kernels.tables import ENGINES, measured_on_table

Table: TypeAlias = dict[str, Any]
# Fewer rows than this do not fit a kernel.
LEAST = 20
# Where a table states whole ticks, kernels within one are all as good: what is left of the pull to the middle of them.
INSIDE = 0.1
FAMILIES: dict[str, tuple[str, ...]] = {
    "ampere": ("a100-sxm-80gb",),
    "hopper": ("h100-sxm-80gb", "h200-sxm-141gb"),
    "blackwell": ("b200-sxm-180gb", "gb200", "b300", "gb300"),
    "ada": ("l40s",),
    "blackwell-gddr": ("rtx-pro-6000-server",),
}


def _column(texts: list[str]) -> Any:
    try:
        return np.array([float(t) if t else np.nan for t in texts])
    except ValueError:
        return np.array(texts)


def read_files(paths: list[Path]) -> Table:
    """Return the rows of some CSV files by column, columns of numbers as numbers."""
    rows = [row for path in paths for row in csv.DictReader(path.read_text(encoding="utf-8").splitlines())]
    return {name: _column([row[name] for row in rows]) for name in rows[0]} if rows else {}


def read(folder: Path, kind: str) -> Table:
    """Return the rows of every file kernels_KIND_*.csv of a folder by column, those of one measurement once."""
    table = read_files(sorted(folder.glob(f"kernels_{kind}_*.csv")))
    if "engine" not in table:
        return table
    cases = zip(table["engine"], table["device"], strict=True)
    return where(table, np.array([not measured_on_table(kind.partition("_")[0], *case) for case in cases], bool))


def pick(table: Table, **wanted: str | float) -> Table:
    """Return the rows whose columns hold the wanted values."""
    mask = np.ones(len(table["time_seconds"]), bool)
    for name, value in wanted.items():
        mask &= table[name] == value
    return where(table, mask)


def where(table: Table, mask: Any) -> Table:
    """Return the rows of a mask."""
    return {name: column[mask] for name, column in table.items()}


def size(table: Table) -> int:
    """Return how many rows there are."""
    return len(table["time_seconds"]) if table else 0


def groups(table: Table, labels: Any) -> Iterator[tuple[str, str, str, dict[str, Table]]]:
    """Yield (family, engine, label, rows by device) of a table, for devices that have enough rows."""
    table = table | {"label": labels}
    for family, devices in FAMILIES.items():
        for engine in ENGINES:
            own = pick(table, engine=engine)
            for label in sorted(set(own["label"][np.isin(own["device"], devices)])):
                parts = {d: pick(own, label=label, device=d) for d in devices}
                if kept := {d: rows for d, rows in parts.items() if size(rows) >= LEAST}:
                    yield family, engine, str(label), kept


def folds(table: Table, *names: str) -> Any:
    """Return the fold of every row, of four: rows of one shape, the values of the named columns, are in the same."""
    texts = zip(*(table[name] for name in names), strict=True)
    return np.array([zlib.crc32(repr([float(x) for x in shape]).encode()) % 4 for shape in texts])


def held(table: Table, *names: str) -> Any:
    """Return a mask of about a quarter of the shapes, whole."""
    return folds(table, *names) == 0


def errors(predicted: Any, table: Table) -> Any:
    """Return predicted over measured seconds, less one."""
    return predicted / table["time_seconds"] - 1


def summary(found: Any) -> str:
    """Return the median and the 90th percentile of absolute errors, in words."""
    if not len(found):
        return "no rows"
    low, high = np.quantile(np.abs(found), (0.5, 0.9))
    return f"median {100 * low:.1f} %, p90 {100 * high:.0f} %, {len(found)} rows"


def share(row: Mapping[str, Any], name: str) -> float:
    """Return the factor of a device or an engine in a row of constants, one where it has none."""
    return float(row.get(name, 1.0))
