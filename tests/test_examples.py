"""The examples run, and say where they are off."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "published"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "tables")
# Furthest that a figure of a table may be from its report, by script; what is known to be off has a table of its own.
NEAR = [
    ("megatron_lm", 0, 0.10),
    ("mt_nlg", 0, 0.10),
    ("fastertransformer", 0, 0.20),
    ("llama", 0, 0.35),
    ("megatron_tool", 0, 0.001),
    ("megatron_tool", 1, 0.02),
    ("megatron_tool", 2, 0.02),
    ("megatron_tool", 3, 0.0),
    ("cookbook", 2, 0.01),
    ("cookbook", 3, 0.01),
]


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The scripts as modules, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = (*SCRIPTS, "tables")
    # A folder of tests has the name of a script, and which of them a process has imported depends on its tests.
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


def test_the_page_shows_what_every_example_prints() -> None:
    """No script is left out of the README, whose outputs are held up to date with those of all documents."""
    assert set(SCRIPTS) == set(re.findall(r"<!-- output of examples/published/(\w+)\.py -->", README))


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_figure_that_is_far_off_says_why(name: str, examples: dict[str, ModuleType]) -> None:
    """A row with a figure off by over a tenth names a cause that the page states; sources have addresses."""
    page = examples[name].page()
    assert all("http" in source or "examples/" in source for source in page.sources)
    for row in examples["tables"].far_rows(page):
        assert row.why, row.case
        assert set(row.why) <= set(page.why), row.case


@pytest.mark.parametrize(("name", "table", "furthest"), NEAR)
def test_predictions_are_near_the_reports(
    name: str, table: int, furthest: float, examples: dict[str, ModuleType]
) -> None:
    """Runs whose plan the source states are predicted within a tenth, and what rests on assumptions within a third."""
    for row in examples[name].page().tables[table].rows:
        for pair in row.pairs:
            assert abs(pair.off) <= furthest, row.case


def test_the_search_ranks_the_stored_plans_as_they_were_stored(examples: dict[str, ModuleType]) -> None:
    """Sets of degrees come back in order; the two best are the two that are stored first."""
    script = examples["perf_estimates"]
    best = script.search().best
    assert len(script.STORED) <= len(best) <= script.TOP
    seconds = [report.step_seconds for report in best]
    assert seconds == sorted(seconds)
    degrees = [(report.plan.tp, report.plan.pp, report.plan.dp) for report in best[:2]]
    assert degrees == [(stored.tp, stored.pp, stored.dp) for stored in script.STORED[:2]]


def test_no_example_is_given_what_the_run_achieved() -> None:
    """No script imposes an efficiency or an achieved rate, save the ideal that a lower bound is compared with."""
    for path in FOLDER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("matmul_flops", "mfu", "(compute=", "memory_bytes_per_second", "fast_link", "slow_link"):
            assert word not in text, (path.name, word)
