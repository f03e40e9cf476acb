"""As much of numpy as formulas of many places need, in plain Python, under numpy's names (`shardwise.arrays`)."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from itertools import pairwise
from typing import Any

from shardwise.arrays import _sums
from shardwise.arrays._array import Array as ndarray
from shardwise.arrays._array import Operators, U, flattened, made
from shardwise.arrays._cells import Shape, common, lines, spread

__all__ = ["linalg", "ndarray"]

inf, float64 = math.inf, float
add, subtract, multiply, true_divide, power = (
    U[name] for name in ("add", "subtract", "multiply", "true_divide", "power")
)
maximum, minimum, exp, expm1, log = (U[name] for name in ("maximum", "minimum", "exp", "expm1", "log"))
log1p, log2, sqrt, ceil, floor, greater = (U[name] for name in ("log1p", "log2", "sqrt", "ceil", "floor", "greater"))
round = U["rint"]


class lib:
    """Where numpy keeps the arithmetic of what overrides its functions."""

    class mixins:
        """The same."""

        NDArrayOperatorsMixin = Operators


class linalg:
    """Systems of linear equations."""

    solve = staticmethod(_sums.solve)


def errstate(**_: str) -> Any:
    """Return a context for what numpy warns of: here nothing does."""
    return nullcontext()


def _overridden(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that what overrides it answers for, as numpy has it."""

    @wraps(function)
    def answered(*args: Any, **options: Any) -> Any:
        for one in args:
            for inner in one if isinstance(one, (list, tuple)) else (one,):
                if hasattr(inner, "__array_function__"):
                    return inner.__array_function__(answered, (), args, options)
        return function(*args, **options)

    return answered


def array(values: Any, kind: type | None = None) -> Any:
    """Return an array of its own."""
    cells, shape = flattened(values)
    return ndarray(list(map(kind, cells)) if kind else list(cells), shape)


def asarray(values: Any, kind: type | None = None) -> Any:
    """Return an array; the same where it is one."""
    return values if isinstance(values, ndarray) and kind is None else array(values, kind)


def full(shape: Any, value: Any) -> Any:
    """Return an array of equal cells."""
    shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
    return ndarray([value] * math.prod(shape), shape)


def zeros(shape: Any, kind: type = float) -> Any:
    """Return an array of nothing."""
    return full(shape, kind(0))


empty = zeros


def ones(shape: Any) -> Any:
    """Return an array of ones."""
    return full(shape, 1.0)


def full_like(like: Any, value: Any) -> Any:
    """Return an array of equal cells, of another's shape."""
    return full(shape(like), value)


def zeros_like(like: Any) -> Any:
    """Return an array of nothing, of another's shape."""
    return full(shape(like), 0.0)


def ones_like(like: Any) -> Any:
    """Return an array of ones, of another's shape."""
    return full(shape(like), 1.0)


def eye(size: int) -> Any:
    """Return the unit matrix."""
    return ndarray([float(i == j) for i in range(size) for j in range(size)], (size, size))


def arange(start: float, stop: float | None = None) -> Any:
    """Return numbers one apart, the last of them less than `stop`."""
    first, end = (0, start) if stop is None else (start, stop)
    cells = [first + i for i in range(math.ceil(end - first))]
    return ndarray(cells, (len(cells),))


def geomspace(first: float, last: float, count: int) -> Any:
    """Return numbers, each as many times the one before."""
    low, high = math.log10(first), math.log10(last)
    middle = [10 ** (low + i * ((high - low) / (count - 1))) for i in range(1, count - 1)]
    return ndarray([first, *middle, last][:count], (count,))


def shape(of: Any) -> Shape:
    """Return the shape."""
    return flattened(of)[1]


def ndim(of: Any) -> int:
    """Return the number of axes."""
    return len(shape(of))


def size(of: Any) -> int:
    """Return the number of cells."""
    return math.prod(shape(of))


def max(of: Any) -> Any:
    """Return the largest of all."""
    return asarray(of).max()


@_overridden
def where(condition: Any, then: Any, other: Any) -> Any:
    """Return `then` where a condition holds, else the other."""
    parts = [flattened(one) for one in (condition, then, other)]
    whole = common(*(own for _, own in parts))
    chosen = zip(*(spread(cells, own, whole) for cells, own in parts), strict=True)
    return made([a if some else b for some, a, b in chosen], whole)


def clip(of: Any, least: Any, most: Any) -> Any:
    """Return numbers, none below the least and none over the most."""
    low = of if least is None else maximum(of, least)
    return low if most is None else minimum(low, most)


@_overridden
def broadcast_to(of: Any, wanted: Any) -> Any:
    """Return an array repeated to a shape."""
    cells, own = flattened(of)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    return ndarray(spread(cells, own, common(own, wanted)), wanted)


@_overridden
def reshape(of: Any, wanted: Any) -> Any:
    """Return the same cells in another shape."""
    return asarray(of).reshape(wanted)


@_overridden
def transpose(of: Any, axes: Any) -> Any:
    """Return an array with its axes in another order."""
    return of.transpose(axes)


