"""Reading files of measurements: what kind a file is, by its columns, and its rows."""

from __future__ import annotations

import csv
import difflib
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

from shardwise.errors import InputError, Problem, bounded
from shardwise.files import read_csv_text
from shardwise.measured._comparison import Prediction
from shardwise.measured._context import Context
from shardwise.measured._record import Record
from shardwise.records import dataclass

Predictor: TypeAlias = Callable[[Record, Context], Prediction]
# Columns that any file may have beside those that predictions read.
USUAL = "case_id source citation quality notes spread"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileKind:
    """A kind of file: the columns that tell it, further ones that are read or allowed, and how its rows are predicted.

    `predictor` makes what predicts the rows of one file, `metric` names what a row measured, `measured` is its figure.
    """

    name: str
    columns: frozenset[str]
    further: frozenset[str]
    predictor: Callable[[], Predictor]
    metric: Callable[[Record], str]
    measured: Callable[[Record], float]


MOST_ROWS, MOST_COLUMNS = 100_000, 1000
# Where a row keeps the cells beyond the last column of the header.
BEYOND = "beyond the header"


@dataclass(frozen=True, slots=True)
class Table:
    """A file: its path, the kind of measurements it holds, its rows as text, and columns that its kind does not have.

    An unread column stands with the one that may have been meant, empty where none is like it.
    """

    path: str
    kind: FileKind
    rows: tuple[dict[str, str], ...]
    unread: tuple[tuple[str, str], ...] = ()


def read_table(path: str, kinds: Sequence[FileKind], given: Mapping[str, str] | None = None) -> Table:
    """Return the rows of a CSV file and their kind; names of columns may have capitals and spaces around them.

    What is `given` by its column stands where a row has a blank cell, or the file no such column. Raises `InputError`
    where the file cannot be read, is of no known kind or has no rows.
    """
    try:
        reader = csv.DictReader(io.StringIO(read_csv_text(path), newline=""), restkey=BEYOND, restval="")
        names = [name.strip().lower() for name in reader.fieldnames or ()]
        reader.fieldnames = names
        _check_header(names, path)
        kind = kind_of({*names, *(given or {})}, kinds, path)
        usual = {name: cell for name, cell in (given or {}).items() if name in kind.columns | kind.further}
        with bounded("file", path):
            rows = tuple(_filled(_texts(row), usual) for row in islice(reader, MOST_ROWS + 1))
    except csv.Error as error:
        raise InputError([Problem("file", path, f"cannot be read ({error})", "give a CSV file")]) from None
    if len(rows) > MOST_ROWS:
        raise InputError([Problem("file", path, f"has more than {MOST_ROWS:,} rows", "cut it into several files")])
    if not rows:
        rule = f"has the columns of {kind.name} files and no row below them"
        raise InputError([Problem("file", path, rule, "add a row for each measurement")])
    return Table(path, kind, rows, _unread(names, kind))


def _texts(row: dict[str, str | list[str]]) -> dict[str, str]:
    return {name: cell if isinstance(cell, str) else "".join(cell) for name, cell in row.items()}


def _filled(row: dict[str, str], usual: Mapping[str, str]) -> dict[str, str]:
    return {**row, **{name: cell for name, cell in usual.items() if not row.get(name, "").strip()}}


def _check_header(names: list[str], path: str) -> None:
    """Raise `InputError` for a header whose cells are not separated by commas, or that names a column twice."""
    separator = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), "")
    if separator:
        raise InputError([Problem("file", path, f"separates its cells by {separator!r}", "separate them by commas")])
    if len(names) > MOST_COLUMNS:
        rule = f"has {len(names):,} columns, at most {MOST_COLUMNS:,} are read"
        raise InputError([Problem("file", path, rule, "leave out what is not read")])
    twice = sorted(name for name, times in Counter(names).items() if name and times > 1)
    if twice:
        rule = f"has the column {twice[0]} twice"
        raise InputError([Problem("file", path, rule, "keep the one that is meant")])


def _unread(names: Iterable[str], kind: FileKind) -> tuple[tuple[str, str], ...]:
    """Return the columns that a kind does not have, each with the nearest that it has."""
    known = kind.columns | kind.further
    odd = [name for name in names if name and name not in known]
    return tuple((name, next(iter(difflib.get_close_matches(name, sorted(known), 1)), "")) for name in odd)


def kind_of(columns: set[str], kinds: Sequence[FileKind], path: str = "") -> FileKind:
    """Return the kind of a file by its columns; raises `InputError` naming the columns that the nearest kinds want."""
    for kind in kinds:
        if kind.columns <= columns:
            return kind
    shares = {kind.name: len(kind.columns & columns) / len(kind.columns) for kind in kinds}
    most = max(shares.values())
    near = [f"{k.name} files also have {_listed(k.columns - columns)}" for k in kinds if shares[k.name] == most]
    found = f"its columns are {_listed(columns)}" if columns else "it is empty"
    rule = f"is not a file of measurements: {'; '.join(near[:2]) if most else found}"
    raise InputError([Problem("file", path, rule, "see docs/own-runs.md for the columns")])


def _listed(columns: Iterable[str]) -> str:
    """Return some columns in words, the first eight of them, each as far as it may be read."""
    names = [ascii(name)[1:-1][:40] for name in sorted(columns)]
    return ", ".join(names[:8]) + (" and more" if len(names) > 8 else "")
