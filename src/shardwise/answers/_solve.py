"""`--solve`: the largest or the smallest value of a field that keeps the verdict and the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from shardwise.answers._answer import Answer
from shardwise.answers._case import load_the_model
from shardwise.answers._converters import fail
from shardwise.answers._files import command_words
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._questions import Questions, VaryPoint, kind_of, points_table, title_of, write_rows
from shardwise.answers._search_flags import broken_limits
from shardwise.units import show_bytes, show_count

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
_ROUND, _MANY_WAYS = 128, 1024
_SEARCHED = 4096
_SHOWN = 9


def _fields(questions: Questions) -> list[str]:
    """Return the fields that can be solved for: what a search tries itself is none, nor a price that bounds nothing."""
    flags, searches = questions.command.flags, questions.inputs.command == "plan"
    held = [
        n for n in (*MONOTONE, *SCANNED, *SPLITS, *REAL) if n in flags and flags[n].group not in ("space", "search")
    ]
    return [
        *(n for n in held if n != "price" or "max_cost" in flags),
        *([] if searches and kind_of(questions.inputs) == "serve" else ["devices"]),
    ]


def _checked(questions: Questions, field: str) -> None:
    """Raise `InputError` where a field cannot be solved for, with what can be or where its answer stands."""
    questions.check(field, "solve")
    flags, known = questions.command.flags, _fields(questions)
    if field in known:
        return
    if field in flags and flags[field].group == "limits":
        raise fail("solve", field, "is a limit: what is reached stands in every answer", "leave out --solve")
    if field == "devices":
        raise fail("solve", field, "is what plan serve answers by itself", "leave out --solve")
    if field in flags and questions.inputs.command == "plan":
        raise fail("solve", field, "is searched", f"use one of {', '.join(known)}")
    remedy = f"use one of {', '.join(known)}, or --vary {field}=A,B"
    raise fail("solve", field, "is not a number that can be solved for", remedy)


def solved(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `--solve`."""
    field = str(inputs.values["solve"]).strip().removeprefix("--").replace("-", "_")
    questions = Questions(inputs)
    _checked(questions, field)
    tried: dict[float, VaryPoint] = {}

    def at(value: float) -> bool:
        tried[value] = questions.at({field: int(value) if field not in REAL else value})
        return tried[value].keeps(inputs)

    best = _sought(field, at, questions)
    points = [tried[value] for value in sorted(tried)]
    if best is None and all(point.report is None and point.problems[0].field != "plan" for point in points):
        raise fail(
            "solve", field, "has no value that can be asked: " + str(points[0].problems[0]), "correct that first"
        )
    if best is not None and _unbounded(field, best, tried):
        flags = questions.command.flags.items()
        limits = [
            _flag(key) for key, flag in flags if flag.group == "limits" and (field != "price" or key == "max_cost")
        ]
        more = " beside --tokens" if field == "price" and kind_of(inputs) == "train" else ""
        raise fail(
            "solve", field, "is bounded by nothing that was asked: every value keeps the verdict and the limits",
            f"add a limit that it moves, such as {', '.join(limits[:5])}{more}",
        )  # fmt: skip
    beyond = _beyond(inputs, field, best, tried)
    rows = write_rows(inputs, points)
    plan = ""
    if best is not None and inputs.command == "plan":
        from shardwise.answers._plan import described

        plan = described(inputs, tried[best].report)

    def tree() -> dict[str, Any]:
        found = {"field": field, "value": best, "wanted": "least" if _wants_least(field) else "most"}
        return {
            "solve": {**found, "beyond": beyond, **({"plan": plan} if plan else {})},
            "at": None if best is None else tried[best].row(inputs),
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
        if plan:
            made.note(f"by {plan}")
        if beyond:
            made.note(beyond)
        made.blank()
        points_table(made, _near(points, best, field), inputs, (field,))
        if best is not None:
            made.blank()
            kept = {key: value for key, value in inputs.values.items() if key not in ("solve", "what")}
            name = f"plan {kind_of(inputs)}" if inputs.command == "plan" else inputs.command
            command_lines(made, "AGAIN", command_words(name, {**kept, **_typed(questions, field, best)}))
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
    return {field: _rounded(best, REAL[field]) if field in REAL else int(best)}


def _rounded(value: float, least: bool) -> float:
    """Return a number to five digits, on the side that keeps the verdict.

    >>> _rounded(3.47744096, False), _rounded(3.47744096, True)
    (3.4774, 3.4775)
    """
    scale = 10.0 ** (4 - math.floor(math.log10(value)))
    return (math.ceil if least else math.floor)(value * scale) / scale


def _sought(field: str, at: Callable[[float], bool], questions: Questions) -> float | None:
    if field in REAL:
        return _real(at, REAL[field])
    if field == "devices" and questions.inputs.command == "plan":
        return _fewest(at, *_room(questions))
    if field in (*SCANNED, *SPLITS):
        return next((value for value in _candidates(field, questions) if at(value)), None)
    return _largest(at, _step(field, questions))


def _step(field: str, questions: Questions) -> int:
    """Return what values are multiples of: sequences that ranks split evenly, batches of whole micro-batches."""
    if field not in ("seq_len", "global_batch"):
        return 1
    if questions.inputs.command == "plan":  # whose plans split what they are given in many ways
        return _MANY_WAYS if field == "seq_len" else _room(questions)[1]
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


def _room(questions: Questions) -> tuple[int, int]:
    """Return the devices of a node and the most that are tried: those that --on counts, or many."""
    from shardwise.hardware import Cluster

    text = str(questions.raw({}).get("on", ""))
    cluster = Cluster.parse(text) if text[:1].isdigit() else None
    return (cluster.devices_per_node, cluster.num_devices) if cluster is not None else (8, _SEARCHED)


def _fewest(at: Callable[[float], bool], node: int, most: int) -> float | None:
    """Return the fewest devices that keep the verdict: doubled until they do, then whole nodes between, by eighths.

    >>> _fewest(lambda value: value >= 40, 8, 1024), _fewest(lambda value: value >= 3, 8, 1024)
    (40, 4)
    """
    sizes = [2**i for i in range(int(math.log2(most)) + 1)]
    good = next((value for value in dict.fromkeys([*sizes, most]) if at(value)), None)
    if good is None or good // 2 < node:
        return good
    step = max(node, (good - good // 2) // 8 // node * node)
    return next((value for value in range(good // 2 + step, good, step) if at(value)), good)


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
        return "; ".join(p.rule if p.field == "plan" else f"{p.field} {p.rule}" for p in point.problems)
    serves = kind_of(inputs) == "serve"
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
