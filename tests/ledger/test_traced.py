"""Traced numbers: arithmetic that records itself, opened into contributions, formulas and branches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laws.helpers import tried
from shardwise.ledger.number import above, divide, largest, maximum, minimum, power, total
from shardwise.ledger.traced import Traced, formula, leaf, named, operands, parts, plain, ratio, tracing


def _leaves(**values: float) -> tuple[Any, ...]:
    with tracing():
        return tuple(leaf(name, value, "a source", "bytes") for name, value in values.items())


def test_nothing_is_traced_outside() -> None:
    """Leaves and names are the plain value unless a trace is on."""
    assert leaf("a", 3) == 3
    assert named(3.0, "a") == 3.0
    with tracing():
        assert isinstance(leaf("a", 3), Traced)
    assert leaf("a", 3) == 3


def test_a_trace_ends_with_its_block_even_after_an_error() -> None:
    """An error inside leaves no trace on."""
    with pytest.raises(ValueError, match="inside"), tracing():
        raise ValueError("inside")
    assert leaf("a", 3) == 3


@given(st.lists(st.floats(0.5, 100), min_size=4, max_size=4))
@tried(25)
def test_arithmetic_is_the_plain_one(values: list[float]) -> None:
    """Every operator, from either side, has the bits of plain arithmetic."""

    def formulas(a: Any, b: Any, c: Any, d: Any) -> list[Any]:
        return [
            a + b,
            2 + a,
            a - b,
            2 - a,
            a * b,
            3 * a,
            a / b,
            1 / a,
            (a + b) * (c - d) / 7,
            power(a, 0.5) + largest([b, c]),
        ]

    traced = formulas(*_leaves(a=values[0], b=values[1], c=values[2], d=values[3]))
    assert [plain(x) for x in traced] == formulas(*values)
    assert all(float(x) == x.value for x in traced)


def test_a_leaf_knows_its_source_and_unit() -> None:
    """An input carries its name, who says so, and its unit."""
    (a,) = _leaves(a=3)
    assert (a.name, a.source, a.unit, int(a)) == ("a", "a source", "bytes", 3)
    assert parts(a) == []
    assert formula(a) == "a"
    assert "name='a'" in repr(a)


def test_sums_open_into_named_contributions() -> None:
    """A sum opens into its named terms with how often each counts, largest first; factors are told."""
    a, b = _leaves(a=2, b=5)
    whole = named(3 * named(a * a, "squares") + named(b - a, "rest"), "whole")
    assert [(p.label, p.amount, p.times) for p in parts(whole)] == [("squares", 12, 3), ("rest", 3, 1)]
    assert formula(whole) == "3 * squares + rest"
    assert [p.label for p in parts(whole.args[0].args[1])] == []


def test_differences_keep_their_sign() -> None:
    """What is taken off counts negative, and the contributions still add up."""
    a, b = _leaves(a=9, b=4)
    found = parts(named(named(a * 1.0, "gross") - named(b / 2, "discount"), "net"))
    assert {p.label: p.amount for p in found} == {"gross": 9, "discount": -2}


@pytest.mark.parametrize(("choose", "word", "won"), [(maximum, "max", "big"), (minimum, "min", "small")])
def test_a_choice_opens_to_the_branch_that_binds(choose: Any, word: str, won: str) -> None:
    """A maximum opens to the branch that binds, and states the slack of the other."""
    a, b = _leaves(a=10, b=4)
    big, small = named(a * 2, "big"), named(b * 2, "small")
    (part,) = parts(named(choose(small, big), "peak"))
    assert (part.label, part.choice) == (won, word)
    (rival,) = part.against
    assert rival.slack == 12
    assert rival.label == ("small" if won == "big" else "big")


def test_a_tie_states_no_slack() -> None:
    """Two equal branches: one binds, nothing was lost."""
    a, b = _leaves(a=2, b=2)
    (part,) = parts(named(maximum(named(a * 1.5, "one"), named(b * 1.5, "other")), "peak"))
    assert part.against == ()


def test_a_condition_opens_to_what_was_taken() -> None:
    """Above a threshold the branch taken is what opens."""
    a, b = _leaves(a=3, b=8)
    many = named(above(a, 1, named(b * 2, "ring"), 0 * b), "seconds")
    assert [(p.label, p.amount) for p in parts(many)] == [("ring", 16)]
    assert plain(above(a, 5, b, 0 * b)) == 0


def test_a_ratio_shows_both_terms() -> None:
    """A ratio gives numerator and denominator; a product does not."""
    a, b = _leaves(a=3, b=8)
    top, bottom = ratio(named(divide(a, b), "share")) or (None, None)
    assert (top, bottom) == (a, b)
    assert ratio(a * b) is None


def test_equal_terms_are_merged_and_counted() -> None:
    """The same node in a sum many times is one contribution that counts as often."""
    (a,) = _leaves(a=3)
    layer = named(a * 2, "layer")
    (part,) = parts(named(total([layer] * 12), "all layers"))
    assert (part.label, part.amount, part.times) == ("layer", 72, 12)


def test_terms_of_one_formula_and_two_values_stay_apart() -> None:
    """Numbers of one name may differ, and so may what is made of them: each term counts its own."""
    with tracing():
        terms = [leaf("wire", x) * leaf("count", 2.0) for x in (3.0, 5.0)]
        found = parts(terms[0] - terms[1] - terms[1] - terms[1] + leaf("start", 1.0))
    assert [(p.amount, p.times) for p in found] == [(-30.0, -3.0), (6.0, 1.0), (1.0, 1.0)]
    assert all(p.node is not None and p.amount == p.times * float(p.node.value) for p in found)


def test_formulas_name_what_stands_in_them() -> None:
    """The operands of a formula are its named numbers, each once."""
    a, b, c = _leaves(a=2, b=3, c=4)
    area = named((a + b) * c / a, "area")
    assert [o.name for o in operands(area)] == ["a", "b", "c"]
    assert formula(area) == "(a + b) * c / a"
    assert formula(named(a - (b - c), "x")) == "a - (b - c)"
    assert formula(named(a / (b * c), "x")) == "a / (b * c)"


def test_what_changes_nothing_is_left_out_of_formulas() -> None:
    """Adding nothing and multiplying by one do not show."""
    a, b = _leaves(a=2, b=3)
    assert formula(named(0 * a + 1 * b + 0, "x")) == "b"


def test_shared_numbers_are_opened_once_however_deep() -> None:
    """Sixty doublings of a shared number open at once, and count two to the sixtieth."""
    (a,) = _leaves(a=1.5)
    node = named(a * 2, "seed")
    x: Any = node
    for _ in range(60):
        x = x + x
    (part,) = parts(named(x, "doubled"))
    assert part.times == 2.0**60
    assert part.amount == pytest.approx(3.0 * 2.0**60)


def test_a_number_prints_as_what_sums_to_it() -> None:
    """Printed, a number shows its contributions with their shares, or the formula where it is no sum."""
    a, b = _leaves(a=20000, b=4)
    whole = named(named(a * 3, "many") + named(b * b, "few"), "whole")
    lines = str(whole).splitlines()
    assert [line.split() for line in lines] == [
        ["whole", "=", "60,016"], ["100.0%", "60,000", "many"], ["0.0%", "16", "few"],
    ]  # fmt: skip
    assert str(whole.contributions[1].node) == "few = 16 = b * b"
