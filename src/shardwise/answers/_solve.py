"""`--solve`: the largest or the smallest value of a field that keeps the verdict and the limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.answers import _commands as commands
from shardwise.answers._answer import Answer
from shardwise.answers._case import load_the_cluster, load_the_model
from shardwise.answers._converters import fail
from shardwise.answers._flags import MANY
from shardwise.answers._inputs import Inputs, read_values
from shardwise.answers._limits import broken_limits
from shardwise.answers._page import Page, command_lines
from shardwise.answers._plot import check_drawable, plotted
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
from shardwise.answers._solve_numbers import Alone, Keeps, fewest, largest, real
from shardwise.cost import WANTED_CHANCE
from shardwise.errors import InputError, Problems
from shardwise.records import replace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
# A batch or a sequence that is too small misses these, and a larger one keeps them: dollars and seconds of a run of so
# many tokens, dollars of a million, tokens a second.
HELPED = frozenset({"max_cost", "max_time", "min_rate"})
_DOUBLED = 2**10
# Degrees and devices help one limit and hurt another: every one that may be is tried, from the smallest.
SCANNED = ("devices", "tp", "tp2", "cp", "pp", "vpp", "dp", "ep", "etp")
# Layers that lie on the host (llama.cpp) or are recomputed: every number is tried, the fastest first.
SPLITS = ("gpu_layers", "cpu_experts", "recompute_layers")
# Real numbers: whether the smallest is wanted.
REAL = {"rate": False, "price": False, "tokens": False, "slow_bandwidth": True, "fast_bandwidth": True,
        "nic_bandwidth": True, "memory": True, "memory_bandwidth": True, "peak_flops": True,
        "oversubscription": False}  # fmt: skip
MOST_DEVICES = 2**16
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
    fields = [n for n in solvable() if n in flags and flags[n].group not in ("space", "search")]
    return [
        *(n for n in fields if n != "price" or "max_cost" in flags),
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


def _searched(inputs: Inputs, questions: Questions, field: str) -> tuple[float | None, dict[float, VaryPoint]]:
    """Return the value that is asked for, None where none keeps the verdict, and the points that were tried."""
    tried: dict[float, VaryPoint] = {}

    def at(value: float) -> bool:
        if value not in tried:
            tried[value] = questions.at({field: int(value) if value == int(value) else value})
        return tried[value].keeps(inputs)

    def alone(value: float) -> Callable[[float], bool]:
        return _keeps_on(questions, field, tried[value].report)

    def but(value: float) -> bool:
        return at(value) or _spared(inputs, tried[value])

    searches = inputs.command == "plan" and kind_of(inputs) in ("train", "infer")
    asked = HELPED & inputs.values.keys() or (inputs.command, field) == ("serve", "max_sequences")
    best = _sought(field, at, questions, alone if searches else None, but if asked else None)
    others = dict.fromkeys(
        one for _, point in sorted(tried.items()) for one in point.problems if one.field not in ("plan", field)
    )
    if best is None and others and (len(others) == 1 or all(p.report is None for p in tried.values())):
        raise InputError(others)  # what other fields lack, not what this one may be
    if best is not None and _unbounded(field, best, tried):
        raise _endless(questions, field)
    return best, tried


def solved(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `--solve`."""
    field = str(inputs.values["solve"]).strip().removeprefix("--").replace("-", "_")
    questions = Questions(inputs)
    _checked(questions, field)
    check_drawable(inputs)
    best, tried = _searched(inputs, questions, field)
    points = [tried[value] for value in sorted(tried)]
    plan = "" if best is None else tried[best].plan
    beyond = _beyond(inputs, field, best, tried)
    rows = write_rows(inputs, points)

    def tree() -> dict[str, Any]:
        answer_tree = {"field": field, "value": best, "wanted": "least" if _wants_least(field) else "most"}
        return {
            "solve": {**answer_tree, "beyond": beyond, **({"plan": plan} if plan else {})},
            "at": None if best is None else tried[best].row(inputs),
            "rows": rows,
        }

    def page() -> Page:
        made = Page(width)
        word, style = ("NONE", "bold red") if best is None else ("SOLVED", "bold green")
        made.label(word, _sentence(field, best), style)
        made.note(title_of(points if best is None else [tried[best]]), "dim")
        for note in (*([f"by {plan}"] if plan else []), beyond, *_warnings(inputs, field, best, tried)):
            made.note(note)
        made.blank()
        points_table(made, _near(points, best, field), inputs, (field,))
        if best is not None:
            made.blank()
            solved_values = {**questions.degrees([field]), **_typed(questions, field, best)}
            command_lines(made, "AGAIN", again(inputs, {"solve": None, **solved_values}))
        return made

    def draw() -> Figure:
        from shardwise.answers._plots_search import vary_figure

        near = _near(points, best, field)
        shown = [replace(point, values={field: _shown(field, float(str(point.values[field])))}) for point in near]
        return vary_figure(shown, (field,), kind_of(inputs))

    return plotted(inputs, Answer(0 if best is not None else 1, tree, page), draw)


