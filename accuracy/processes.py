"""Published tables predicted by several processes, and the rows of each as one process would give them.

Rows of one configuration share predictions and stand one after the other in tables: a table is cut between them, into
pieces that are many times as short as what all processes have to do, since rows of simulated load take a thousand times
as long as others.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from accuracy.published import KINDS, Published, measured
from shardwise.measured import Comparison, MeasurementFile, Validation, compared, read_table

PIECE_ROWS = 50
"""Rows of a piece, and as many more as its last configuration has."""


def cores() -> int:
    """Return how many processes this machine runs at once."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Some rows of a table that follow one another: the table's path and kind, and the line of the first."""

    path: str
    kind: str
    rows: tuple[dict[str, str], ...]
    line: int


def pieces_of(table: MeasurementFile) -> Iterator[TablePiece]:
    """Yield a table in pieces that cut no configuration in two.

    >>> rows = tuple({"case_id": case} for case in ["a"] * 49 + ["b"] * 3 + ["c"])
    >>> [len(piece.rows) for piece in pieces_of(MeasurementFile("runs.csv", KINDS[0], rows))]
    [52, 1]
    """
    first, cases = 0, [row.get("case_id", "") for row in table.rows]
    for end in range(1, len(cases) + 1):
        inside = end < len(cases) and cases[end] and cases[end] == cases[end - 1]
        if end == len(cases) or (end - first >= PIECE_ROWS and not inside):
            yield TablePiece(table.path, table.kind.name, table.rows[first:end], first + 2)
            first = end


@cache
def _context(folder: Path) -> Published:
    return Published(folder)


def _compared(piece: TablePiece) -> list[Comparison]:
    kind = next(kind for kind in KINDS if kind.name == piece.kind)
    table = MeasurementFile(piece.path, kind, piece.rows)
    return [*compared(table, _context(Path(piece.path).parent), piece.line)]


def measured_by(files: Iterable[str], processes: int) -> dict[str, Validation]:
    """Return the rows of each published table with their predictions, as `measured` gives them, of so many processes.

    A file that is named twice is predicted once. Raises `InputError` for one that cannot be read.
    """
    cut = {file: [*pieces_of(read_table(file, KINDS))] for file in dict.fromkeys(files)}
    many = min(processes, sum(map(len, cut.values())))
    if many <= 1:
        return {file: measured([file]) for file in cut}
    # Forked processes share what is loaded. Elsewhere than on Linux, libraries do not survive a fork.
    started = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with ProcessPoolExecutor(many, started) as pool:
        answers = pool.map(_compared, chain.from_iterable(cut.values()))
        rows = {file: tuple(row for _ in pieces for row in next(answers)) for file, pieces in cut.items()}
    return {file: Validation(of, (file,)) for file, of in rows.items()}


def joined(found: Mapping[str, Validation], files: Iterable[str]) -> Validation:
    """Return the rows of some of the tables as of one."""
    paths = tuple(files)
    return Validation(tuple(chain.from_iterable(found[path].rows for path in paths)), paths)
