"""Plots of serving: one batch, and a deployment under load."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, INK, PALE, RED, narrow, paper_width
from shardwise.answers._described import describe
from shardwise.answers._plots import (
    Bar,
    BarStyle,
    bytes_unit,
    head_height,
    header,
    legend,
    limit,
    sheet,
    stack,
    time_unit,
    title_of,
    totals,
    wrapped,
)
from shardwise.answers._plots_bars import PHASE, SERVED, served_bars
from shardwise.answers._plots_search import SERIES, beside, key_below
from shardwise.plans import Metric
from shardwise.search import ServingResult
from shardwise.serving import InferReport
from shardwise.serving.load import ServeReport, serve
from shardwise.serving.load._why import BATCH, EXPLAINED, LOST, MATES, OTHERS, OWN_DECODE, OWN_PROMPT, PROMPTS, WAITS
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.search import LoadResult

_MOST_PLANS = 10


def serving_figure(found: ServingResult) -> Figure:
    """Return the front of seconds a token and tokens a second and device, and the best deployments side by side."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    cluster, best = found.grid.cluster, found.best[:_MOST_PLANS]
    title = title_of(found.grid.model.name, cluster.num_devices, cluster.device.name)
    text = _words(found)
    each = 2 * (2.3 + 0.42 * len(best)) if narrow() else 1.75 + 0.36 * len(best)
    heights = [head_height(title, text), 2.7, *([each] if best else [])]
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=(paper_width(), sum(heights)), layout=engine)
    figure.set_label(title)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    header(figure.add_subplot(grid[0]), title, text)
    _front(figure.add_subplot(grid[1]), found)
    if best:
        lower = beside(grid[2], 2)
        _tops(figure.add_subplot(lower[0]), figure.add_subplot(lower[1]), best)
    return figure


def _words(found: ServingResult) -> list[str]:
    job = found.grid.job
    asked = f"{job.input_tokens:,} tokens in and {job.output_tokens:,} out; {found.num_plans:,} plans, "
    lines = [asked + f"{found.counts.evaluated:,} legal, {found.counts.fitting:,} fit and keep the limits"]
    if found.best:
        first = found.best[0]
        rate = first.output_tokens_per_second / first.plan.num_devices
        speed = f"{rate:,.0f} output tokens/s per device, a token every {show_seconds(first.tpot_seconds)}"
        lines.append(f"best by {found.options.objective}: {speed}: {_name(first)}")
    else:
        lines.append("no plan of the space fits and keeps the limits")
    return wrapped(lines, paper_width() - 0.2)


def _name(report: InferReport) -> str:
    plan = describe(report.plan).replace("one device, nothing split", "one device")
    return f"{plan}, batch {report.job.batch}, {report.case.format.name}, {report.case.engine.name}"


def _latency(report: InferReport) -> float:
    """Return seconds between tokens, or of the pass where nothing is generated."""
    return report.tpot_seconds or report.request_seconds


def _rate(report: InferReport) -> float:
    if report.job.output_tokens:
        return report.output_tokens_per_second / report.plan.num_devices
    return report.prefill_tokens_per_second / report.plan.num_devices


def _front(axes: Axes, found: ServingResult) -> None:
    """Draw throughput against latency, one series a layout; what none beats goes up to the right."""
    front = found.front
    axes.set_title("Pareto front of deployments", pad=14)
    unit = time_unit(max((_latency(r) for r in front), default=1.0))
    generates = bool(found.grid.job.output_tokens)
    axes.set_xlabel(f"{'time between tokens' if generates else 'time of the pass'}, {unit.name}")
    axes.set_ylabel(f"{'output' if generates else 'input'} tokens/s per device")
    axes.grid(True)
    if not front:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    xs, ys = [_latency(r) / unit.size for r in front], [_rate(r) for r in front]
    axes.plot(xs, ys, color=GREY, linewidth=0.7, zorder=1)
    layouts = list(dict.fromkeys(describe(r.plan) for r in front))
    for i, layout in enumerate(layouts):
        colour, marker = SERIES[min(i, len(SERIES) - 1)]
        own = [k for k, r in enumerate(front) if describe(r.plan) == layout]
        name = layout if i < len(SERIES) - 1 or len(layouts) == len(SERIES) else "others"
        label = name if i < len(SERIES) else "_nolegend_"
        face: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 0}
        axes.plot([xs[k] for k in own], [ys[k] for k in own], label=label, **face)
    axes.set_xlim(0)
    axes.set_ylim(0)
    clear = 1.0
    if generates and found.options.max_tpot_seconds:
        at = found.options.max_tpot_seconds / unit.size
        far = max(axes.get_xlim()[1], 1.05 * at)
        axes.set_xlim(0, far)
        limit(axes, at, f"limit {show_seconds(found.options.max_tpot_seconds)}", far)
        clear = at / far if at / far > 0.7 else 1.0  # the names stand beside the line of the limit
    if found.best:
        place = (_latency(found.best[0]) / unit.size, _rate(found.best[0]))
        axes.plot(*place, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=INK, linewidth=0)
        axes.annotate("#1", place, (-7, 7), textcoords="offset points", fontsize=8, fontweight="bold", ha="right")
    axes.legend(loc="lower right", bbox_to_anchor=(clear, 0), handletextpad=0.2, labelspacing=0.3)


