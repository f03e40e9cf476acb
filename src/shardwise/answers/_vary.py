"""One question at many values: `--vary`, several devices in `--on`, and where `--solve` and `--sensitivity` go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._converters import fail
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines
from shardwise.answers._plan import asks_to_tune
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._questions import Questions, VaryPoint, again, kind_of, points_table, title_of, write_rows
from shardwise.answers._value_lists import MOST_ROWS, SHAPE, listed_values, sized
from shardwise.errors import InputError, Problems

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def grid_of(inputs: Inputs) -> dict[str, list[str]]:
    """Return the values to try of each field that is varied; several devices in --on are values of it."""
    grid: dict[str, list[str]] = {}
    on = str(inputs.values.get("on", ""))
    if "," in on:
        first, *rest = (one.strip() for one in on.split(","))
        if not all((first, *rest)):
            raise fail("on", on, "has no devices between two commas or at an end", "write for example 8xh100,8xa100")
        shape = SHAPE.fullmatch(first)
        grid["on"] = [
            first,
            *(sized(one, int(shape[1])) if shape and not one[:1].isdigit() else one for one in rest),
        ]
    for text in inputs.get("vary", ()):
        key, _, spec = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        grid[key] = listed_values(spec, key)
        if not grid[key]:
            raise fail("vary", text, "has no values", "for example --vary tp=1,2,4")
    rows = math.prod(map(len, grid.values()))
    if rows > MOST_ROWS:
        raise fail("vary", f"{rows:,} rows", f"is more than {MOST_ROWS:,}", "name fewer values")
    return grid


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of one question at many values."""
    check_drawable(inputs)
    asked = [key for key in ("solve", "sensitivity") if inputs.get(key)]
    several = [
        key
        for key in ("vary", "on")
        if (key == "vary" and "vary" in inputs.values) or (key == "on" and "," in str(inputs.get("on")))
    ]
    if len(asked) + bool(several) > 1:
        inputs.fail(asked[-1], inputs.get(asked[-1]), "is asked beside other values", "ask one after the other")
    if "explain" in inputs.values:
        inputs.fail("explain", inputs.values["explain"], "opens one answer, and several are asked", "ask for one")
    if asked == ["solve"] and inputs.command == "plan" and asks_to_tune(inputs):
        rule = "is asked of plans, and these are ways to fine-tune on given devices"
        remedy = "leave it out: the column longest has the longest sequence; or give --global-batch to search plans"
        inputs.fail("solve", inputs.values["solve"], rule, remedy)
    inputs.problems.raise_if_any()
    if asked == ["solve"]:
        from shardwise.answers._solve import solved

        return solved(inputs, width)
    if asked:
        from shardwise.answers._sensitivity import moved

        return moved(inputs, width)
    return _table(inputs, width)


def _readable(questions: Questions, grid: Mapping[str, Sequence[str]]) -> None:
    """Raise `InputError` with every value that its field cannot be; values that the laws refuse are rows of their own.

    A range of a field that a search tries itself is a value of it.
    """
    from shardwise.hardware import Cluster

    problems = Problems()
    for key, values in grid.items():
        for value in values:
            with problems.collect():
                if key == "on" and not value.endswith(".toml"):
                    Cluster.parse(value)
                elif key in questions.command.flags:
                    questions.command.flags[key].kind.read(value, key)
    problems.raise_if_any()


def _plans(page: Page, points: Sequence[VaryPoint]) -> None:
    """Append the best plan of each value, where searches are asked."""
    plans = [point for point in points if point.plan]
    if plans:
        page.blank()
    for point in plans:
        page.note(f"{', '.join(f'{name} {value}' for name, value in point.values.items())}: {point.plan}")


def _assumed(points: Sequence[VaryPoint]) -> list[str]:
    """Return what was assumed of every value, then of each of several devices alone, such as its price.

    What else differs, such as the replicas that fill the devices, follows from the values.
    """
    answered = [point for point in points if point.report is not None]
    if not answered:
        return []
    everywhere = _shared(answered)
    devices = dict.fromkeys(point.values["on"] for point in answered if "on" in point.values)
    alone = [
        f"{device}: {note}"
        for device in devices
        for note in _shared([point for point in answered if point.values["on"] == device])
        if note not in everywhere
    ]
    return [*everywhere, *alone]


def _shared(points: Sequence[VaryPoint]) -> list[str]:
    return [note for note in points[0].assumed if all(note in point.assumed for point in points)]


def _table(inputs: Inputs, width: int) -> Answer:
    questions, grid = Questions(inputs), grid_of(inputs)
    for key in grid:
        questions.check(key, "vary")
    _readable(questions, grid)
    points = [questions.at(dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    if not any(point.report is not None or point.infeasible for point in points):
        raise InputError(dict.fromkeys(problem for point in points for problem in point.problems))
    rows = write_rows(inputs, points)

    def tree() -> dict[str, Any]:
        return {"vary": grid, "rows": rows}

    def page() -> Page:
        page = Page(width)
        page.label("VARY", ", ".join(grid), "bold", "bold")
        page.note(title_of(points), "dim")
        page.blank()
        points_table(page, points, inputs, tuple(grid))
        _plans(page, points)
        page.blank()
        assumptions(page, _assumed(points))
        page.blank()
        command_lines(page, "AGAIN", again(inputs, {}))
        return page

    def draw() -> Figure:
        from shardwise.answers._plots_search import vary_figure

        return vary_figure(points, tuple(grid), kind_of(inputs))

    return plotted(inputs, Answer(0 if any(point.keeps(inputs) for point in points) else 1, tree, page), draw)
