"""Arrays in plain Python are what numpy's are: shapes, indices, and numbers that are none or endless."""

import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from shardwise.arrays import np, plain

_SHAPES = [(3,), (2, 3), (2, 1, 3), (1, 2, 3)]
_NUMBERS = [-2.5, -1.0, 0.0, 0.3, 1.0, 2.0, 7.0, 750.0, math.inf, -math.inf, math.nan]


def _table(library: Any, shape: tuple[int, ...], first: int = 0) -> Any:
    """Return numbers of a shape, none of them sorted."""
    size = math.prod(shape)
    return library.array([float((7 * i + first) % 11) for i in range(size)]).reshape(shape)


def _same(one: Any, other: Any) -> None:
    """Check that a plain array has the shape and the numbers of one of numpy."""
    assert plain.shape(one) == numpy.shape(other)
    assert plain.asarray(one).ravel().tolist() == pytest.approx(numpy.ravel(other).tolist(), rel=1e-12, nan_ok=True)


def test_numpy_is_taken_where_it_is() -> None:
    """Plain arrays are for where Python cannot import it."""
    assert np is numpy


@pytest.mark.parametrize(
    "name", ["exp", "expm1", "log", "log1p", "log2", "sqrt", "ceil", "floor", "round"]
)  # fmt: skip
def test_functions_of_one_number_are_defined_everywhere(name: str) -> None:
    """What Python's own raise an error for is nothing, no number or endless, as numpy has it."""
    with numpy.errstate(all="ignore"):
        for number in _NUMBERS:
            _same(getattr(plain, name)(plain.array([number])), getattr(numpy, name)(numpy.array([number])))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "true_divide", "power", "maximum", "minimum"])
def test_functions_of_two_numbers_are_defined_everywhere(name: str) -> None:
    """Divisions by nothing and powers of what is below it too."""
    with numpy.errstate(all="ignore"):
        for number in _NUMBERS:
            one, other = (getattr(lib, name)(lib.array(_NUMBERS), number) for lib in (plain, numpy))
            _same(one, other)
            one, other = (getattr(lib, name)(number, lib.array(_NUMBERS)) for lib in (plain, numpy))
            _same(one, other)


@given(arrays.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=4), st.integers(0, 10))
def test_shapes_go_together_as_in_numpy(shapes: Any, first: int) -> None:
    """Arrays of any two shapes that go together add up cell by cell."""
    one, other = shapes.input_shapes
    _same(*(_table(lib, one) - 2 * _table(lib, other, first) for lib in (plain, numpy)))


_KEYS: list[Callable[[Any], Any]] = [
    lambda lib: 1,
    lambda lib: (slice(None), -1),
    lambda lib: (slice(None), slice(-1, None)),
    lambda lib: (Ellipsis, None),
    lambda lib: (None, slice(None, None, -1)),
    lambda lib: lib.array([2, 0, 2]),
    lambda lib: (slice(None), lib.array([[1, 0], [0, 0]])),
    lambda lib: (lib.array([0, 2]), lib.array([1, 3])),
    lambda lib: (slice(None), lib.array([0, 1]), slice(1, None)),
    lambda lib: lib.array([True, False, True]),
    lambda lib: _table(lib, (3, 4)) > 6,
    lambda lib: (slice(None), _table(lib, (4, 2)) > 20),
]


@pytest.mark.parametrize("number", range(len(_KEYS)))
def test_indices_pick_and_set_what_they_do_in_numpy(number: int) -> None:
    """Places, parts, new axes, arrays of places and of truths."""
    every = []
    for lib in (plain, numpy):
        table, key = _table(lib, (3, 4, 2)), _KEYS[number](lib)
        got = lib.array(table[key])
        table[key] = 0.5
        every.append((got, table))
    for one, other in zip(*every, strict=True):
        _same(one, other)


_FOLDS: dict[str, Callable[[Any, Any, int], Any]] = {
    "sum": lambda lib, x, axis: x.sum(axis=axis),
    "mean": lambda lib, x, axis: x.mean(axis=axis),
    "var": lambda lib, x, axis: x.var(axis=axis),
    "max": lambda lib, x, axis: x.max(axis=axis, keepdims=True),
    "min": lambda lib, x, axis: x.min(axis=axis),
    "all": lambda lib, x, axis: (x > 0).all(axis=axis),
    "cumsum": lambda lib, x, axis: lib.cumsum(x, axis=axis),
    "accumulate": lambda lib, x, axis: lib.minimum.accumulate(x, axis=axis),
    "diff": lambda lib, x, axis: lib.diff(x, axis=axis),
    "sort": lambda lib, x, axis: lib.sort(x, axis=axis),
    "argsort": lambda lib, x, axis: lib.take_along_axis(x, lib.argsort(x, axis=axis), axis),
    "repeat": lambda lib, x, axis: lib.repeat(x, 2, axis=axis),
    "concatenate": lambda lib, x, axis: lib.concatenate([x, 2 * x], axis=axis),
    "stack": lambda lib, x, axis: lib.stack([x, 2 * x], axis=axis),
    "take": lambda lib, x, axis: lib.take(x, lib.array([0, 0]), axis=axis),
    "swapaxes": lambda lib, x, axis: lib.swapaxes(x, 0, axis),
    "moveaxis": lambda lib, x, axis: lib.moveaxis(x, axis, -1),
}


