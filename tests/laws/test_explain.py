"""Every number explains itself: parts add up, formulas are written, choices state what lost, names are distinct."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from laws.helpers import report, tried
from laws.strategies import cases
from shardwise.ledger.traced import Traced, formula, parts
from shardwise.training import TrainingCase


def nodes(root: Traced) -> Iterator[Traced]:
    """Yield every number that opening a number again and again shows, each once."""
    seen, waiting = set[int](), [root]
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        waiting += [p.node for p in parts(node) if p.node is not None]


def _roots(case: TrainingCase) -> tuple[Traced, Traced]:
    answer = report(case)
    return answer.explain("step"), answer.explain("memory")


@given(cases())
@tried(25)
def test_parts_add_up_to_their_number(case: TrainingCase) -> None:
    """Opening any node of a step or of its memory gives contributions that sum to it."""
    for root in _roots(case):
        for node in nodes(root):
            found = parts(node)
            if found:
                assert sum(p.amount for p in found) == pytest.approx(float(node.value), rel=1e-9, abs=1e-15), node
            for part in found:
                if part.node is not None:
                    assert part.amount == pytest.approx(part.times * float(part.node.value), rel=1e-9, abs=1e-15)


@given(cases())
@tried(25)
def test_every_node_has_a_formula_and_every_leaf_a_name(case: TrainingCase) -> None:
    """Whatever opens says what it is: a formula of named numbers, or a name."""
    for root in _roots(case):
        assert root.name
        for node in nodes(root):
            found = parts(node)
            assert formula(node)
            assert found or node.name or formula(node) != f"{node.value:.6g}", node
            assert all(p.label for p in found)


@given(cases())
@tried(25)
def test_names_hide_nothing(case: TrainingCase) -> None:
    """Contributions of one number that differ in size differ in name too."""
    for root in _roots(case):
        for node in nodes(root):
            sizes: dict[str, float] = {}
            for part in parts(node):
                assert part.label not in sizes, (node.name, part.label, part.amount, sizes[part.label])
                sizes[part.label] = part.amount


@given(cases())
@tried(25)
def test_a_maximum_states_what_lost(case: TrainingCase) -> None:
    """Where a choice binds, the contribution that won names the others and their slack, which is never negative."""
    for root in _roots(case):
        choices = 0
        for node in nodes(root):
            for part in parts(node):
                choices += bool(part.choice)
                for rival in part.against:
                    assert part.choice in ("max", "min")
                    assert rival.label
                    assert rival.slack >= 0
        assert choices
