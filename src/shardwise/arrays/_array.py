"""An array in plain Python, with the arithmetic, the indices and the sums of numpy's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate, repeat
from operator import mul, ne
from typing import Any

from shardwise.arrays._cells import Shape, common, lines, picked, spread
from shardwise.arrays._numbers import DEFINED, EVERYWHERE

_NUMBERS = frozenset((float, int, bool))


def flattened(values: Any) -> tuple[list[Any], Shape]:
    """Return the cells and the shape of a number, of an array, or of sequences of them.

    >>> flattened([[1, 2], (3, 4)])
    ([1, 2, 3, 4], (2, 2))
    """
    if isinstance(values, Array):
        return values.cells, values.shape
    if values.__class__ in _NUMBERS:
        return [values], ()
    if hasattr(values, "__array__"):
        return flattened(values.__array__())
    if not isinstance(values, (list, tuple, range)):
        return [values], ()
    if not any(hasattr(one, "__len__") for one in values):
        return list(values), (len(values),)
    parts = [flattened(one) for one in values]
    return [cell for cells, _ in parts for cell in cells], (len(parts), *parts[0][1])


def made(cells: list[Any], shape: Shape) -> Any:
    """Return an array, or the number where it has no axes."""
    return Array(cells, shape) if shape else cells[0]


class Ufunc:
    """A function of numbers, one by one: of arrays whose shapes go together, or of what overrides it.

    >>> Ufunc("true_divide")([1.0, 2.0], 0).tolist()
    [inf, inf]
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self._quick, self._safe = DEFINED[name], EVERYWHERE.get(name, DEFINED[name])

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Return the function of numbers and arrays."""
        for one in inputs:
            if one.__class__ not in _NUMBERS and hasattr(one, "__array_ufunc__"):
                return one.__array_ufunc__(self, "__call__", *inputs, **options)
        parts = [flattened(one) for one in inputs]
        shape = common(*(own for _, own in parts))
        columns: list[Any] = [
            repeat(cells[0]) if not own and shape else spread(cells, own, shape) for cells, own in parts
        ]
        try:
            cells = list(map(self._quick, *columns))
        except (ArithmeticError, ValueError):
            cells = list(map(self._safe, *columns))
        return made(cells, shape)

    def accumulate(self, values: Any, axis: int = 0) -> Any:
        """Return the function of all up to each place of an axis."""
        if hasattr(values, "__array_ufunc__"):
            return values.__array_ufunc__(self, "accumulate", values, axis=axis)
        return values.along(axis, lambda line: list(accumulate(line, self._quick)))


U = {name: Ufunc(name) for name in DEFINED}
"""Functions of numbers, by the names that numpy has for them."""


class Operators:
    """Arithmetic by the functions of numbers, for arrays and for what overrides these."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def _operator(name: str, turned: bool) -> Callable[[Any, Any], Any]:
    function = U[name]
    return (lambda self, other: function(other, self)) if turned else (lambda self, other: function(self, other))


for _dunder, _name in {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "and": "bitwise_and", "or": "bitwise_or",
}.items():  # fmt: skip
    setattr(Operators, f"__{_dunder}__", _operator(_name, False))
    setattr(Operators, f"__r{_dunder}__", _operator(_name, True))
for _dunder, _name in {
    "lt": "less", "le": "less_equal", "gt": "greater", "ge": "greater_equal", "eq": "equal", "ne": "not_equal",
}.items():  # fmt: skip
    setattr(Operators, f"__{_dunder}__", _operator(_name, False))
for _dunder, _name in {"neg": "negative", "invert": "logical_not", "abs": "absolute"}.items():
    setattr(Operators, f"__{_dunder}__", lambda self, function=U[_name]: function(self))


