"""`--solve`: the largest or the smallest value of a field that keeps the verdict and the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._case import load_the_model
from shardwise.answers._converters import fail
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, command_lines
from shardwise.answers._questions import (
    Questions,
    VaryPoint,
    again,
    kind_of,
    points_table,
    shown_value,
    title_of,
    write_rows,
)
from shardwise.answers._search_flags import broken_limits
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.hardware import Cluster

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
    "max_sequences",
    "rank",
    "adapters",
)
# Degrees and devices help one limit and hurt another: every one that may be is tried, from the smallest.
SCANNED = ("devices", "tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp")
# Layers that lie on the host (llama.cpp) or are recomputed: every number is tried, the fastest first.
SPLITS = ("gpu_layers", "cpu_experts", "recompute_layers")
# Real numbers: whether the smallest is wanted.
REAL = {"rate": False, "price": False, "tokens": False, "slow_bandwidth": True, "fast_bandwidth": True,
        "nic_bandwidth": True, "memory": True, "memory_bandwidth": True, "peak_flops": True,
        "oversubscription": False}  # fmt: skip
MOST_WHOLE, MOST_DEVICES = 2**30, 2**16
_LOW, _HIGH = 1e-4, 1e18
# Significant digits of a real number that is solved for, and of one where each value takes a search.
_DIGITS, _FEW_DIGITS = 4, 3
_ROUND, _MANY_WAYS = 128, 1024
_SEARCHED = 4096
_SHOWN = 9


def solvable() -> tuple[str, ...]:
    """Return every field that some command can be solved for."""
    return (*MONOTONE, *SCANNED, *SPLITS, *REAL)


def _fields(questions: Questions) -> list[str]:
    """Return the fields that can be solved for: what a search tries itself is none, nor a price that bounds nothing."""
    flags, searches = questions.command.flags, questions.inputs.command == "plan"
    held = [n for n in solvable() if n in flags and flags[n].group not in ("space", "search")]
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
        if value not in tried:
            tried[value] = questions.at({field: int(value) if value == int(value) else value})
        return tried[value].keeps(inputs)

    best = _sought(field, at, questions)
    points = [tried[value] for value in sorted(tried)]
    others = [one for point in points for one in point.problems if one.field not in ("plan", field)]
    if best is None and others and all(p.report is None or not p.report.fits for p in points):
        raise InputError(dict.fromkeys(others))  # what other fields lack, not what this one may be
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
    plan = "" if best is None else tried[best].plan

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
        for note in (beyond, *_warnings(inputs, field, best, tried)):
            made.note(note)
        made.blank()
        points_table(made, _near(points, best, field), inputs, (field,))
        if best is not None:
            made.blank()
            command_lines(made, "AGAIN", again(inputs, {"solve": None, **_typed(questions, field, best)}))
        return made

    return Answer(0 if best is not None else 1, tree, page)


def _wants_least(field: str) -> bool:
    return field in (*SCANNED, "cpu_experts", "recompute_layers") or REAL.get(field, False)


def _sentence(field: str, best: float | None) -> str:
    size = "smallest" if _wants_least(field) else "largest"
    if best is None:
        return f"no value of {field} keeps the verdict and the limits"
    return f"{field} {_shown(field, best)} is the {size} that keeps the verdict and the limits"


def _shown(field: str, value: float) -> str:
    return shown_value(field, int(value) if value == int(value) else value)


def _typed(questions: Questions, field: str, best: float) -> dict[str, object]:
    """Return the value that was found as flags say it."""
    if field == "devices":
        return {"on": questions.raw({field: int(best)})["on"]}
    return {field: _shown(field, best).replace(" ", "").replace(",", "")}


def _sought(field: str, at: Callable[[float], bool], questions: Questions) -> float | None:
    if field in REAL:
        digits = _FEW_DIGITS if questions.inputs.command == "plan" else _DIGITS
        return _real(at, REAL[field], _first(field, questions), digits)
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


def _first(field: str, questions: Questions) -> float:
    """Return where the end of a real number is sought first: what the devices have, or are found to carry."""
    if field == "rate":
        report = questions.at({field: 1}).report
        if report is None:
            return 1.0
        held = getattr(report, "base", report)
        spare = _room(questions)[1] / held.case.cluster.num_devices if questions.inputs.command == "plan" else 1.0
        return float(report.capacity_per_second * max(spare, 1.0)) or 1.0
    report = questions.at({}).report
    if report is None:
        return 1.0
    held = getattr(report, "base", report)
    if field == "tokens":
        return float(held.job.run_tokens or 1e9)
    return _held(held.case.cluster, field) or 1.0


def _held(cluster: Cluster, field: str) -> float:
    """Return what a cluster has of a real field, 0 where it has none or is not known to."""
    device = cluster.device
    try:
        known = {
            "price": cluster.usd_per_device_hour,
            "memory": device.memory_bytes,
            "memory_bandwidth": device.memory_bytes_per_second,
            "peak_flops": max(device.matrix_flops.values(), default=0.0),
            "slow_bandwidth": cluster.tiers[-1].bytes_per_second if cluster.tiers else 0.0,
        }
    except InputError:  # a device may not state it
        return 0.0
    return float(known.get(field) or 0.0)


def _digits(index: int, digits: int) -> float:
    """Return the number of so many significant digits at a place of all such, 1 at 0.

    >>> [_digits(i, 3) for i in (-900, -1, 0, 1, 900)]
    [0.1, 0.999, 1.0, 1.01, 10.0]
    """
    each = 9 * 10 ** (digits - 1)
    return float(f"{10 ** (digits - 1) + index % each}e{index // each - digits + 1}")


def _place(value: float, digits: int) -> int:
    """Return the place of the number of so many digits that is the last up to a value.

    >>> _place(1.014, 3), _digits(_place(3.352e12, 4), 4)
    (1, 3352000000000.0)
    """
    exponent: int = math.floor(math.log10(value) + 1e-12)
    lead: int = 10 ** (digits - 1)
    return 9 * lead * exponent + min(max(math.floor(value / 10.0**exponent * lead + 1e-6) - lead, 0), 9 * lead - 1)


def _real(at: Callable[[float], bool], least: bool, first: float, digits: int) -> float | None:
    """Return the last of the numbers of so many digits that keeps the verdict, sought around a first one.

    >>> _real(lambda value: value <= 53.219, False, 1.0, 4), _real(lambda value: value >= 53.219, True, 1e9, 4)
    (53.21, 53.22)
    >>> _real(lambda value: False, False, 1.0, 3)
    """
    low, high = _place(_LOW, digits), _place(_HIGH, digits)
    near = min(max(_place(first, digits), low), high)
    kept, stride = at(_digits(near, digits)), 9 * 10 ** (digits - 1) // 32
    way = -1 if least is kept else 1
    while True:
        far = min(max(near + way * stride, low), high)
        if far == near:
            return _digits(near, digits) if kept else None
        if at(_digits(far, digits)) is not kept:
            break
        near, stride = far, 2 * stride
    good, bad = (near, far) if kept else (far, near)
    while abs(good - bad) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if at(_digits(middle, digits)) else (good, middle)
    return _digits(good, digits)


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
        yield from range(layers + 1, -1, -1) if field == "gpu_layers" else range(field != "cpu_experts", layers + 1)
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


_LIKELY = 0.8


def _warnings(inputs: Inputs, field: str, best: float | None, tried: dict[float, VaryPoint]) -> list[str]:
    """Return what whoever takes the value should know: how sure it fits, what it goes beyond, where none is, why."""
    if best is None:
        if field != "devices" or inputs.command not in ("infer", "serve"):
            return []
        said = f"a replica keeps its degrees; `shardwise plan {inputs.command}"
        return [f"{said} --solve devices` tries the others" if inputs.command == "infer" else f"{said}` tries others"]
    report = getattr(tried[best].report, "base", tried[best].report)
    found = [text for text in report.assumptions if "exceed" in text]
    chance = getattr(report, "chance_to_fit", 1.0)
    if chance < _LIKELY and "risk" not in inputs.values and inputs.command != "plan":
        found.append(f"its chance to fit is {chance:.0%}; --risk 90% asks for one that is likelier to")
    return found


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
