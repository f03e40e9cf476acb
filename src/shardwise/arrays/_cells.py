"""Cells of arrays in plain Python: a list, the last axis fastest, beside a shape."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

Shape = tuple[int, ...]


def spread(cells: list[Any], shape: Shape, wanted: Shape) -> list[Any]:
    """Return cells repeated along the axes that have one place, or none, where wider ones are wanted.

    >>> spread([1, 2], (2, 1), (2, 3)), spread([1, 2], (2,), (2, 2))
    ([1, 1, 1, 2, 2, 2], [1, 2, 1, 2])
    """
    if shape == wanted:
        return cells
    if len(cells) == 1:
        return cells * math.prod(wanted)
    shape, block = (1,) * (len(wanted) - len(shape)) + shape, 1
    for own, times in zip(reversed(shape), reversed(wanted), strict=True):
        if own == 1 and times != 1:
            if block == len(cells):
                cells = cells * times
            else:
                starts = range(0, len(cells), block)
                cells = [*chain.from_iterable([cells[i : i + block] * times for i in starts])]
        block *= times
    return cells


def common(*shapes: Shape) -> Shape:
    """Return the shape that arrays of some shapes have together.

    >>> common((2, 1), (3,), ())
    (2, 3)
    """
    different = {*shapes} - {()}
    if len(different) < 2:
        # Arrays of one shape, and numbers beside them, are most.
        return different.pop() if different else ()
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    whole = tuple(max(sizes) if min(sizes) else 0 for sizes in zip(*padded, strict=True))
    if any(size not in (1, most) for shape in padded for size, most in zip(shape, whole, strict=True)):
        raise ValueError(f"arrays of the shapes {shapes} do not go together")
    return whole


def steps_of(shape: Shape) -> list[int]:
    """Return how many cells on the next place of each axis is.

    >>> steps_of((2, 3, 4))
    [12, 4, 1]
    """
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def lines(shape: Shape, axis: int) -> Iterator[slice]:
    """Yield the cells of each line along an axis, in the order of the other axes.

    >>> list(lines((2, 2), 0))
    [slice(0, 3, 2), slice(1, 4, 2)]
    """
    step = math.prod(shape[axis + 1 :])
    block = step * shape[axis]
    for outer in range(math.prod(shape[:axis])):
        start = outer * block
        for first in range(start, start + step):
            yield slice(first, max(first + block - step + 1, first), step)


Picked = tuple[list[int], Shape]
"""Offsets of cells, and the axes that they fill."""


def _places(key: Any) -> list[Any]:
    """Return an index of one axis as it is, and truths of several as the places of the true ones on each axis."""
    shape = getattr(key, "shape", ())
    if len(shape) < 2 or not key.cells or key.cells[0].__class__ is not bool:
        return [key]
    true = [i for i, some in enumerate(key.cells) if some]
    return [[i // step % size for i in true] for step, size in zip(steps_of(shape), shape, strict=True)]


def _expanded(key: Any, rank: int) -> list[Any]:
    """Return an index with one entry for each axis, and None for each that is new."""
    keys = [part for one in (key if isinstance(key, tuple) else (key,)) for part in _places(one)]
    named = sum(one is not None and one is not Ellipsis for one in keys)
    at = next((i for i, one in enumerate(keys) if one is Ellipsis), len(keys))
    keys[at : at + 1] = [slice(None)] * (rank - named)
    return keys


def _of_axis(key: Any, size: int, step: int) -> Picked:
    """Return what an index picks of an axis: a part, a place, places, or those where it is true."""
    if isinstance(key, slice):
        places = range(size)[key]
        return [i * step for i in places], (len(places),)
    cells: Any = key
    shape: Shape = ()
    if hasattr(key, "cells"):
        cells, shape = key.cells, key.shape
    elif isinstance(key, (list, range)):
        shape = (len(key),)
    else:
        cells = [key]
    if len(shape) == 1 and cells and cells[0].__class__ is bool:
        cells = [i for i, some in enumerate(cells) if some]
        shape = (len(cells),)
    if any(not -size <= i < size for i in cells):
        raise IndexError(f"an index is beyond the {size} places of its axis")
    return [(i + size if i < 0 else i) * step for i in cells], shape


def picked(key: Any, shape: Shape) -> Picked:
    """Return the numbers of the cells that an index picks; arrays in it go together, as numpy has them side by side.

    >>> picked((slice(None), 1), (2, 3))
    ([1, 4], (2,))
    """
    steps, axis, gathered = steps_of(shape), 0, -1
    parts: list[Picked] = []
    for one in _expanded(key, len(shape)):
        if one is None:
            parts.append(([0], (1,)))
            continue
        part = _of_axis(one, shape[axis], steps[axis])
        axis += 1
        if isinstance(one, slice) or not part[1]:
            parts.append(part)
        elif gathered < 0:
            gathered = len(parts)
            parts.append(part)
        else:
            both = common(parts[gathered][1], part[1])
            pairs = zip(*(spread(cells, own, both) for cells, own in (parts[gathered], part)), strict=True)
            parts[gathered] = [a + b for a, b in pairs], both
    whole = [0]
    for offsets, _ in parts:
        if whole == [0]:
            whole = offsets
        elif offsets != [0]:
            whole = [a + b for a in whole for b in offsets]
    return whole, tuple(size for _, sizes in parts for size in sizes)
