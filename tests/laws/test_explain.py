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


@given(cases())
@tried(10)
def test_every_number_explains_itself(case: TrainingCase) -> None:
    """Opening any node of a step or of its memory gives named contributions that sum to it and hide nothing.

    Whatever opens says what it is, by a formula or a name. Where a choice binds, the contribution that won names the
    others and their slack, which is never negative.
    """
    answer = report(case)
    for root in (answer.explain("step"), answer.explain("memory")):
        choices = 0
        # What is nothing but rounding is of the size of the whole, and `sum` rounds otherwise from Python 3.12 on.
        tiny = 1e-15 * (1 + 10 * float(root.value))
        assert root.name
        for node in nodes(root):
            opened, words, sizes = parts(node), formula(node), dict[str, float]()
            assert words
            assert opened or node.name or words != f"{node.value:.6g}", node
            if opened:
                assert sum(p.amount for p in opened) == pytest.approx(float(node.value), rel=1e-9, abs=tiny), node
            for part in opened:
                assert part.label
                # Contributions of one number that differ in size differ in name too.
                assert part.label not in sizes, (node.name, part.label, part.amount, sizes[part.label])
                sizes[part.label] = part.amount
                if part.node is not None:
                    assert part.amount == pytest.approx(part.times * float(part.node.value), rel=1e-9, abs=tiny)
                choices += bool(part.choice)
                for rival in part.against:
                    assert part.choice in ("max", "min")
                    assert rival.label
                    assert rival.slack >= 0
        assert choices