class Array(Operators):
    """Cells and a shape; parts are copies, not views.

    >>> (2 * Array([1.0, 2.0, 3.0, 4.0], (2, 2))).sum(axis=0).tolist()
    [8.0, 12.0]
    """

    __slots__ = ("cells", "shape")

    def __init__(self, cells: list[Any], shape: Shape) -> None:
        self.cells, self.shape = cells, shape

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __bool__(self) -> bool:
        (only,) = self.cells
        return bool(only)

    def __float__(self) -> float:
        (only,) = self.cells
        return float(only)

    def __matmul__(self, other: Array) -> Any:
        width, columns = self.shape[1], [other.cells[one] for one in lines(other.shape, 0)]
        rows = [self.cells[i : i + width] for i in range(0, self.size, width)]
        return Array([sum(map(mul, row, one)) for row in rows for one in columns], (len(rows), *other.shape[1:]))

    def __getitem__(self, key: Any) -> Any:
        places, shape = picked(key, self.shape)
        cells = self.cells
        return made([cells[i] for i in places], shape)

    def __setitem__(self, key: Any, values: Any) -> None:
        places, shape = picked(key, self.shape)
        cells, own = flattened(values)
        for place, value in zip(places, spread(cells, own, shape), strict=True):
            self.cells[place] = value

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of cells."""
        return len(self.cells)

    @property
    def flat(self) -> list[Any]:
        """All cells."""
        return self.cells

    @property
    def T(self) -> Any:
        """The array with its axes in reverse."""
        return self.transpose(range(self.ndim)[::-1])

    def transpose(self, axes: Any) -> Any:
        """Return the array with its axes in another order."""
        order, whole = list(axes), [0]
        for axis in order:
            step = math.prod(self.shape[axis + 1 :])
            whole = [at + more for at in whole for more in range(0, step * self.shape[axis], step or 1)]
        return Array([self.cells[i] for i in whole], tuple(self.shape[axis] for axis in order))

    def reshape(self, *shape: Any) -> Any:
        """Return the same cells in another shape, one axis of which may be left to the others (-1)."""
        sizes = list(shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape)
        if -1 in sizes:
            rest = -math.prod(sizes)
            sizes[sizes.index(-1)] = self.size // rest if rest else 0
        return made(self.cells, tuple(sizes))

    def ravel(self) -> Any:
        """Return all cells in one axis."""
        return Array(self.cells, (self.size,))

    def astype(self, kind: type) -> Any:
        """Return the cells as numbers of another type."""
        return Array(list(map(kind, self.cells)), self.shape)

    def tolist(self) -> Any:
        """Return lists of lists."""
        return [one.tolist() for one in self] if self.ndim > 1 else list(self.cells)

    def take(self, places: Any, axis: int) -> Any:
        """Return some places of an axis."""
        return self[(*(slice(None),) * (axis % self.ndim), places)]

    def along(self, axis: int, function: Callable[[list[Any]], list[Any]]) -> Any:
        """Return lists of each line along an axis in the place of the line."""
        axis %= self.ndim
        whole = [function(self.cells[one]) for one in lines(self.shape, axis)]
        length = len(whole[0]) if whole else 0
        shape = (*self.shape[:axis], length, *self.shape[axis + 1 :])
        cells: list[Any] = [None] * math.prod(shape)
        for one, line in zip(lines(shape, axis), whole, strict=True):
            cells[one] = line
        return Array(cells, shape)

    def _folded(self, function: Callable[[list[Any]], Any], axis: int | None, keepdims: bool = False) -> Any:
        if axis is None:
            return function(self.cells)
        axis %= self.ndim
        kept = (1,) if keepdims else ()
        cells = [function(self.cells[one]) for one in lines(self.shape, axis)]
        return made(cells, (*self.shape[:axis], *kept, *self.shape[axis + 1 :]))

    def sum(self, axis: int | None = None) -> Any:
        """Return sums along an axis, or of all."""
        return self._folded(sum, axis)

    def mean(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return means along an axis, or of all."""
        return self._folded(_mean, axis, keepdims)

    def var(self, axis: int | None = None) -> Any:
        """Return variances along an axis, or of all."""
        return self._folded(lambda line: _mean([(x - _mean(line)) ** 2 for x in line]), axis)

    def max(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return the largest along an axis, or of all."""
        return self._folded(_most, axis, keepdims)

    def min(self, axis: int | None = None, keepdims: bool = False) -> Any:
        """Return the smallest along an axis, or of all."""
        return self._folded(_least, axis, keepdims)

    def all(self, axis: int | None = None) -> Any:
        """Return whether all are true."""
        return self._folded(all, axis)

    def any(self, axis: int | None = None) -> Any:
        """Return whether any is true."""
        return self._folded(any, axis)


def _mean(line: list[Any]) -> Any:
    return sum(line) / len(line)


def _most(line: list[Any]) -> Any:
    return math.nan if any(map(ne, line, line)) else max(line)


def _least(line: list[Any]) -> Any:
    return math.nan if any(map(ne, line, line)) else min(line)
