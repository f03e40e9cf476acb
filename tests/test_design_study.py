"""The design study of the examples runs, and what it says holds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "design-study"
MODELS = ("GPT3-1T", "ViT-ERA5")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the quick study's figures and of what it printed."""
    folder = tmp_path_factory.mktemp("study")
    command = [sys.executable, str(FOLDER / "study.py"), "--quick", "--out", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    (folder / "printed.txt").write_text(run.stdout, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def printed(drawn: Path) -> str:
    """What the quick study printed."""
    return (drawn / "printed.txt").read_text(encoding="utf-8")


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The questions of the study as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import sections  # type: ignore[import-not-found]

    yield sections
    for name in ("sections", "searches", "cases"):
        sys.modules.pop(name, None)


def blocks(printed: str, title: str) -> list[list[list[str]]]:
    """Return the tables under a title, each as rows of cells."""
    found = []
    for block in printed.split("\n\n"):
        lines = block.strip().splitlines()
        if lines and lines[0].startswith(title):
            found.append([re.split(r"\s{2,}", line.strip()) for line in lines[1:]])
    return found


def numbers(cells: list[str]) -> list[float]:
    """Return the cells that are numbers."""
    return [float(c.replace(",", "")) for c in cells if re.fullmatch(r"[\d.,]+", c)]


@pytest.mark.parametrize("name", ["scaling", "layouts", "degrees", "sweeps", "capacity", "generations"])
def test_figures_are_drawn(drawn: Path, name: str) -> None:
    """Every figure is written as SVG and as PNG."""
    assert (drawn / f"{name}.svg").read_text(encoding="utf-8").rstrip().endswith("</svg>")
    assert (drawn / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("count", ["512", "4,096", "16,384"])
def test_best_plans_are_named_at_every_count(printed: str, count: str) -> None:
    """Each model has a best plan on each system and count, whose degrees multiply to the devices."""
    tables = blocks(printed, "BEST PLANS")
    assert len(tables) == 4
    for rows in tables:
        plan = next(row for row in rows if row[0] == count)[3]
        degrees = dict(re.findall(r"(tp|tp2|cp|pp|dp) (\d+)", plan.partition(" (fast")[0]))
        product = 1
        for degree in degrees.values():
            product *= int(degree)
        assert f"{product:,}" == count


def test_shares_of_a_step_add_up(printed: str) -> None:
    """What a step is made of adds up to the step, but for rounding to whole percents."""
    for rows in blocks(printed, "BEST PLANS"):
        for row in rows[1:]:
            assert abs(sum(numbers(row[4:])) - 100) <= 3


def test_days_fall_with_devices(printed: str) -> None:
    """More devices end the same run sooner, on every system."""
    tables = blocks(printed, "STRONG SCALING")
    assert len(tables) == len(MODELS)
    for rows in tables:
        for row in rows[1:]:
            days = numbers(row)
            assert len(days) == 3
            assert days == sorted(days, reverse=True)
    assert "on 4 of 4 systems and models" in printed


def test_maps_never_get_slower_with_more_memory_or_bandwidth(printed: str) -> None:
    """More capacity, more bandwidth and more FLOP/s never lengthen a run."""
    tables = blocks(printed, "MAP")
    assert len(tables) == 2 * len(MODELS)
    for rows in tables:
        days = [numbers(row)[1:] for row in rows[1:]]
        for lines in (days, list(zip(*days, strict=True))):
            assert all(list(line) == sorted(line, reverse=True) for line in lines)


def test_one_front_answers_every_capacity(study: Any) -> None:
    """The fastest plan of a front within a capacity is what a search on devices of that capacity finds."""
    import searches  # type: ignore[import-not-found]

    ask = study.capacity_asks(study.QUICK)[1]
    front = searches.answer(ask)
    for capacity in (80 * 10**9, 192 * 10**9, 400 * 10**9):
        memory = {"memory_bytes": capacity, "usable_memory_bytes": capacity}
        rates = tuple({**dict(ask.rates), **memory}.items())
        alone = searches.answer(replace(ask, rates=rates))
        assert front.within(capacity, study.MAP_COUNT) == alone.best[study.MAP_COUNT].seconds


def test_one_fixed_degree_leaves_several_minima(printed: str) -> None:
    """A row of plans in which tp stands has more than one local minimum: the space is not convex."""
    said = re.search(
        r"with one degree fixed, (\d+) of (\d+) rows have more than one local minimum: not convex", printed
    )
    assert said is not None
    assert 1 <= int(said[1]) <= int(said[2])


def test_long_sequences_gain_more_of_a_second_dimension(printed: str) -> None:
    """The best 2D plan never loses to the best 1D plan, and gains more where sequences are long."""
    gains = {}
    for model in MODELS:
        said = re.search(rf"{model}.*: the best 2D plan takes ([\d.]+) to ([\d.]+) of the best 1D", printed)
        assert said is not None
        gains[model] = float(said[1])
        assert float(said[2]) <= 1
    assert gains["ViT-ERA5"] < gains["GPT3-1T"]


def test_published_plans_are_judged(printed: str) -> None:
    """Each published best plan has its seconds and bytes here, and some of them do not fit."""
    rows = blocks(printed, "PUBLISHED")[0][1:]
    assert len(rows) == 15
    verdicts = [row[-1] for row in rows]
    assert set(verdicts) == {"fits", "does not fit"}
    for row in rows:
        published, here = numbers(row)[1:3]
        assert here > published
