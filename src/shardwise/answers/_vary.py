"""One question at many values: `--vary`, `--solve`, several devices in `--on`, and `--sensitivity`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._case import load_the_model
from shardwise.answers._converters import fail
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._questions import HEADLINES, Questions, VaryPoint, title_of, write_rows
from shardwise.answers._search_flags import broken_limits, limit_cells
from shardwise.answers._value_lists import MOST_ROWS, SHAPE, sized, values_of
from shardwise.errors import InputError
from shardwise.units import show_bytes, show_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def grid_of(inputs: Inputs) -> dict[str, list[str]]:
    """Return the values to try of each field that is varied; several devices in --on are values of it."""
    found: dict[str, list[str]] = {}
    on = str(inputs.values.get("on", ""))
    if "," in on:
        first, *rest = (one.strip() for one in on.split(","))
        if not all((first, *rest)):
            raise fail("on", on, "has no devices between two commas or at an end", "write for example 8xh100,8xa100")
        shape = SHAPE.fullmatch(first)
        found["on"] = [
            first,
            *(sized(one, int(shape[1])) if shape and not one[:1].isdigit() else one for one in rest),
        ]
    for text in inputs.get("vary", ()):
        key, _, spec = text.partition("=")
        key = key.strip().removeprefix("--").replace("-", "_")
        found[key] = values_of(spec, key)
        if not found[key]:
            raise fail("vary", text, "has no values", "for example --vary tp=1,2,4")
    rows = math.prod(map(len, found.values()))
    if rows > MOST_ROWS:
        raise fail("vary", f"{rows:,} rows", f"is more than {MOST_ROWS:,}", "name fewer values")
    return found


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
    inputs.problems.raise_if_any()
    if asked == ["solve"]:
        return solved(inputs, width)
    if asked:
        from shardwise.answers._sensitivity import moved

        return moved(inputs, width)
    return _table(inputs, width)


def _table(inputs: Inputs, width: int) -> Answer:
    questions, grid = Questions(inputs), grid_of(inputs)
    for key in grid:
        questions.check(key, "vary")
    points = [questions.at(dict(zip(grid, values, strict=True))) for values in product(*grid.values())]
    if all(point.report is None for point in points):
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
        page.blank()
        command_lines(page, "AGAIN", command_words(inputs.command, inputs.values))
        return page

    def draw() -> Figure:
        from shardwise.answers._plots_search import vary_figure

        return vary_figure(points, tuple(grid), inputs.command)

    return plotted(inputs, Answer(0 if any(point.keeps(inputs) for point in points) else 1, tree, page), draw)


def _word(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def points_table(page: Page, points: Sequence[VaryPoint], inputs: Inputs, fields: Sequence[str]) -> None:
    """Append the answers as a table, with what limits judge; a question that is refused says why below."""
    known = [p for p in points if p.report is not None]
    heads = [h for h in HEADLINES[inputs.command] if any(h.of(p.report) is not None for p in known)]
    limits = {} if inputs.command == "serve" or not known else limit_cells(inputs.values, known[0].report)
    # Energy is of what is compared across devices, and of who asks for it.
    powered = ("on" in fields or inputs.get("energy")) and any(p.kwh is not None for p in known)
    energy = ["kWh/M"] if powered else []
    rows = [[*(name.replace("_", " ") for name in fields), *(h.head for h in heads), *energy, *limits]]
    refused: dict[str, int] = {}
    for point in points:
        cells = [_word(point.values[name]) for name in fields]
        if point.report is None:
            text = "; ".join(f"{p.field}: {p.rule}" for p in point.problems)
            cells += [f"[{refused.setdefault(text, len(refused) + 1)}]"]
        else:
            found = ((h, h.of(point.report)) for h in heads)
            cells += ["-" if value is None else h.show(value) for h, value in found]
            cells += ["-" if point.kwh is None else f"{point.kwh:.3g}"] if powered else []
            cells += limit_cells(inputs.values, point.report).values() if limits else ()
        rows.append(cells)
    page.table(rows, right=range(len(fields), len(rows[0])), header=True, indent=2)
    if refused:
        page.blank()
    for text, mark in refused.items():
        page.label(f"{f'[{mark}]':>9}", text, "dim", "dim")


# More of these never helps (laws of tests/laws: memory and seconds grow with them): the largest is found by bisection.
MONOTONE = (
    "seq_len",
    "micro_batch",
    "global_batch",
    "batch",
    "input_tokens",
    "output_tokens",
    "prefix_tokens",
    "users",
)
# Degrees and devices help one limit and hurt another: every one that may be is tried, from the smallest.
SCANNED = ("devices", "tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp")
# Parts of a model that llama.cpp splits with the host: every number of layers is tried, the fastest split first.
SPLITS = ("gpu_layers", "cpu_experts")
# Real numbers: whether the smallest is wanted.
REAL = {"rate": False, "price": False, "slow_bandwidth": True, "fast_bandwidth": True, "nic_bandwidth": True,
        "memory": True, "memory_bandwidth": True, "peak_flops": True, "oversubscription": False}  # fmt: skip
MOST_WHOLE, MOST_DEVICES = 2**30, 2**16
_LOW, _HIGH, _CLOSE = 1e-4, 1e18, 1e-3
_ROUND = 128
_SHOWN = 9


def solved(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `--solve`."""
    field = str(inputs.values["solve"]).strip().removeprefix("--").replace("-", "_")
    questions = Questions(inputs)
    questions.check(field, "solve")
    # A price moves nothing but dollars, of which some commands have no limit.
    every = [n for n in (*MONOTONE, *SCANNED, *SPLITS, *REAL) if n != "price" or "max_cost" in questions.command.flags]
    if field not in every:
        known = ", ".join(name for name in every if name == "devices" or name in questions.command.flags)
        raise fail(
            "solve", field, "is not a number that can be solved for", f"use one of {known}, or --vary {field}=A,B"
        )
    tried: dict[float, VaryPoint] = {}

    def at(value: float) -> bool:
        tried[value] = questions.at({field: int(value) if field not in REAL else value})
        return tried[value].keeps(inputs)

    best = _sought(field, at, questions)
    points = [tried[value] for value in sorted(tried)]
    if best is None and all(point.report is None for point in points):
        raise fail(
            "solve", field, "has no value that can be asked: " + str(points[0].problems[0]), "correct that first"
        )
    if best is not None and _unbounded(field, best, tried):
        limits = [_flag(key) for key, flag in questions.command.flags.items() if flag.group == "limits"]
        raise fail(
            "solve", field, "is bounded by nothing that was asked: every value keeps the verdict and the limits",
            f"add a limit that it moves, such as {', '.join(limits[:5])}",
        )  # fmt: skip
    beyond = _beyond(inputs, field, best, tried)
    rows = write_rows(inputs, points)

    def tree() -> dict[str, Any]:
        found = {"field": field, "value": best, "wanted": "least" if _wants_least(field) else "most"}
        return {
            "solve": {**found, "beyond": beyond},
            "at": None if best is None else tried[best].row(inputs.command),
            "rows": rows,
        }

    def page() -> Page:
        made = Page(width)
        made.label(
            "SOLVED" if best is not None else "NONE",
            _sentence(field, best),
            "bold green" if best is not None else "bold red",
        )
        made.note(title_of([tried[best]] if best is not None else points), "dim")
        if beyond:
            made.note(beyond)
        made.blank()
        points_table(made, _near(points, best, field), inputs, (field,))
        if best is not None:
            made.blank()
            kept = {key: value for key, value in inputs.values.items() if key != "solve"}
            command_lines(made, "AGAIN", command_words(inputs.command, {**kept, **_typed(questions, field, best)}))
        return made

    return Answer(0 if best is not None else 1, tree, page)


