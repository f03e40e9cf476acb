"""Columns whose cells open: the arithmetic of arrays records itself, and is read for one cell where somebody asks.

What sums, scales, picks or compares cells is recorded; what comes of anything else (a logarithm, the solution of an
equation) is a plain column, at which an explanation ends: how often something happens, not what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from shardwise.arrays import np
from shardwise.ledger.number import evaluate
from shardwise.ledger.traced import Traced

_OPENING: ContextVar[bool] = ContextVar("opening", default=False)
_OPS = {
    np.add: "+", np.subtract: "-", np.multiply: "*", np.true_divide: "/", np.maximum: "max", np.minimum: "min",
}  # fmt: skip
# Functions that only move cells, with the places of the arguments whose cells they move.
_MOVES: dict[Any, tuple[int, ...]] = {
    np.where: (1, 2), np.take_along_axis: (0,), np.broadcast_to: (0,), np.swapaxes: (0,), np.transpose: (0,),
}  # fmt: skip
_JOINS = (np.concatenate, np.stack)
Cell = Callable[[int], Any]


@contextmanager
def opening() -> Iterator[None]:
    """Make every column of prices that is looked up inside the block open."""
    token = _OPENING.set(True)
    try:
        yield
    finally:
        _OPENING.reset(token)


def is_opening() -> bool:
    """Return whether columns are to open."""
    return _OPENING.get()


class _Lazy(Traced):
    """A named number whose arithmetic is read when somebody opens it."""

    __slots__ = ("_found",)

    def __init__(self, value: float, opener: Callable[[], Any], label: tuple[str, str, str]) -> None:
        self.value, self.op, self._found = value, "+", opener
        self.name, self.source, self.unit = label
        self.category, self.memo = "", None

    def __getattr__(self, name: str) -> Any:
        if name != "args":
            raise AttributeError(name)
        self.args = (self._found(), 0)
        return self.args


class OpenColumn(np.lib.mixins.NDArrayOperatorsMixin):  # type: ignore[misc]
    """An array of numbers that explain themselves.

    >>> prices = OpenColumn(np.array([2.0, 3.0]), lambda i: Traced(i + 2.0, label=(f"step {i}", "", "s")))
    >>> [(part.label, part.amount) for part in (2 * prices).sum(axis=-1).cell(()).contributions]
    [('2 * step 1', 6.0), ('2 * step 0', 4.0)]
    """

    __slots__ = ("_cells", "_made", "values")

    def __init__(self, values: Any, made: Cell) -> None:
        self.values = np.asarray(values, float)
        self._made, self._cells = made, dict[int, Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)

    def __len__(self) -> int:
        return len(self.values)

    def at(self, flat: int) -> Any:
        """Return a cell by its place in the flattened column: a plain or a traced number."""
        if flat not in self._cells:
            self._cells[flat] = self._made(flat)
        return self._cells[flat]

    def cell(self, index: tuple[int, ...]) -> Any:
        """Return a cell by its index."""
        return self.at(int(np.ravel_multi_index(index, self.values.shape)) if index else 0)

    def __getitem__(self, key: Any) -> OpenColumn:
        return _moved(lambda cells: cells[key], (self,))

    def reshape(self, *shape: int) -> OpenColumn:
        """Return the same cells in another shape."""
        return _moved(lambda cells: cells.reshape(*shape), (self,))

    def sum(self, axis: int = -1) -> OpenColumn:
        """Return sums along an axis."""
        rows: Any = np.moveaxis(np.arange(self.values.size).reshape(self.values.shape), axis, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        return OpenColumn(self.values.sum(axis=axis), lambda i: sum((self.at(int(j)) for j in rows[i]), 0.0))

    def mean(self, axis: int = -1) -> OpenColumn:
        """Return means along an axis."""
        column: OpenColumn = self.sum(axis) / self.values.shape[axis]
        return column

    def record(self, name: str, *args: Any) -> Any:
        """Return a named operation on columns (`shardwise.ledger.number`)."""
        if name == "above":
            return np.where(_values(args[0]) > _values(args[1]), args[2], args[3])
        if name in ("max", "min", "divide"):
            return _combined({"divide": "/"}.get(name, name), args, evaluate(name, *map(_values, args)))
        return evaluate(name, *map(_values, args))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values = getattr(ufunc, method)(*map(_values, inputs), **kwargs)
        if method == "__call__" and ufunc in _OPS and not kwargs:
            return _combined(_OPS[ufunc], inputs, values)
        if method == "accumulate" and ufunc in (np.maximum, np.minimum):
            places = np.arange(values.shape[-1]) * (inputs[0].values == values)
            return np.take_along_axis(self, np.maximum.accumulate(places, axis=-1), -1)
        return values

    def __array_function__(self, func: Any, _types: Any, args: Any, kwargs: Any) -> Any:
        if func in _JOINS:
            return _moved(lambda *cells: func(list(cells), *args[1:], **kwargs), args[0])
        if func in _MOVES:
            places = _MOVES[func]

            def move(*cells: Any) -> Any:
                given = [_values(arg) for arg in args]
                for place, cell in zip(places, cells, strict=True):
                    given[place] = cell
                return func(*given, **kwargs)

            return _moved(move, [args[place] for place in places])
        if func is np.sort:
            return np.take_along_axis(self, np.argsort(self.values, **kwargs), **kwargs)
        if func is np.einsum:
            return _product(*args)
        return func(*map(_values, args), **kwargs)


def named_each(x: Any, name: Callable[[int], str], unit: str = "s", source: str = "") -> Any:
    """Return a column whose cells have names by their places, where each opens as one node; plain ones pass through."""
    if not isinstance(x, OpenColumn):
        return x

    def made(i: int) -> Any:
        return _Lazy(float(x.values.flat[i]), lambda: x.at(i), (name(i), source, unit))

    return OpenColumn(x.values, made)


def called(x: Any, name: str) -> Any:
    """Return a column whose cells open under one name; plain numbers are inputs there, and pass through elsewhere.

    >>> called(np.array([2.0]), "waits")
    array([2.])
    """
    if isinstance(x, OpenColumn):
        return named_each(x, lambda _: name)
    if not _OPENING.get():
        return x
    if isinstance(x, float):
        return Traced(x, label=(name, "", "s"))
    values = np.asarray(x, float)
    return OpenColumn(values, lambda i: Traced(float(values.flat[i]), label=(name, "", "s")))


def number_at(column: Any, index: int) -> Any:
    """Return a place of a column: a plain number, or a traced one of a column that opens."""
    return column.cell((index,)) if isinstance(column, OpenColumn) else float(column[index])


def _values(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_values, x))
    return x.values if isinstance(x, OpenColumn) else x


def _cell(x: Any, flat: int) -> Any:
    return x.at(flat) if isinstance(x, OpenColumn) else float(x.flat[flat])


def _moved(move: Callable[..., Any], sources: Sequence[Any]) -> OpenColumn:
    """Return cells of some columns moved to other places: `move` is told numbers in their stead."""
    arrays = [one if isinstance(one, OpenColumn) else np.asarray(one, float) for one in sources]
    starts = np.cumsum([0, *(one.size for one in arrays)])
    numbers = move(
        *(start + np.arange(one.size).reshape(one.shape) for start, one in zip(starts, arrays, strict=False))
    )
    every = np.concatenate([np.asarray(one).ravel() for one in arrays])

    def made(i: int) -> Any:
        at = int(numbers.flat[i])
        source = int(np.searchsorted(starts, at, side="right")) - 1
        return _cell(arrays[source], at - int(starts[source]))

    return OpenColumn(every[numbers], made)


def _combined(op: str, args: Sequence[Any], values: Any) -> OpenColumn:
    """Return an operation on columns, cell by cell; a product with nothing is nothing."""
    shape = np.shape(values)
    sources = [arg if isinstance(arg, OpenColumn) else np.asarray(arg, float) for arg in args]
    places = [np.broadcast_to(np.arange(one.size).reshape(one.shape), shape) for one in sources]

    def made(i: int) -> Any:
        value = float(values.flat[i]) if shape else float(values)
        if op == "*" and not value:
            return 0.0
        cells = [_cell(one, int(place.flat[i])) for one, place in zip(sources, places, strict=True)]
        traced = any(isinstance(cell, Traced) for cell in cells)
        return Traced(value, op, tuple(cells)) if traced else value

    return OpenColumn(values, made)


def _product(subscripts: str, *arrays: Any) -> Any:
    """Return a product of arrays summed over what the result lacks, as `numpy.einsum` has it."""
    inputs, wanted = subscripts.split("->")
    names = [*inputs.split(",")]
    gone = [axis for axis in dict.fromkeys("".join(names)) if axis not in wanted]
    whole: Any = 1.0
    for name, array in zip(names, arrays, strict=True):
        order = [axis for axis in (*wanted, *gone) if axis in name]
        turned = np.transpose(array, [name.index(axis) for axis in order])
        spaced = tuple(slice(None) if axis in name else None for axis in (*wanted, *gone))
        whole = whole * turned[spaced]
    for _ in gone:
        whole = whole.sum(axis=-1)
    return whole