def _endless(questions: Questions, field: str) -> InputError:
    """Return what is wrong where every value of a field keeps the verdict: the limits that would end it."""
    price = field == "price"
    flags = questions.command.flags.items()
    limits = [_flag(key) for key, flag in flags if flag.group == "limits" and (not price or key == "max_cost")]
    more = " beside --tokens" if price and kind_of(questions.inputs) == "train" else ""
    return fail(
        "solve", field, "is bounded by nothing that was asked: every value keeps the verdict and the limits",
        f"add a limit that it moves, such as {', '.join(limits[:5])}{more}",
    )  # fmt: skip


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


def _spared(inputs: Inputs, point: VaryPoint) -> bool:
    """Return whether a point keeps the verdict without the limits that more of a field may help."""
    if point.report is None or inputs.command not in ("train", "infer"):
        return False
    others = replace(inputs, values={key: value for key, value in inputs.values.items() if key not in HELPED})
    return point.keeps(others)


def _sought(field: str, at: Keeps, questions: Questions, alone: Alone | None, but: Keeps | None) -> float | None:
    if field in REAL:
        digits = _FEW_DIGITS if questions.inputs.command == "plan" else _DIGITS
        return real(at, REAL[field], _first(field, questions), digits, alone)
    if field == "devices" and questions.inputs.command == "plan":
        return fewest(at, *_room(questions))
    if field in (*SCANNED, *SPLITS):
        return next((value for value in _candidates(field, questions) if at(value)), None)
    step = _step(field, questions)
    if but is not None and questions.inputs.command not in ("train", "infer"):
        # Each of these takes a search or a load: few are asked.
        return largest(at, step, lambda value: value <= _DOUBLED * step)
    return largest(at, step, but)


def _keeps_on(questions: Questions, field: str, report: Any) -> Keeps:
    """Return what says whether the plan that a search found keeps the verdict and the limits at other values."""
    inputs, kind = questions.inputs, kind_of(questions.inputs)
    command, home = commands.command(kind), import_module(f"shardwise.answers._{kind}")
    case = import_module(f"shardwise.answers._plan_{kind}").case_of(inputs, report)
    case = {key: value for key, value in case.items() if key in command.flags and key not in MANY}

    def keeps(value: float) -> bool:
        own = Inputs(command=kind)
        try:
            read_values({**case, field: int(value) if value == int(value) else value}, command, own)
            own.problems.raise_if_any()
            answered = home.ask(own)
        except InputError:
            return False
        likely = answered.chance_to_fit >= inputs.get("risk", WANTED_CHANCE)
        return bool(likely and not broken_limits(inputs.values, answered))

    return keeps


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


def _first(field: str, questions: Questions) -> float:
    """Return where the end of a real number is sought first: what the devices have, or are found to carry."""
    if field == "rate":
        report = questions.at({field: 1}).report
        if report is None:
            return 1.0
        base = getattr(report, "base", report)
        spare = _room(questions)[1] / base.case.cluster.num_devices if questions.inputs.command == "plan" else 1.0
        return float(report.capacity_per_second * max(spare, 1.0)) or 1.0
    if field == "tokens":
        return float(questions.inputs.get("tokens") or 1e9)
    cluster = load_the_cluster(replace(questions.inputs, notes=[], problems=Problems(), bad=set()))
    return (0.0 if cluster is None else _current(cluster, field)) or 1.0


def _current(cluster: Cluster, field: str) -> float:
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


def _room(questions: Questions) -> tuple[int, int]:
    """Return the devices of a node and the most that are tried: those that --on counts, or many."""
    from shardwise.hardware import Cluster

    text = str(questions.raw({}).get("on", ""))
    cluster = Cluster.parse(text) if text[:1].isdigit() else None
    return (cluster.devices_per_node, cluster.num_devices) if cluster is not None else (8, _SEARCHED)


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
    asked = [value for value in further if tried[value].report is not None] if best is None else []
    value = min(asked or further, key=lambda v: sign * v)
    return f"{field} {_shown(field, value)} does not: {_reason(inputs, tried[value])}"


_LIKELY = 0.8


def _warnings(inputs: Inputs, field: str, best: float | None, tried: dict[float, VaryPoint]) -> list[str]:
    """Return what whoever takes the value should know: how sure it fits, what it goes beyond, where none is, why."""
    if best is None:
        if field != "devices" or inputs.command not in ("infer", "serve"):
            return []
        suggestion = f"a replica keeps its degrees; `shardwise plan {inputs.command}"
        return [
            f"{suggestion} --solve devices` tries the others"
            if inputs.command == "infer"
            else f"{suggestion}` tries others"
        ]
    report = getattr(tried[best].report, "base", tried[best].report)
    warnings = [text for text in report.assumptions if "exceed" in text]
    chance = getattr(report, "chance_to_fit", 1.0)
    if chance < _LIKELY and "risk" not in inputs.values and inputs.command != "plan":
        warnings.append(f"its chance to fit is {chance:.0%}; --risk 90% asks for one that is likelier to")
    return warnings


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