@pytest.mark.parametrize("name", _FOLDS)
@pytest.mark.parametrize("shape", _SHAPES, ids=str)
def test_lines_along_an_axis_are_as_in_numpy(name: str, shape: tuple[int, ...]) -> None:
    """Sums, orders and neighbours along every axis of arrays of one to three."""
    for axis in (*range(len(shape)), -1):
        _same(*(_FOLDS[name](lib, _table(lib, shape), axis) for lib in (plain, numpy)))


_WHOLE: dict[str, Callable[[Any], Any]] = {
    "where": lambda lib: lib.where(_table(lib, (2, 3)) > 4, 1.0, _table(lib, (3,))),
    "clip": lambda lib: lib.clip(_table(lib, (2, 3)), 2.0, None) + lib.clip(_table(lib, (2, 3)), None, 5.0),
    "transpose": lambda lib: lib.transpose(_table(lib, (2, 3, 4)), [1, 2, 0]).T,
    "reshape": lambda lib: lib.reshape(_table(lib, (2, 6)), (3, -1)),
    "searchsorted": lambda lib: lib.searchsorted(lib.array([1, 3, 3, 7]), _table(lib, (2, 3)), side="right"),
    "searched before": lambda lib: lib.searchsorted(lib.array([1, 3, 3, 7]), _table(lib, (2, 3))),
    "interp": lambda lib: lib.interp(_table(lib, (11,)), [2.0, 3.0, 7.0], [1.0, 5.0, 2.0], left=0.0),
    "gradient": lambda lib: lib.gradient(_table(lib, (4, 2)), lib.array([1.0, 2.0, 4.0, 5.0]), axis=0),
    "convolve": lambda lib: lib.convolve(_table(lib, (4,)), _table(lib, (3,))),
    "geomspace": lambda lib: lib.geomspace(0.01, 200.0, 24),
    "one of geomspace": lambda lib: lib.geomspace(2.0, 200.0, 1),
    "no number between others": lambda lib: lib.interp(lib.array([math.nan, 3.0]), [2.0, 3.0, 7.0], [1.0, 5.0, 2.0]),
    "no number in order": lambda lib: lib.sort(lib.array([3.0, math.nan, 1.0, 2.0])),
    "places of no number": lambda lib: lib.argsort(lib.array([3.0, math.nan, 1.0, 2.0])),
    "tables of cycles": lambda lib: lib.einsum(
        "mk,mkl,kln->mln", _table(lib, (2, 3)), _table(lib, (2, 3, 4)), _table(lib, (3, 4, 2))
    ),
    "product": lambda lib: _table(lib, (2, 3)) @ _table(lib, (3, 4)),
    "product with a vector": lambda lib: _table(lib, (2, 3)) @ _table(lib, (3,)),
    "tile": lambda lib: lib.tile(_table(lib, (3,)), 2),
    "unique": lambda lib: lib.unique(_table(lib, (13,))),
    "flatnonzero": lambda lib: lib.flatnonzero(_table(lib, (13,))),
    "meshgrid": lambda lib: lib.stack(lib.meshgrid(lib.arange(3), lib.arange(1.0, 3.0), indexing="ij")),
    "like": lambda lib: lib.full_like(_table(lib, (2, 3)), 4.0) + lib.ones_like(_table(lib, (2, 3))),
    "columns": lambda lib: lib.vectorize(lambda x: x + 1)(_table(lib, (2, 3))),
    "truths": lambda lib: ~(_table(lib, (5,)) > 4) & (_table(lib, (5,)) < 3) | (_table(lib, (5,)) == 7),
    "rests": lambda lib: _table(lib, (5,)) // 3 + (_table(lib, (5,)) - 5) % 4,
    "whole": lambda lib: (_table(lib, (5,)) / 2).astype(int),
}


@pytest.mark.parametrize("name", _WHOLE)
def test_functions_of_arrays_are_as_in_numpy(name: str) -> None:
    """The others that the formulas of a load ask for."""
    _same(*(_WHOLE[name](lib) for lib in (plain, numpy)))


@given(st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_systems_of_equations_have_the_solutions_of_numpy(size: int, seed: int) -> None:
    """Rows change their places where the next pivot is nothing."""
    drawn = numpy.random.default_rng(seed)
    systems, wanted = drawn.normal(size=(2, size, size)), drawn.normal(size=(2, size, 1))
    systems[:, 0, 0] = 0.0 if size > 1 else 1.0
    given_, right = (plain.array(one.ravel().tolist()).reshape(one.shape) for one in (systems, wanted))
    solution = numpy.array(plain.linalg.solve(given_, right).ravel().tolist()).reshape(wanted.shape)
    assert systems @ solution == pytest.approx(wanted, abs=1e-9 * float(numpy.abs(solution).max()))


def test_shapes_that_do_not_go_together_are_a_fault() -> None:
    """Neither they, nor a place beyond an axis, nor a system without a solution have an answer."""
    with pytest.raises(ValueError, match="do not go together"):
        plain.ones((2, 3)) + plain.ones((2,))
    with pytest.raises(IndexError):
        plain.ones((2,))[plain.array([2])]
    with pytest.raises(ArithmeticError):
        plain.linalg.solve(plain.zeros((2, 2)), plain.ones((2, 1)))
