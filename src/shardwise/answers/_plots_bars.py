"""Plots of one plan or of two side by side: where its memory goes, and where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.answers._canvas import PALE, RED
from shardwise.answers._described import describe_job, describe_served
from shardwise.answers._plots import (
    AXES,
    Bar,
    BarStyle,
    Unit,
    bytes_unit,
    columns_of,
    legend,
    limit,
    plan_words,
    sheet,
    stack,
    time_unit,
    title_of,
    totals,
)
from shardwise.answers._train_tree import stage_parts, step_tree
from shardwise.records import dataclass
from shardwise.serving import InferReport, StepCost, time_tree
from shardwise.training import TrainReport, weighted
from shardwise.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY = {
    "weights": BarStyle("weights", "#0072B2"),
    "gradients": BarStyle("gradients", "#56B4E9"),
    "optimizer": BarStyle("optimizer state", "#332288"),
    "buffers": BarStyle("gathered weights", "#CC6677"),
    "activations": BarStyle("activations", "#009E73"),
    "logits": BarStyle("logits and loss", "#E69F00"),
    "recomputed": BarStyle("recomputed layer", "#117733"),
    "temporaries": BarStyle("temporaries", "#F0E442"),
    "allocator": BarStyle("allocator reserve", "#BBBBBB"),
    "context": BarStyle("context, communicators", "#888888"),
}
SERVED = {
    "weights": BarStyle("weights", "#0072B2"),
    "kv_cache": BarStyle("KV cache of the batch", "#009E73"),
    "working": BarStyle("activations or sampling", "#E69F00"),
    "context": BarStyle("context", "#888888"),
    "communicators": BarStyle("communicators", "#BBBBBB"),
    "graphs": BarStyle("captured graphs", "#DDDDDD"),
}
TIME = {
    "compute": BarStyle("forward and backward", "#0072B2"),
    "recompute": BarStyle("recompute", "#56B4E9"),
    **{f"exposed {a}": BarStyle(f"exposed: {label}", colour) for a, (label, colour) in AXES.items()},
    "bubble": BarStyle("pipeline bubble", PALE),
    "optimizer": BarStyle("optimizer step", "#332288"),
    "overhead": BarStyle("overhead of the framework", "#888888"),
    "passes": BarStyle("other passes of the method", "#117733"),
}
HIDDEN = {a: BarStyle(f"overlapped: {label}", colour, "////") for a, (label, colour) in AXES.items()}
PHASE = {
    "products": BarStyle("GEMMs", "#0072B2"),
    "attention": BarStyle("attention and cache", "#009E73"),
    "ends": BarStyle("embedding, head, sampling", "#F0E442"),
    "small": BarStyle("norms and element-wise", "#88CCEE"),
    **{f"exposed {a}": BarStyle(f"exposed: {label}", colour) for a, (label, colour) in AXES.items()},
    "overhead": BarStyle("host work of a step", "#888888"),
}
_ROOM = 1.13


def memory_bars(report: TrainReport, name: str = "") -> list[Bar]:
    """Return one bar for each run of equal stages, in bytes at its own peak; `name` is said of the fullest alone."""
    runs = report.evaluation.stages
    low, high = report.interval["device_bytes"]
    bars = []
    for i in [report.peak_stage] if name else range(len(runs)):
        fullest = i == report.peak_stage
        ends = {"low": low, "high": high} if fullest else {}
        ends["limit"] = report.verdict.limit_bytes
        bars.append(Bar(name=name or stage_name(report, i), parts=stage_parts(report, i), **ends))
    return bars


def stage_name(report: TrainReport, index: int) -> str:
    """Return what a run of equal stages is called."""
    run = report.evaluation.stages[index]
    first, last = int(run.position), int(run.position + run.count) - 1
    if report.plan.pp == 1:
        return "each device"
    return f"stage {first}" if first == last else f"stages {first} to {last}"


def time_bar(report: TrainReport, name: str) -> Bar:
    """Return the parts of a step in seconds, which add up to it."""
    step, e = step_tree(report), report.evaluation
    index = step["slowest_stage"]
    replay = weighted(e.parts, e.stages[index], lambda k: k.replay - sum(k.replay_exposed.values()))
    again = replay * e.step.pipeline.busy / e.step.stages[index].busy
    parts = {"compute": step["compute_seconds"] - again, "recompute": again}
    parts |= {f"exposed {axis}": seconds for axis, seconds in step["exposed_seconds"].items()}
    parts |= {key: step[f"{key}_seconds"] for key in ("bubble", "optimizer")}
    parts["passes" if report.phases else "overhead"] = step["overhead_seconds"]
    low, high = report.interval["step_seconds"]
    return Bar(name=name, parts=parts, low=low, high=high)


@dataclass(frozen=True, slots=True)
class _BarScale:
    """The unit of an axis, and how far it goes in SI units."""

    unit: Unit
    most: float


def _reach(bars: Sequence[Bar]) -> float:
    """Return how far an axis goes, with room for the totals beside the bars."""
    return _ROOM * max(max(bar.length, bar.high) for bar in bars)


def _panel(axes: Axes, title: str, bars: Sequence[Bar], looks: Mapping[str, BarStyle], scale: _BarScale) -> None:
    """Draw bars with their totals."""
    unit, most = scale.unit, scale.most
    stack(axes, bars, looks, unit, most)
    totals(axes, bars, unit, most)
    axes.set_title(title, pad=15 if unit.name == "GiB" else 4)
    axes.set_xlabel(unit.name, labelpad=1, loc="right")


@dataclass(frozen=True, slots=True)
class _Limit:
    """What a device may hold, and what the line is called."""

    bytes: float
    text: str


def _memory_panel(axes: Axes, bars: Sequence[Bar], limits: Sequence[_Limit], looks: Mapping[str, BarStyle]) -> None:
    """Draw bars of memory with their limit: one line where it is the same for all, else one for each bar."""
    unit = bytes_unit()
    furthest = max(_reach(bars), *(_ROOM * x.bytes for x in limits))
    _panel(axes, "Memory of a device", bars, looks, _BarScale(unit, furthest))
    if len(set(limits)) == 1:
        limit(axes, limits[0].bytes / unit.size, limits[0].text, furthest / unit.size)
    else:
        text = ";  ".join(f"{bar.name}: {own.text}" for bar, own in zip(bars, limits, strict=True))
        axes.text(1, 1.02, text, color=RED, fontsize=7.2, ha="right", va="bottom", transform=axes.transAxes)
        for row, own in enumerate(limits):
            at = own.bytes / unit.size
            axes.plot([at, at], [row - 0.45, row + 0.45], color=RED, linewidth=1.2, linestyle=(0, (4, 2)))
    legend(axes, bars, looks, unit)


def _hidden_bar(report: TrainReport, name: str) -> Bar:
    return Bar(name=name, parts=step_tree(report)["hidden_seconds"])


def _time_panels(axes: Sequence[Axes], bars: Sequence[Bar], hidden: Sequence[Bar]) -> None:
    shown = [bar for bar in hidden if bar.length]
    # Both axes are the same, so that what is hidden can be held against what is not.
    scale = _BarScale(time_unit(max(bar.length for bar in bars)), _reach([*bars, *shown]))
    _panel(axes[0], "Time of a step", bars, TIME, scale)
    legend(axes[0], bars, TIME, scale.unit)
    if shown:
        _panel(axes[1], "Communication overlapped with compute, not part of the step", shown, HIDDEN, scale)
        legend(axes[1], shown, HIDDEN, scale.unit)


def _height(bars: Sequence[Bar], looks: Mapping[str, BarStyle]) -> float:
    """Return the inches of a panel: its bars, and its legend of three columns."""
    shown = 1 + sum(any(bar.parts.get(key, 0.0) > 0 for bar in bars) for key in looks)
    return 0.75 + 0.33 * len(bars) + 0.16 * -(-shown // columns_of(bars))


def _job_words(report: TrainReport) -> str:
    job = report.job
    return f"{describe_job(job)}, {report.case.recipe.precision.name}, {report.case.stack.name}"


def _verdict(report: TrainReport) -> str:
    fits = "fits" if report.fits else "does not fit"
    rate = f"{report.tokens_per_second_per_gpu:,.0f} tokens/s per device, MFU {report.mfu:.1%}"
    return f"{fits}; {show_seconds(report.step_seconds)} a step, {rate}"


def _limit_of(report: TrainReport) -> _Limit:
    most = report.verdict.limit_bytes
    return _Limit(most, f"{report.case.cluster.device.name}: {show_bytes(most)}")


def train_figure(report: TrainReport) -> Figure:
    """Return the memory of every kind of stage, in GiB, and the seconds of a step, exposed and hidden apart."""
    cluster, memory = report.case.cluster, memory_bars(report)
    step, hidden = [time_bar(report, "step")], [_hidden_bar(report, "overlapped")]
    heights = [_height(memory, MEMORY), _height(step, TIME)]
    heights += [_height(hidden, HIDDEN)] if hidden[0].length else []
    title = title_of(report.case.model.name, cluster.num_devices, cluster.device.name)
    figure, axes = sheet(title, [plan_words(report.plan), _job_words(report), _verdict(report)], heights)
    _memory_panel(axes[0], memory, [_limit_of(report)] * len(memory), MEMORY)
    _time_panels(axes[1:], step, hidden)
    return figure


def _phase_parts(cost: StepCost[float]) -> dict[str, float]:
    """Return seconds of a phase by what its operators are."""
    time = time_tree(cost)
    parts = {name: float(seconds) for name, seconds in cost.groups.items()}
    parts |= {f"exposed {axis}": row["exposed"] for axis, row in time["axes"].items()}
    parts["overhead"] = time["overhead"]
    # Requests that follow one another through the stages share the time: every part counts for its share of it.
    whole = sum(parts.values())
    return {key: seconds * time["seconds"] / whole for key, seconds in parts.items()} if whole else parts


def served_bars(report: InferReport, name: str) -> tuple[Bar, Bar, Bar]:
    """Return the memory of the fullest device, the prefill and the decode step of a serving plan."""
    bytes_of = {key: float(getattr(report.memory, key)) for key in SERVED}
    memory = Bar(name=name or "device", parts=bytes_of, limit=report.memory.limit)
    phases = []
    for word, phase, key in (("TTFT", "prefill", "ttft_seconds"), ("TPOT", "decode", "tpot_seconds")):
        low, high = report.interval[key]
        parts = _phase_parts(getattr(report.evaluation, phase))
        phases.append(Bar(name=name or word, parts=parts, low=low, high=high))
    return memory, phases[0], phases[1]


_PHASES = ("Prefill: time to the first tokens of the batch", "Decode: time of a step, one token for each request")
_ONE_PASS = "Time of the pass"


def _served_figure(
    title: str, lines: Sequence[str], rows: Sequence[tuple[Bar, Bar, Bar]], reports: Sequence[InferReport]
) -> Figure:
    """Return the panels of one or more serving plans; a phase that none of them has is left out."""
    memory, prefill, decode = ([row[i] for row in rows] for i in range(3))
    generates = any(bar.length for bar in decode)
    shown = [prefill, decode] if generates else [prefill]
    titles = _PHASES if generates else (_ONE_PASS,)
    figure, axes = sheet(title, lines, [_height(memory, SERVED), *(_height(bars, PHASE) for bars in shown)])
    limits = [_Limit(r.memory.limit, f"{r.case.engine.name} may use {show_bytes(r.memory.limit)}") for r in reports]
    _memory_panel(axes[0], memory, limits, SERVED)
    for panel, text, bars in zip(axes[1:], titles, shown, strict=True):
        unit = time_unit(max(bar.length for bar in bars))
        _panel(panel, text, bars, PHASE, _BarScale(unit, _reach(bars)))
        legend(panel, bars, PHASE, unit)
    return figure


def _served_words(report: InferReport) -> list[str]:
    job = report.job
    at_once = f"{counted(job.batch, 'request')} at once"
    asked = f"{at_once}, {job.input_tokens:,} tokens in and {job.output_tokens:,} out, "
    rate = f"{report.output_tokens_per_second:,.0f} output tokens/s; " if job.output_tokens else ""
    rate += "a request takes "
    verdict = "fits" if report.fits else "does not fit"
    form = f"{report.case.format.name}, {report.case.engine.name}"
    return [describe_served(report), asked + form, f"{verdict}; {rate}{show_seconds(report.request_seconds)}"]


def infer_figure(report: InferReport) -> Figure:
    """Return the memory of the fullest device, in GiB, and the seconds of prefill and of a decode step."""
    cluster = report.case.cluster
    title = title_of(report.case.model.name, cluster.num_devices, cluster.device.name)
    return _served_figure(title, _served_words(report), [served_bars(report, "")], [report])


def compare_figure(a: TrainReport | InferReport, b: TrainReport | InferReport) -> Figure:
    """Return two plans side by side in the same panels as one."""
    titles = [title_of(r.case.model.name, r.case.cluster.num_devices, r.case.cluster.device.name) for r in (a, b)]
    lines = []
    for word, report, title in (("A", a, titles[0]), ("B", b, titles[1])):
        where = "" if titles[0] == titles[1] else f"{title}: "
        words = plan_words(report.plan) if isinstance(report, TrainReport) else describe_served(report)
        lines.append(f"{word}: {where}{words}")
    title = titles[0] if titles[0] == titles[1] else "Two cases"
    if isinstance(a, InferReport) and isinstance(b, InferReport):
        return _served_figure(title, lines, [served_bars(a, "A"), served_bars(b, "B")], [a, b])
    pair = [(r, name) for r, name in ((a, "A"), (b, "B")) if isinstance(r, TrainReport)]
    memory = [bar for r, name in pair for bar in memory_bars(r, name)]
    step, hidden = [time_bar(r, name) for r, name in pair], [_hidden_bar(r, name) for r, name in pair]
    heights = [_height(memory, MEMORY), _height(step, TIME)]
    heights += [_height(hidden, HIDDEN)] if any(bar.length for bar in hidden) else []
    figure, axes = sheet(title, [*lines, _job_words(pair[0][0])], heights)
    _memory_panel(axes[0], memory, [_limit_of(r) for r, _ in pair], MEMORY)
    _time_panels(axes[1:], step, hidden)
    return figure
