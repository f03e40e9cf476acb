"""Numbers: one formula for plain numbers, columns and traced numbers, and the only ways to branch on a value."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.ledger import number
from shardwise.ledger.number import (
    above,
    ceil,
    divide,
    evaluate,
    is_column,
    largest,
    log2,
    maximum,
    minimum,
    power,
    raised,
    register,
    total,
)
from shardwise.ledger.traced import leaf, plain, tracing

# name, the function, how many arguments, and what it is in plain Python.
FUNCTIONS: list[tuple[str, Callable[..., Any], int, Callable[..., Any]]] = [
    ("maximum", maximum, 2, max),
    ("minimum", minimum, 2, min),
    ("ceil", ceil, 1, math.ceil),
    ("log2", log2, 1, math.log2),
    ("power", lambda a: power(a, 0.5), 1, math.sqrt),
    ("raised", lambda a: raised(0.5, a), 1, lambda a: 0.5**a),
    ("divide", divide, 2, lambda a, b: a / b),
    ("above", lambda a, b: above(a, b, 10.0, 20.0), 2, lambda a, b: 10.0 if a > b else 20.0),
    ("total", lambda a, b: total([a, b]), 2, lambda a, b: a + b),
    ("largest", lambda a, b: largest([a, b]), 2, max),
]
POSITIVE = st.floats(1e-3, 1e6)


@pytest.mark.parametrize(("name", "function", "count", "meaning"), FUNCTIONS, ids=[f[0] for f in FUNCTIONS])
@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=4))
@tried(16)
def test_columns_and_traced_numbers_are_plain_ones(
    name: str, function: Callable[..., Any], count: int, meaning: Callable[..., Any], rows: list[tuple[float, float]]
) -> None:
    """Every function means the same on a number, on a column of them and on a traced one."""
    expected = [meaning(*row[:count]) for row in rows]
    columns = [np.array(values) for values in list(zip(*rows, strict=True))[:count]]
    assert [function(*row[:count]) for row in rows] == pytest.approx(expected, rel=1e-12)
    assert function(*columns) == pytest.approx(np.array(expected, dtype=float), rel=1e-12)
    with tracing():
        traced = [plain(function(*(leaf(f"x{i}", x) for i, x in enumerate(row[:count])))) for row in rows]
    assert traced == [function(*row[:count]) for row in rows], name


@pytest.mark.parametrize(
    ("a", "b", "expected"), [(6, 3, 2), (7, 2, 3.5), (6.0, 3, 2.0), (10**25, 10**3, 10**22), (0, 5, 0)]
)
def test_whole_numbers_that_divide_stay_whole(a: float, b: float, expected: float) -> None:
    """Counts beyond 2**53 stay exact integers as long as they divide."""
    found = divide(a, b)
    assert found == expected
    assert isinstance(found, int) == isinstance(expected, int)


def test_columns_of_integers_leave_as_floats() -> None:
    """Dividing a column of integers gives float64, so that nothing overflows or truncates."""
    assert divide(np.array([7, 8]), 2).dtype == np.float64
    assert divide(np.array([7, 8]), 2).tolist() == [3.5, 4.0]


def test_both_branches_are_chosen_element_by_element() -> None:
    """A column chooses for each of its elements, and equality is not above."""
    assert above(np.array([0.0, 1.0, 2.0]), 1, 10.0, 20.0).tolist() == [20.0, 20.0, 10.0]
    assert above(1, 1, "then", "other") == "other"  # type: ignore[comparison-overlap, type-var]


def test_an_empty_sum_is_its_zero() -> None:
    """A sum over nothing is the zero it was given, so that a column of none keeps its shape."""
    assert total([]) == 0
    assert total([], np.zeros(2)).tolist() == [0.0, 0.0]


def test_a_registered_operation_is_one_node() -> None:
    """An operation that is added is known to numbers, columns and traces."""
    register("twice, for a test", lambda a: 2 * a, lambda a: 2 * a)
    assert evaluate("twice, for a test", 3) == 6
    assert evaluate("twice, for a test", np.array([1.0, 2.0])).tolist() == [2.0, 4.0]
    with tracing():
        node = evaluate("twice, for a test", leaf("x", 3))
    assert (node.op, node.value) == ("twice, for a test", 6)


def test_numbers_alone_never_import_numpy() -> None:
    """Formulas on plain numbers work without NumPy having been imported."""
    code = "import sys, shardwise.ledger.number as n; n.maximum(1, 2); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not is_column(3.0)
    assert not is_column([1.0])
    assert is_column(np.zeros(1))


def test_every_operation_has_a_way_for_columns() -> None:
    """No plain operation lacks its column."""
    names = [n for n in number._PLAIN if n != "above"]
    arguments = {"ceil": 1, "log2": 1}
    for name in names:
        if name in number._COLUMN:
            continue
        column = np.array([2.0, 3.0])
        assert evaluate(name, *[column] * arguments.get(name, 2)).shape == (2,)
