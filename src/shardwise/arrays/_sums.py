"""Sums of products, systems of equations and lines between points, of arrays in plain Python."""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise
from operator import mul
from typing import Any

from shardwise.arrays._array import Array, flattened, made
from shardwise.arrays._cells import spread


def einsum(subscripts: str, *arrays: Any) -> Any:
    """Return a product of arrays summed over the axes that the result lacks.

    >>> einsum("ik,kj->ij", Array([1, 2, 3, 4], (2, 2)), Array([1, 0, 0, 1], (2, 2))).tolist()
    [[1, 2], [3, 4]]
    """
    inputs, wanted = subscripts.split("->")
    names = inputs.split(",")
    gone = [axis for axis in dict.fromkeys("".join(names)) if axis not in wanted]
    order = [*wanted, *gone]
    pairs = zip(names, arrays, strict=True)
    sizes = {axis: size for name, one in pairs for axis, size in zip(name, one.shape, strict=True)}
    shape, product = tuple(sizes[axis] for axis in order), None
    for name, one in zip(names, arrays, strict=True):
        turned = one.transpose([name.index(axis) for axis in order if axis in name])
        cells = spread(turned.cells, tuple(sizes[axis] if axis in name else 1 for axis in order), shape)
        product = cells if product is None else list(map(mul, product, cells))
    cells, block = product or [], 1
    for axis in gone:
        block *= sizes[axis]
    return made([sum(cells[i : i + block]) for i in range(0, len(cells), block)], shape[: len(wanted)])


def _solution(rows: list[list[float]], wanted: list[list[float]]) -> list[list[float]]:
    """Return x of A x = b, by elimination with the largest pivot of each column."""
    rows, size = [[*row, *right] for row, right in zip(rows, wanted, strict=True)], len(rows)
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(rows[k][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        head = rows[i]
        if not head[i]:
            raise ArithmeticError("a system of equations has no single solution")
        for k in range(i + 1, size):
            row = rows[k]
            factor = row[i] / head[i]
            if factor:
                row[i:] = [a - factor * b for a, b in zip(row[i:], head[i:], strict=True)]
    for i in range(size - 1, -1, -1):
        row = rows[i]
        for k in range(i + 1, size):
            factor, known = row[k], rows[k]
            row[size:] = [a - factor * b for a, b in zip(row[size:], known[size:], strict=True)]
        row[size:] = [a / row[i] for a in row[size:]]
    return [row[size:] for row in rows]


def solve(systems: Any, wanted: Any) -> Any:
    """Return the solutions of systems of linear equations [..., equation, unknown].

    >>> solve(Array([0.0, 2.0, 4.0, 0.0], (2, 2)), Array([2.0, 4.0], (2, 1))).tolist()
    [[1.0], [1.0]]
    """
    size, right = systems.shape[-1], wanted.shape[-1]
    cells: list[float] = []
    for start in range(systems.size // size**2):
        rows = [systems.cells[i : i + size] for i in range(start * size**2, (start + 1) * size**2, size)]
        ends = range(start * size * right, (start + 1) * size * right, right)
        cells += [one for row in _solution(rows, [wanted.cells[i : i + right] for i in ends]) for one in row]
    return Array(cells, wanted.shape)


def interp(at: Any, known: Any, values: Any, left: float | None = None) -> Any:
    """Return values on lines between known points, and those of the first and the last beyond.

    >>> interp(Array([0.0, 1.5, 9.0], (3,)), [1, 2], [10.0, 20.0]).tolist()
    [10.0, 15.0, 20.0]
    """
    (cells, shape), x, y = flattened(at), flattened(known)[0], flattened(values)[0]

    def value(a: float) -> float:
        i = bisect_right(x, a) - 1
        if a != a:
            return a
        if i < 0:
            return float(y[0] if left is None else left)
        if i >= len(x) - 1 or x[i] == a:
            return float(y[min(i, len(x) - 1)])
        return float((y[i + 1] - y[i]) / (x[i + 1] - x[i]) * (a - x[i]) + y[i])

    return made(list(map(value, cells)), shape)


def gradient(of: Any, at: Any, axis: int) -> Any:
    """Return slopes along an axis at places that lie unequally far apart: of the parabola through three, at ends two.

    >>> gradient(Array([0.0, 1.0, 9.0], (3,)), Array([0.0, 1.0, 3.0], (3,)), 0).tolist()
    [1.0, 2.0, 4.0]
    """
    gaps = [b - a for a, b in pairwise(at.cells)]

    def slopes(line: list[float]) -> list[float]:
        rises = [(b - a) / gap for a, b, gap in zip(line, line[1:], gaps, strict=False)]
        pairs = zip(rises, rises[1:], gaps, gaps[1:], strict=False)
        return [rises[0], *((a * after + b * before) / (before + after) for a, b, before, after in pairs), rises[-1]]

    return of.along(axis, slopes)


def convolve(one: Any, other: Any) -> Any:
    """Return the coefficients of a product of two polynomials.

    >>> convolve(Array([1.0, 1.0], (2,)), Array([1.0, 2.0], (2,))).tolist()
    [1.0, 3.0, 2.0]
    """
    cells = [0.0] * (len(one) + len(other) - 1)
    for i, a in enumerate(one.cells):
        for k, b in enumerate(other.cells):
            cells[i + k] += a * b
    return Array(cells, (len(cells),))