def _wants_least(field: str) -> bool:
    return field in (*SCANNED, "cpu_experts") or REAL.get(field, False)


def _sentence(field: str, best: float | None) -> str:
    size = "smallest" if _wants_least(field) else "largest"
    if best is None:
        return f"no value of {field} keeps the verdict and the limits"
    return f"{field} {_shown(field, best)} is the {size} that keeps the verdict and the limits"


def _shown(field: str, value: float) -> str:
    if field.endswith("bandwidth"):
        return show_count(value, "B/s")
    if field == "peak_flops":
        return show_count(value, "FLOP/s")
    if field == "memory":
        return show_bytes(value)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.5g}"


def _typed(questions: Questions, field: str, best: float) -> dict[str, object]:
    """Return the value that was found as flags say it."""
    if field == "devices":
        return {"on": questions.raw({field: int(best)})["on"]}
    return {field: best if field in REAL else int(best)}


def _sought(field: str, at: Callable[[float], bool], questions: Questions) -> float | None:
    if field in REAL:
        return _real(at, REAL[field])
    if field in (*SCANNED, *SPLITS):
        return next((value for value in _candidates(field, questions) if at(value)), None)
    return _largest(at, _step(field, questions))


def _step(field: str, questions: Questions) -> int:
    """Return what values are multiples of: sequences that ranks split evenly, batches of whole micro-batches."""
    if field not in ("seq_len", "global_batch"):
        return 1
    report = questions.at({}).report
    if report is None:
        return _ROUND if field == "seq_len" else 1
    plan = report.plan
    if field == "seq_len":
        return math.lcm(_ROUND, 2 * plan.cp * plan.tp)
    return int(plan.micro_batch * plan.dp * (plan.pp if plan.vpp > 1 else 1))


