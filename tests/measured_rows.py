"""Files of measurements that tests write, and the rows that validation makes of them."""

from __future__ import annotations

import csv
from pathlib import Path

from shardwise.validation import Row, validate


def write(folder: Path, rows: list[dict[str, str]], name: str = "runs.csv") -> str:
    """Write rows as a CSV file and return its path."""
    path = folder / name
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def only(folder: Path, row: dict[str, str]) -> Row:
    """Return the one row of a file with its prediction."""
    (found,) = validate([write(folder, [row])]).rows
    return found
