"""What the benchmark of the search says of the part of a space that it evaluates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search import CLASSIC, Run, run, show
from shardwise.hardware import Cluster
from shardwise.models import load_model
from shardwise.plans import Training
from shardwise.search import SearchOptions
from shardwise.search._evaluator import PlanCounts

CASE = (load_model("llama-3.1-8b"), Cluster.parse("64xh100-sxm-80gb"), Training(seq_len=4096, global_batch=64))
WISH = SearchOptions(prune=False, rows=200)


@pytest.fixture(scope="module")
def part() -> Run:
    """Return the search of a small share of a space."""
    return run(CASE, CLASSIC, WISH, 1, 0.01)


def test_a_share_of_the_parts_is_searched_and_said(part: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A share that is less than a part is one part; the whole space has no fewer plans."""
    assert part.drawn == 1 < part.parts
    assert 0 < part.num_plans < run(CASE, CLASSIC, WISH, 1).num_plans
    show("pruning off", part, 1)
    assert f"in 1 of {part.parts:,} parts" in capsys.readouterr().out


def test_parts_without_a_legal_plan_have_no_rates(part: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Where laws refuse all that was drawn, nothing was timed, and the page says what to do."""
    none = replace(part, result=replace(part.result, partial=replace(part.result.partial, counts=PlanCounts())))
    show("pruning off", none, 1)
    said = capsys.readouterr().out
    assert "none   of the parts that were drawn: no rates; raise --share" in said
    assert "a second" not in said