def _tops(left: Axes, right: Axes, best: Sequence[InferReport]) -> None:
    """Draw a decode step and the memory of the best deployments beside each other, one row a deployment."""
    rows = [served_bars(r, _row_name(i, r)) for i, r in enumerate(best, 1)]
    generates = any(decode.length for _, _, decode in rows)
    times = [decode if generates else prefill for _, prefill, decode in rows]
    memory = [Bar(name=f"#{i}", parts=bar.parts, limit=bar.limit) for i, (bar, _, _) in enumerate(rows, 1)]
    gib, unit = bytes_unit(), time_unit(max(bar.length for bar in times))
    ceilings = [r.memory.limit for r in best]
    # Totals that would stand on the line of what may be used stand beyond it.
    far = 1.33 * max(*(bar.length for bar in memory), *ceilings)
    most = 1.2 * max(max(bar.length, bar.high) for bar in times)
    for axes, bars, looks, scale in ((left, times, PHASE, (unit, most)), (right, memory, SERVED, (gib, far))):
        stack(axes, bars, looks, *scale, wide=0.7 if narrow() else 0.45)
        totals(axes, bars, *scale, fontsize=7)
        axes.set_xlabel(scale[0].name, labelpad=1, loc="right")
        key_below(axes, bars, looks, 1)
    left.set_title("Time of a decode step" if generates else "Time of the pass", pad=14)
    right.set_title("Memory of the fullest device", pad=14)
    left.tick_params(axis="y", labelsize=6.2)
    if len(set(ceilings)) == 1:
        limit(right, ceilings[0] / gib.size, f"may use {show_bytes(ceilings[0])}", far / gib.size)
        return
    for row, most_bytes in enumerate(ceilings):
        right.plot([most_bytes / gib.size] * 2, [row - 0.45, row + 0.45], color=RED, linewidth=1.2)


def _row_name(place: int, report: InferReport) -> str:
    return f"#{place}  " + "\n".join(textwrap.wrap(_name(report), 20 if narrow() else 34)[:3])


# Shares of what is carried at which the load is simulated.
_SHARES = (0.15, 0.3, 0.45, 0.6, 0.72, 0.82, 0.9, 0.96)
_POINTS = 240
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
BLUE, ORANGE, GREEN, PINK = (colour for colour, _ in SERIES[:4])
_WAITED = ("#882255", "#AA4499", "#CC79A7", "#DDCC77")
_CAUSES = {
    **{word: BarStyle(word, colour) for word, colour in zip(WAITS, _WAITED, strict=True)},
    OWN_PROMPT: BarStyle(OWN_PROMPT, "#0072B2"),
    MATES: BarStyle(MATES, "#56B4E9"),
    "transfer of the cache": BarStyle("transfer of the cache", "#44AA99"),
    "joining the decode pool": BarStyle("joining the decode pool", "#117733"),
    OWN_DECODE: BarStyle(OWN_DECODE, "#009E73"),
    BATCH: BarStyle(BATCH, "#999933"),
    PROMPTS: BarStyle(PROMPTS, "#E69F00"),
    OTHERS: BarStyle(OTHERS, "#D55E00"),
    LOST: BarStyle(LOST, "#b2182b"),
}  # fmt: skip


def load_figure(report: ServeReport, measured: Mapping[str, Sequence[float]] | None = None) -> Figure:
    """Return what a deployment does under its load, and under others where it has a rate; measured latencies beside."""
    base = report.base
    title = title_of(base.case.model.name, report.devices, base.case.cluster.device.name)
    words = f"{report.replicas} x tp {base.plan.tp}, pp {base.plan.pp}, {base.case.engine.name}; carries "
    lines = [words + f"{report.capacity_per_second:,.2f} requests/s"]
    rated = report.fits and report.workload.arrivals.kind in ("poisson", "constant", "gamma")
    heights = [*([2.1, 1.5] if rated else []), *([1.9, 1.7, 1.9] if report.requests else [])] or [0.5]
    figure, panels = sheet(title, lines, heights)
    if rated:
        _rates(panels[0], panels[1], curve_of(report), report)
    if report.requests:
        _distributions(panels[-3], report, measured or {})
        _timeline(panels[-2], report)
        _causes(panels[-1], report)
    elif not rated:
        panels[0].axis("off")
    return figure


