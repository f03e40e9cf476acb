"""Tables by column: what `sw.frame`, results and `--rows` give, read by polars, pandas and pyarrow without a copy.

A frame exports the Arrow C stream interface (arrow.apache.org/docs/format/CStreamInterface.html, 2024-03) by itself, so
that no library of frames is needed here and any may read it: `polars.DataFrame(frame)`, `pyarrow.table(frame)`,
`pandas.DataFrame.from_arrow(frame)`.
"""

from __future__ import annotations

import csv
import ctypes
import html
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np

from shardwise.errors import InputError, Problem, plain

_SHOWN = 10
_WIDEST = 24


def _lists(values: object) -> bool:
    return isinstance(values, Iterable) and not isinstance(values, (str, bytes))


def _refused(field: str, value: object, rule: str, remedy: str) -> InputError:
    return InputError([Problem(field, plain(value), rule, remedy)])


class Frame:
    """Columns of equal length by name; numbers are numpy arrays, words lists.

    >>> frame = Frame({"tp": [1, 2], "step_seconds": [0.5, None]})
    >>> len(frame), list(frame), frame.rows()[1]
    (2, ['tp', 'step_seconds'], {'tp': 2, 'step_seconds': None})
    """

    def __init__(self, columns: Mapping[str, Iterable[Any]]) -> None:
        if not isinstance(columns, Mapping) or not all(map(_lists, columns.values())):
            raise _refused("columns", columns, "must be values by name", 'write for example {"tp": [1, 2]}')
        self._columns = {name: column_of(values) for name, values in columns.items()}

    @classmethod
    def of_rows(cls, rows: Sequence[Mapping[str, Any]]) -> Frame:
        """Return the frame of records; a key that a record lacks is empty there."""
        if not _lists(rows) or not all(isinstance(row, Mapping) for row in rows):
            raise _refused("rows", rows, "must be records", 'write for example [{"tp": 1}, {"tp": 2}]')
        names = dict.fromkeys(key for row in rows for key in row)
        return cls({name: [row.get(name) for row in rows] for name in names})

    def __getitem__(self, name: str) -> Any:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return max(map(len, self._columns.values()), default=0)

    def rows(self, most: int | None = None) -> list[dict[str, Any]]:
        """Return the first rows as records of plain values, all without a number; NaN is None."""
        pieces = {name: _plain(values[:most]) for name, values in self._columns.items()}
        return [dict(zip(pieces, row, strict=True)) for row in zip(*pieces.values(), strict=True)]

    def __repr__(self) -> str:
        return f"<Frame of {len(self):,} rows: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self)
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>"
            for row in self.rows(_SHOWN)
        )
        rest = len(self) - _SHOWN
        more = f"<p>and {rest:,} rows more</p>" if rest > 0 else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"

    def to_polars(self) -> Any:
        """Return the frame as `polars.DataFrame`."""
        return import_module("polars").DataFrame(self)

    def to_pandas(self) -> Any:
        """Return the frame as `pandas.DataFrame`."""
        return import_module("pandas").DataFrame(self._columns)

    def to_csv(self) -> str:
        """Return the frame as CSV text with a head; what is not known is empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(list(self))
        writer.writerows(["" if value is None else value for value in row.values()] for row in self.rows())
        return out.getvalue()

    def to_parquet(self, path: str) -> None:
        """Write the frame to a Parquet file with polars or pyarrow, whichever is installed; ImportError without."""
        try:
            self.to_polars().write_parquet(path)
        except ImportError:
            import_module("pyarrow.parquet").write_table(import_module("pyarrow").table(self), path)

    def __arrow_c_schema__(self) -> object:
        """Return the Arrow schema of the columns as a capsule "arrow_schema"."""
        one = _Schema()
        _fill_schema(one, self._columns)
        _KEPT[one.private_data].append(one)
        return _capsule(one, b"arrow_schema")

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the columns as a capsule "arrow_array_stream" of one batch."""
        columns, left = self._columns, [self._columns]

        def get_schema(_: int, out: int) -> int:
            _fill_schema(_Schema.from_address(out), columns)
            return 0

        def get_next(_: int, out: int) -> int:
            if left:
                _fill_array(_Array.from_address(out), left.pop())
            else:
                ctypes.memset(out, 0, ctypes.sizeof(_Array))
            return 0

        functions: list[Callable[..., Any]] = [_GET(get_schema), _GET(get_next), _ERROR(lambda _: None)]
        one = _Stream(*functions, release=_RELEASE_STREAM)
        one.private_data = _keep(functions, one)
        return _capsule(one, b"arrow_array_stream")


def column_of(values: Iterable[Any]) -> Any:
    """Return values as a numpy array of floats, whole numbers or switches, or as a list of words.

    >>> column_of([1, None]), column_of(["a", 2])
    (array([ 1., nan]), ['a', '2'])
    """
    if isinstance(values, np.ndarray):
        return values
    items = list(values)
    known = [value for value in items if value is not None]
    if all(isinstance(value, bool) for value in known) and known and len(known) == len(items):
        return np.array(items, dtype=bool)
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in known) and known:
        if len(known) == len(items) and all(isinstance(value, int) for value in known):
            return np.array(items, dtype=np.int64)
        return np.array([float("nan") if value is None else float(value) for value in items])
    return items if all(isinstance(value, str) for value in items) else [_word(value) for value in items]


def _plain(values: Any) -> list[Any]:
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    return [None if isinstance(value, float) and value != value else value for value in items]


def _word(value: object) -> str | None:
    return None if value is None else _cell(value)


