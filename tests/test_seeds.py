"""Side by side with other calculators: stored answers are ours of today, and every difference has its laws."""

from __future__ import annotations

import pytest
import seeds
from beside.answers import TOLERANCE, name_of

STORED = seeds.stored()
ROWS = {key: list(seeds.rows_of(entry)) for key, entry in STORED.items()}
# Every so many settings are asked of us anew; the rest were with the commit that stored them.
SAMPLE = 5


def test_every_tool_is_compared() -> None:
    """The four calculators are there, with at least thirty cases each."""
    assert STORED.keys() == seeds.TOOLS.keys()
    for key, rows in ROWS.items():
        assert len(rows) >= 30, key


@pytest.mark.parametrize("key", STORED)
def test_every_difference_is_explained(key: str) -> None:
    """Figures agree within 1 %, or amounts of named laws lead from ours to theirs within 1 %."""
    assert [(r.setting, r.figure, r.difference, r.rest) for r in ROWS[key] if not r.settled] == []


def test_laws_are_the_ones_that_are_stated() -> None:
    """Every law that moves a figure has its sentence, and every sentence moves one."""
    used = {law for rows in ROWS.values() for row in rows for law in row.apart}
    assert used == seeds.laws().keys()


@pytest.mark.parametrize("key", STORED)
def test_stored_answers_are_those_of_the_present_ledger(key: str) -> None:
    """A change of formulas asks for `python benchmarks/seeds.py --refresh`."""
    tool = seeds.tool_of(key)
    theirs = seeds.theirs_of(STORED[key])
    assert [name_of(s) for s in tool.settings] == list(theirs)
    for setting in [s for s in tool.settings if "error" not in theirs[name_of(s)]][::SAMPLE]:
        answers = tool.answers(setting)
        for figure, (unit, _, ours, _) in STORED[key]["settings"][name_of(setting)].items():
            assert answers[figure].unit == unit
            assert answers[figure].value == pytest.approx(ours, rel=1e-6, abs=1e-30), (name_of(setting), figure)


def test_a_figure_without_a_law_is_not_settled() -> None:
    """More than 1 % apart with no law, or with amounts that do not lead there, fails."""
    row = seeds.Row("setting", "figure", "B", 1.05, 1.0, {})
    assert not row.settled
    assert not row._replace(apart={"law": 0.02}).settled
    assert row._replace(apart={"law": 0.05}).settled
    assert row._replace(theirs=1 + TOLERANCE / 2).settled