def curve_of(report: ServeReport) -> list[ServeReport]:
    """Return the deployment at shares of what it carries."""
    case, asked = report.base.case, report.workload
    options = replace(report.options, limits=report.options.limits, autoscale=None)
    rates = (share * report.capacity_per_second for share in _SHARES)
    every = (replace(asked, arrivals=replace(asked.arrivals, rate=rate), finite=True) for rate in rates)
    return [serve(case.model, case.cluster, case.plan, one, case.job, options) for one in every]


def _key(axes: Axes) -> None:
    """Name the series above a panel, beside its title, where no line is."""
    if narrow():
        small: dict[str, Any] = {"fontsize": 5.2, "labelspacing": 0.15, "columnspacing": 0.8, "borderpad": 0}
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, handlelength=1.6, **small)
        return
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, columnspacing=1.0, handlelength=1.6, borderpad=0)


def _rates(upper: Axes, lower: Axes, curve: Sequence[ServeReport], report: ServeReport) -> None:
    """Draw p99 latencies and goodput against the rate, with what is carried and the load that was asked."""
    rates = [one.workload.arrivals.rate for one in curve]
    far = 1.08 * report.capacity_per_second
    for metric, (colour, marker) in zip(_NAMES, SERIES, strict=False):
        for name, style in (("p99", "-"), ("p50", ":")):
            values = [one.latencies[metric].get(name, math.nan) for one in curve]
            face: dict[str, Any] = {"color": colour, "linestyle": style, "marker": marker, "markersize": 3}
            upper.plot(rates, values, linewidth=1.2, label=f"{_NAMES[metric]} {name}", **face)
    _published(upper, lower, report)
    for bound in report.options.limits:
        if not bound.of and bound.metric in _NAMES:
            colour = SERIES[list(_NAMES).index(bound.metric)][0]
            upper.axhline(bound.seconds, color=colour, linewidth=1.0, linestyle=(0, (1, 2)))
            said = f"{bound.quantile} {_NAMES[bound.metric]} at most {show_seconds(bound.seconds)}"
            if not narrow():  # a column has no place beside the curves
                upper.annotate(said, (0, bound.seconds), (3, 2), textcoords="offset points", fontsize=6, color=INK)
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(lambda value, _: show_seconds(value))
    upper.set_title("Latency against rate", pad=26)
    _key(upper)
    kept = [one.goodput_share * rate for one, rate in zip(curve, rates, strict=True)]
    lower.plot(rates, rates, color=PALE, linewidth=1.0, label="asked")
    lower.plot(rates, kept, color=GREEN, linewidth=1.4, marker="^", markersize=3, label="within every limit")
    lower.set_title("Goodput against rate", pad=26)
    lower.set_xlabel("requests/s")
    lower.set_ylim(0)
    _key(lower)
    for axes in (upper, lower):
        axes.set_xlim(0, far)
        axes.grid(True)
        limit(axes, report.capacity_per_second, "carries", far)
        axes.axvline(report.workload.arrivals.rate, color=INK, linewidth=0.8, linestyle=(0, (1, 1)))


def _published(upper: Axes, lower: Axes, report: ServeReport) -> None:
    """Draw where 8 of 10 published runs lie: each p99 at the load that was asked, and what is carried."""
    rate = report.workload.arrivals.rate
    for metric, (colour, _) in zip(_NAMES, SERIES, strict=False):
        band = report.interval.get(metric, {}).get("p99_seconds")
        if band and rate and band["high"]:
            upper.plot([rate] * 2, [band["low"], band["high"]], color=colour, marker="_", linewidth=2.4)
    carried = report.interval["capacity"]["requests_per_second"]
    shown = carried["low"], min(carried["high"], 1.08 * report.capacity_per_second)
    lower.axvspan(*shown, color=RED, alpha=0.12, linewidth=0, label="8 of 10 published runs")


