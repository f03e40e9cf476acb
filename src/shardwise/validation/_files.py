"""Reading files of measurements: what kind a file is, by its columns, and its rows."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from shardwise.errors import InputError, Problem

# Columns that tell a kind of file; the first kind whose columns are all there counts.
KINDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "inference": frozenset(("metric", "value", "model", "device", "serving_mode")),
        "training": frozenset(("metric", "value", "model", "device", "seq_len")),
        "op_efficiency": frozenset(("op", "device", "dtype", "stage", "achieved_fraction")),
        "attention": frozenset(("device", "query_tokens", "prefix_tokens", "num_kv_heads", "time_seconds")),
        "mla": frozenset(("device", "op", "query_tokens", "prefix_tokens", "time_seconds")),
        "moe": frozenset(("device", "num_tokens", "num_experts", "top_k", "time_seconds")),
        "gemm": frozenset(("device", "m", "n", "k", "time_seconds")),
        "memory": frozenset(("device", "op", "bytes_total", "time_seconds")),
        "collective": frozenset(("device", "op", "num_gpus", "message_bytes", "time_seconds")),
        "collectives": frozenset(("system", "collective", "num_nodes", "message_bytes", "time_seconds")),
    }
)


@dataclass(frozen=True, slots=True)
class Table:
    """A file: its path, the kind of measurements it holds, and its rows as text."""

    path: str
    kind: str
    rows: tuple[dict[str, str], ...]


def read_table(path: str) -> Table:
    """Return the rows of a CSV file and their kind.

    Raises `InputError` where the file cannot be read, is of no known kind or has no rows.
    """
    try:
        with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
            lines = (line.replace("\0", "") for line in file)
            reader = csv.DictReader(lines, restkey="", restval="")
            columns = set(reader.fieldnames or ())
            rows = tuple({str(k): v for k, v in row.items() if isinstance(v, str)} for row in reader)
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError([Problem("file", path, f"cannot be read ({reason})", "give a CSV file")]) from None
    kind = kind_of(columns, path)
    if not rows:
        rule = f"has the columns of {kind} files and no row below them"
        raise InputError([Problem("file", path, rule, "add a row for each measurement")])
    return Table(path, kind, rows)


def kind_of(columns: set[str], path: str = "") -> str:
    """Return the kind of a file by its columns; raises `InputError` naming the columns that the nearest kind wants.

    >>> kind_of({"device", "m", "n", "k", "dtype", "time_seconds"})
    'gemm'
    """
    for kind, wanted in KINDS.items():
        if wanted <= columns:
            return kind
    near = min(KINDS, key=lambda kind: (len(KINDS[kind] - columns), len(KINDS[kind])))
    lacks = ", ".join(sorted(KINDS[near] - columns))
    rule = f"is not a file of measurements: {near} files also have the columns {lacks}"
    raise InputError([Problem("file", path, rule, "see docs/accuracy.md for the columns")])