@_overridden
def swapaxes(of: Any, one: int, other: int) -> Any:
    """Return an array with two axes in each other's place."""
    axes = list(range(of.ndim))
    axes[one], axes[other] = axes[other], axes[one]
    return of.transpose(axes)


@_overridden
def moveaxis(of: Any, axis: int, to: int) -> Any:
    """Return an array with one axis in another place."""
    axes = list(range(of.ndim))
    moved = axes.pop(axis)
    axes.insert(to % of.ndim, moved)
    return of.transpose(axes)


@_overridden
def concatenate(arrays: Any, axis: int = 0) -> Any:
    """Return arrays one after the other along an axis."""
    parts = [asarray(one) for one in arrays]
    axis %= parts[0].ndim
    own = parts[0].shape
    sizes = [one.shape[axis] * math.prod(own[axis + 1 :]) for one in parts]
    cells = []
    for i in range(math.prod(own[:axis])):
        for one, step in zip(parts, sizes, strict=True):
            cells += one.cells[i * step : (i + 1) * step]
    return ndarray(cells, (*own[:axis], sum(one.shape[axis] for one in parts), *own[axis + 1 :]))


@_overridden
def stack(arrays: Any, axis: int = 0) -> Any:
    """Return arrays beside each other along a new axis."""
    parts = [asarray(one) for one in arrays]
    own = parts[0].shape
    axis %= len(own) + 1
    return concatenate([one.reshape((*own[:axis], 1, *own[axis:])) for one in parts], axis)


@_overridden
def repeat(of: Any, times: int, axis: int | None = None) -> Any:
    """Return each place of an axis so many times."""
    values = asarray(of)
    if axis is None:
        values, axis = values.ravel() if values.shape else array([of]), 0
    return values.along(axis, lambda line: [cell for cell in line for _ in range(times)])


def tile(of: Any, times: int) -> Any:
    """Return an array of one axis so many times."""
    cells = list(flattened(of)[0]) * times
    return ndarray(cells, (len(cells),))


@_overridden
def take(of: Any, places: Any, axis: int) -> Any:
    """Return some places of an axis."""
    return of.take(places, axis)


@_overridden
def take_along_axis(of: Any, places: Any, axis: int) -> Any:
    """Return of each line along an axis the places that are given for it."""
    axis %= of.ndim
    own, wanted = list(of.shape), list(places.shape)
    length, count = own[axis], wanted[axis]
    own[axis] = wanted[axis] = 1
    whole = list(common(tuple(own), tuple(wanted)))
    whole[axis] = length
    values = broadcast_to(of, tuple(whole))
    whole[axis] = count
    at = broadcast_to(places, tuple(whole))
    cells: list[Any] = [None] * len(at.cells)
    for line, asked in zip(lines(values.shape, axis), lines(at.shape, axis), strict=True):
        known = values.cells[line]
        cells[asked] = [known[i] for i in at.cells[asked]]
    return ndarray(cells, at.shape)


def _none_last(number: Any) -> tuple[bool, Any]:
    return number != number, number


@_overridden
def sort(of: Any, axis: int = -1) -> Any:
    """Return lines along an axis, the smallest first and what is no number last."""
    return of.along(axis, lambda line: sorted(line, key=_none_last))


def argsort(of: Any, axis: int = -1) -> Any:
    """Return the places of lines along an axis, that of the smallest first."""
    return of.along(axis, lambda line: sorted(range(len(line)), key=lambda i: _none_last(line[i])))


def unique(of: Any) -> Any:
    """Return distinct numbers, the smallest first."""
    return array(sorted(set(flattened(of)[0])))


def flatnonzero(of: Any) -> Any:
    """Return the places of all that are true."""
    return array([i for i, one in enumerate(flattened(of)[0]) if one])


def searchsorted(known: Any, at: Any, side: str = "left") -> Any:
    """Return before how many known numbers, the smallest first, each would stand."""
    places, (cells, own), among = bisect_left if side == "left" else bisect_right, flattened(at), flattened(known)[0]
    return made([places(among, one) for one in cells], own)


def meshgrid(first: Any, second: Any, indexing: str) -> Any:
    """Return two arrays of one grid, whose first axis is the first's."""
    grid = (len(first), len(second)) if indexing == "ij" else (0, 0)
    return broadcast_to(first[:, None], grid), broadcast_to(second[None], grid)


def ravel_multi_index(index: tuple[int, ...], of: Shape) -> int:
    """Return the place of a cell among all."""
    place = 0
    for i, length in zip(index, of, strict=True):
        place = place * length + i % length
    return place


def vectorize(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function of numbers for arrays of them."""
    return lambda of: made(list(map(function, flattened(of)[0])), shape(of))


def diff(of: Any, axis: int = -1) -> Any:
    """Return differences of neighbours along an axis."""
    return of.along(axis, lambda line: [b - a for a, b in pairwise(line)])


@_overridden
def cumsum(of: Any, axis: int | None = None) -> Any:
    """Return sums up to each place of an axis."""
    values = asarray(of)
    return add.accumulate(values, axis) if axis is not None else add.accumulate(values.ravel())


einsum = _overridden(_sums.einsum)
interp, gradient, convolve = _sums.interp, _sums.gradient, _sums.convolve