def _distributions(axes: Axes, report: ServeReport, measured: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of requests within so many seconds, measured ones dashed; the time is logarithmic."""
    for metric, (colour, _) in zip(_NAMES, SERIES, strict=False):
        found = [getattr(request, f"{metric}_seconds") for request in report.requests]
        own = [value for value in found if value]
        for values, style, word in ((own, "-", ""), (measured.get(metric, ()), "--", ", measured")):
            if values:
                ordered = sorted(values)
                shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
                axes.step(ordered, shares, where="post", color=colour, linestyle=style, label=_NAMES[metric] + word)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: show_seconds(value))
    axes.set_ylim(0, 1)
    axes.set_title("Share of requests within a time", pad=26)
    axes.grid(True)
    _key(axes)


def series_of(report: ServeReport) -> dict[str, list[float]]:
    """Return times from the first arrival to the last token, and how many requests run and wait at each."""
    import numpy as np

    start = min(request.arrival for request in report.requests)
    times = np.linspace(start, start + report.span_seconds, _POINTS)
    arrivals, starts, ends = (
        np.sort([getattr(request, name) for request in report.requests]) for name in ("arrival", "scheduled", "end")
    )
    came, began, went = (np.searchsorted(one, times, side="right") for one in (arrivals, starts, ends))
    return {"seconds": times.tolist(), "running": (began - went).tolist(), "waiting": (came - began).tolist()}


def _timeline(axes: Axes, report: ServeReport) -> None:
    """Draw how many requests run and wait over the time, and how many replicas there are where they change."""
    found = series_of(report)
    axes.plot(found["seconds"], found["running"], color=BLUE, linewidth=1.0, label="running")
    axes.plot(found["seconds"], found["waiting"], color=RED, linewidth=1.0, label="waiting")
    if report.scaling:
        times, counts = zip(*report.scaling.replicas, strict=True)
        last = max(report.scaling.span_seconds, times[-1])
        beside = axes.twinx()
        beside.step([*times, last], [*counts, counts[-1]], where="post", color=GREEN, linewidth=1.2)
        beside.set_ylim(0, report.replicas + 0.5)
        beside.set_ylabel("replicas", color=GREEN)
    axes.set_ylim(0)
    axes.set_xlabel("seconds", loc="right", labelpad=1)
    axes.set_title("Requests over time, all replicas", pad=26)
    axes.grid(True)
    _key(axes)


def _causes(axes: Axes, report: ServeReport) -> None:
    """Draw where the seconds of the requests around each p99 go; tokens of TPOT as many as the p99 of them takes."""
    parts: dict[Metric, dict[str, float]] = {metric: dict(report.why(metric)) for metric in EXPLAINED}
    bars = []
    for metric, found in parts.items():
        whole = sum(found.values())
        if whole:
            name = f"p99 {_NAMES[metric]}\n{show_seconds(report.latencies[metric]['p99'])}"
            bars.append(Bar(name=name, parts={word: seconds / whole for word, seconds in found.items()}))
    from shardwise.answers._plots import Unit

    unit = Unit("share", 1.0, lambda value: f"{value:.0%}")
    stack(axes, bars, _CAUSES, unit, 1.0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_title("Where the seconds around each p99 go", pad=14)
    legend(axes, bars, _CAUSES, unit)


def front_figure(found: LoadResult) -> Figure:
    """Return output tokens/s of a device against those of a user: the front, and the best deployments on it."""
    workload = found.workload
    shown = found.best[0] if found.best else found.nearest
    name = shown.base.case.model.name if shown is not None else "no deployment"
    device = f" on {shown.base.case.cluster.device.name}" if shown is not None else ""
    asked = f"{workload.arrivals.rate:,.2f} requests/s, {workload.input_tokens.mean:,.0f} tokens in and "
    figure, (axes,) = sheet(name + device, [asked + f"{workload.output_tokens.mean:,.0f} out"], [3.4])
    axes.set_title("Output tokens/s of a device and of a user", pad=14)
    axes.set_xlabel("tokens/s of a user")
    axes.set_ylabel("tokens/s of a device")
    axes.grid(True)
    sizes: dict[int, list[tuple[float, float]]] = {}
    for point in found.front:
        each = (point.tokens_per_second_per_user, point.tokens_per_second_per_gpu)
        sizes.setdefault(point.plan.num_devices, []).append(each)
    every = [one for points in sizes.values() for one in points]
    if every:
        axes.plot(*zip(*sorted(every), strict=True), color=GREY, linewidth=0.7, zorder=1)
    for number, (size, points) in enumerate(sorted(sizes.items())):
        colour, marker = SERIES[number % len(SERIES)]
        label = f"{size} {'device' if size == 1 else 'devices'} a replica"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=0, label=label)
    for place, report in enumerate(found.best, 1):
        at = 1 / max(report.latencies["tpot"]["mean"], 1e-9), report.output_tokens_per_second / report.devices
        mark: dict[str, Any] = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": INK}
        axes.plot(*at, linewidth=0, **mark)
        axes.annotate(f"#{place}", at, (7, 14 - 12 * place), textcoords="offset points", fontsize=8, fontweight="bold")
    axes.set_xlim(0)
    axes.set_ylim(0)
    if sizes:
        axes.legend(loc="upper right")
    return figure