def _largest(at: Callable[[float], bool], step: int) -> float | None:
    """Return the largest multiple of a step that keeps the verdict: doubled until it does not, then halved between.

    >>> _largest(lambda value: value <= 1000, 8)
    1000
    """
    low, high = 0, step
    while high <= MOST_WHOLE and at(high):
        low, high = high, 2 * high
    while high - low > step:
        middle = (low + high) // 2 // step * step
        low, high = (middle, high) if at(middle) else (low, middle)
    return low or None


def _real(at: Callable[[float], bool], least: bool) -> float | None:
    """Return the end of the real numbers that keep the verdict, to a thousandth.

    >>> round(_real(lambda value: value <= 50, False), 0), round(_real(lambda value: value >= 50, True), 0)
    (50.0, 50.0)
    """
    good, bad = (_HIGH, _LOW) if least else (_LOW, _HIGH)
    if not at(good):
        return None
    if at(bad):
        return bad
    while max(good, bad) / min(good, bad) > 1 + _CLOSE:
        middle = math.sqrt(good * bad)
        good, bad = (middle, bad) if at(middle) else (good, middle)
    return good


def _candidates(field: str, questions: Questions) -> Iterator[int]:
    """Yield the values that may be: devices by doubling and then by whole nodes, degrees that divide the devices."""
    from shardwise.hardware import Cluster

    if field in SPLITS:
        model = load_the_model(questions.inputs)
        layers = model.num_layers if model is not None else 0
        yield from range(layers + 1, -1, -1) if field == "gpu_layers" else range(layers + 1)
        return
    text = str(questions.raw({}).get("on", ""))
    cluster = Cluster.parse(text) if text[:1].isdigit() else None
    if field != "devices":
        count = cluster.num_devices if cluster is not None else 1024
        yield from (value for value in range(1, count + 1) if count % value == 0)
        return
    node = cluster.devices_per_node if cluster is not None else 8
    yield from (2**i for i in range(int(math.log2(max(node, 1))) + 1))
    nodes = 2
    while nodes * node <= MOST_DEVICES:
        yield nodes * node
        nodes += max(1, nodes // 8)


def _beyond(inputs: Inputs, field: str, best: float | None, tried: dict[float, VaryPoint]) -> str:
    """Return why the next value that was tried does not keep the verdict."""
    sign = -1 if _wants_least(field) else 1
    further = [value for value in tried if best is None or sign * value > sign * best]
    if not further:
        return "every value that was tried keeps them"
    value = min(further, key=lambda v: sign * v)
    return f"{field} {_shown(field, value)} does not: {_reason(inputs, tried[value])}"


def _unbounded(field: str, best: float, tried: dict[float, VaryPoint]) -> bool:
    """Return whether only what may be typed ends the values that keep the verdict."""
    further = [point for value, point in tried.items() if (value < best if _wants_least(field) else value > best)]
    typed = all(point.report is None and all(p.field == field for p in point.problems) for point in further)
    return field in (*MONOTONE, *REAL) and typed


def _reason(inputs: Inputs, point: VaryPoint) -> str:
    report = point.report
    if report is None:
        return "; ".join(f"{p.field} {p.rule}" for p in point.problems)
    serves = inputs.command == "serve"
    if not report.fits:
        return "it does not fit"
    if serves and not report.stable:
        return "the queue grows without end"
    broken = [f"{o.quantile}_{o.metric}" for o in report.broken] if serves else broken_limits(inputs.values, report)
    return "it misses " + ", ".join(map(_flag, broken)) if broken else "it is too risky"


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def _near(points: list[VaryPoint], best: float | None, field: str) -> list[VaryPoint]:
    """Return the points around the answer."""
    at = next((i for i, p in enumerate(points) if float(str(p.values[field])) == best), 0)
    start = max(0, min(at - _SHOWN // 2, len(points) - _SHOWN))
    return points[start : start + _SHOWN]
