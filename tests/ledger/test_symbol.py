"""Recorded formulas: what a program computes is what the formula computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.ledger import symbol
from shardwise.ledger.number import above, ceil, divide, maximum, minimum, power
from shardwise.ledger.symbol import Graph, needed, never_less
from shardwise.search._program import MODE, PLACE, ROW, SITE, SPLIT, Program, ProgramShape

LEVELS = (0, ROW, ROW | MODE, ROW | PLACE, ROW | MODE | PLACE, SPLIT, SPLIT | SITE)
BINARY = (
    lambda a, b: a + b,
    lambda a, b: a - b,
    lambda a, b: a * b,
    lambda a, b: a / (b * b + 1),
    maximum,
    minimum,
    lambda a, b: above(a, b, a, 2 * b),
    lambda a, b: divide(a, b * b + 0.5),
    lambda a, b: ceil(a) + power(b * b, 0.5),
)
# Four rows of two splits; of the places of each split some lie alike, on one site.
SHAPE = ProgramShape(
    rows=4,
    modes=3,
    row=np.array([0, 0, 1, 2, 2, 2, 3]),
    splits=2,
    split=np.array([0, 0, 1, 1]),
    split_of=np.array([0, 0, 1, 1, 1]),
    site=np.array([0, 1, 0, 2, 3, 4, 2]),
)


def _values(level: int, seed: int) -> Any:
    """Return an input of a level, every other one never below zero, of these every other one never below one."""
    drawn = np.random.default_rng(seed).normal(size=SHAPE.of(level) if level else None)
    return abs(drawn) + float(seed % 4 == 3) if seed % 2 else drawn


def _given(graph: Graph, number: int, level: int) -> Any:
    """Return the symbol of an input."""
    return graph.given(f"x{number}", level, bool(number % 2), float(number % 4 == 3))


def _wide(value: Any, level: int) -> Any:
    """Return numbers of rows, splits, sites or places as they are on every place of every mode."""
    if not level:
        return value
    places = {4: SHAPE.row, 2: SHAPE.split[SHAPE.row], 5: SHAPE.site, 7: slice(None)}
    value = value[..., places[value.shape[-1]]]
    return np.broadcast_to(value, (SHAPE.modes, len(SHAPE.row)))


@given(
    st.lists(st.sampled_from(LEVELS), min_size=2, max_size=5),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=30),
    st.sampled_from((0.0, 1.0, 2.5)),
)
@tried(120)
def test_a_program_computes_its_formula(levels: list[int], steps: list[tuple[int, int, int]], constant: float) -> None:
    """Whatever its inputs vary with, every result of a program is that of the formula on arrays as wide as can be."""
    graph = Graph()
    given_values = {f"x{i}": _values(level, i) for i, level in enumerate(levels)}
    symbols: list[Any] = [constant, *(_given(graph, i, level) for i, level in enumerate(levels))]
    plain: list[Any] = [constant, *(_wide(given_values[f"x{i}"], level) for i, level in enumerate(levels))]
    with np.errstate(all="ignore"):
        for which, a, b in steps:
            symbols.append(BINARY[which](symbols[a % len(symbols)], symbols[b % len(symbols)]))
            plain.append(BINARY[which](plain[a % len(plain)], plain[b % len(plain)]))
    wanted = range(max(0, len(symbols) - 4), len(symbols))
    found = Program({str(i): symbols[i] for i in wanted}).run(given_values, SHAPE)
    for i in wanted:
        level = getattr(symbols[i], "level", 0)
        np.testing.assert_allclose(_wide(found[str(i)], level), np.broadcast_to(plain[i], (3, 7)), rtol=1e-12)


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12),
    st.sampled_from((0.0, 1.0, 2.5)),
)
@tried(200)
def test_what_is_refused_at_once_has_no_proof(steps: list[tuple[int, int, int]], constant: float) -> None:
    """That a symbol lacks an input of another one is told before a proof is looked for: none is lost by it."""

    def proven(looked_at: bool) -> list[bool]:
        graph = Graph()
        symbols: list[Any] = [constant, *(_given(graph, i, ROW) for i in range(4))]
        with pytest.MonkeyPatch.context() as patch:
            if not looked_at:
                patch.setattr(symbol, "_rises", lambda node: 0)
            for which, a, b in steps:
                symbols.append(BINARY[which](symbols[a % len(symbols)], symbols[b % len(symbols)]))
            return [never_less(a, b) for a in symbols for b in symbols]

    assert proven(True) == proven(False)


def test_what_is_never_the_largest_is_left_out() -> None:
    """Rounding keeps order: of sums, products and quotients that are ordered as their terms are, one is computed."""
    graph = Graph()
    x, y, z = (graph.given(name, ROW, positive=True) for name in "xyz")
    signed = graph.given("signed", ROW)
    assert maximum(x + minimum(y, z), x + z) is x + z
    assert maximum(maximum(x * 2, y), x * 3 + z) is maximum(x * 3 + z, y)
    assert maximum(x + y, x + z) is x + maximum(y, z)
    assert minimum(x / (y + 2), x / (y + 1)) is x / (y + 2)
    assert above(0.0, x + y, z, 1.0) == 1.0
    assert maximum(x + signed, x) is not x + signed
    assert maximum(signed * 2, signed * 3) is not signed * 3


def test_equal_expressions_are_one_symbol() -> None:
    """The same operation on the same arguments is recorded once, in either order where the order does not matter."""
    graph = Graph()
    x, y = graph.given("x", ROW), graph.given("y", PLACE)
    assert x + y is y + x
    assert maximum(x, y) is maximum(y, x)
    assert x - y is not y - x
    assert 0 * x == 0
    assert 1 * x is x
    assert x + 0 is x
    assert (x + y).level == ROW | PLACE
    assert [s.op for s in needed([(x + y) * (y + x)])] == ["given", "given", "add", "multiply"]