def _cell(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


# Layouts of arrow.apache.org/docs/format/CDataInterface.html.
_RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_NULLABLE = 2
# Everything that a consumer may still read, by the address of its structure, until it releases it.
_KEPT: dict[int, list[Any]] = {}


class _Schema(ctypes.Structure):
    _fields_ = [
        ("format", ctypes.c_char_p), ("name", ctypes.c_char_p), ("metadata", ctypes.c_char_p),
        ("flags", ctypes.c_int64), ("n_children", ctypes.c_int64), ("children", ctypes.c_void_p),
        ("dictionary", ctypes.c_void_p), ("release", _RELEASE), ("private_data", ctypes.c_void_p),
    ]  # fmt: skip


class _Array(ctypes.Structure):
    _fields_ = [
        ("length", ctypes.c_int64), ("null_count", ctypes.c_int64), ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64), ("n_children", ctypes.c_int64), ("buffers", ctypes.c_void_p),
        ("children", ctypes.c_void_p), ("dictionary", ctypes.c_void_p), ("release", _RELEASE),
        ("private_data", ctypes.c_void_p),
    ]  # fmt: skip


_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_ERROR = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)


class _Stream(ctypes.Structure):
    _fields_ = [
        ("get_schema", _GET), ("get_next", _GET), ("get_last_error", _ERROR), ("release", _RELEASE),
        ("private_data", ctypes.c_void_p),
    ]  # fmt: skip


def _releaser(kind: type[ctypes.Structure]) -> Any:
    def release(address: int) -> None:
        one = kind.from_address(address)
        count = getattr(one, "n_children", 0)
        pointers = (ctypes.c_void_p * count).from_address(one.children) if count else ()
        for pointer in pointers:
            child = kind.from_address(pointer or 0)
            if child.release:
                child.release(pointer)
        key = one.private_data
        one.release = _RELEASE()
        _KEPT.pop(key or 0, None)

    return _RELEASE(release)


_RELEASE_SCHEMA, _RELEASE_ARRAY, _RELEASE_STREAM = (_releaser(kind) for kind in (_Schema, _Array, _Stream))


def _keep(*things: Any) -> int:
    """Return the key under which things live until they are released."""
    kept = list(things)
    _KEPT[id(kept)] = kept
    return id(kept)


def _pointers(children: list[Any]) -> Any:
    return (ctypes.c_void_p * max(len(children), 1))(*(ctypes.addressof(child) for child in children))


def _format(values: Any) -> bytes:
    if isinstance(values, list):
        return b"u"
    return {"b": b"b", "i": b"l", "u": b"l", "f": b"g"}[values.dtype.kind]


def _fill_schema(out: _Schema, columns: Mapping[str, Any]) -> None:
    """Fill the schema of a struct of the columns."""
    children = []
    for name, values in columns.items():
        child = _Schema(format=_format(values), name=name.encode(), flags=_NULLABLE, release=_RELEASE_SCHEMA)
        child.private_data = _keep(child)
        children.append(child)
    pointers = _pointers(children)
    ctypes.memset(ctypes.addressof(out), 0, ctypes.sizeof(out))
    out.format, out.name, out.n_children, out.children = b"+s", b"", len(children), ctypes.addressof(pointers)
    out.release, out.private_data = _RELEASE_SCHEMA, _keep(children, pointers)


def _buffers(values: Any) -> tuple[int, list[Any]]:
    """Return how many values are missing, and the buffers of a column: validity, then offsets and text, or values."""
    if isinstance(values, list):
        known = np.array([value is not None for value in values], dtype=bool)
        texts = [("" if value is None else value).encode() for value in values]
        offsets = np.zeros(len(texts) + 1, dtype=np.int32)
        np.cumsum([len(text) for text in texts], out=offsets[1:])
        data = [offsets, np.frombuffer(b"".join(texts) or b"\0", dtype=np.uint8)]
    elif values.dtype.kind == "b":
        known, data = np.ones(len(values), dtype=bool), [np.packbits(values, bitorder="little")]
    elif values.dtype.kind == "f":
        known, data = ~np.isnan(values), [np.ascontiguousarray(values, dtype=np.float64)]
    else:
        known, data = np.ones(len(values), dtype=bool), [np.ascontiguousarray(values, dtype=np.int64)]
    missing = int(len(known) - known.sum())
    return missing, [np.packbits(known, bitorder="little") if missing else None, *data]


def _fill_array(out: _Array, columns: Mapping[str, Any]) -> None:
    """Fill the array of a struct of the columns."""
    children, length = [], 0
    for values in columns.values():
        missing, buffers = _buffers(values)
        addresses = (ctypes.c_void_p * len(buffers))(*(None if b is None else b.ctypes.data for b in buffers))
        child = _Array(length=len(values), null_count=missing, n_buffers=len(buffers), release=_RELEASE_ARRAY)
        child.buffers, child.private_data = ctypes.addressof(addresses), _keep(child, buffers, addresses)
        children.append(child)
        length = len(values)
    pointers, none = _pointers(children), (ctypes.c_void_p * 1)(None)
    ctypes.memset(ctypes.addressof(out), 0, ctypes.sizeof(out))
    out.length, out.n_buffers, out.buffers = length, 1, ctypes.addressof(none)
    out.n_children, out.children = len(children), ctypes.addressof(pointers)
    out.release, out.private_data = _RELEASE_ARRAY, _keep(children, pointers, none)


def _capsule(one: ctypes.Structure, name: bytes) -> object:
    """Return a capsule of a structure, which whoever takes it releases."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(one), name, None)
