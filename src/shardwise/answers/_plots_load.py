"""The plots of a deployment under load: latency and goodput against rate, distributions, a timeline, causes; a front.

Points over the rate are simulated anew at shares of what the deployment carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shardwise.answers._paper import GREY, INK, PALE, RED, narrow
from shardwise.answers._plots import Bar, Look, legend, limit, sheet, stack, title_of
from shardwise.answers._plots_search import SERIES
from shardwise.plans import Metric
from shardwise.serving.load import ServeReport, serve
from shardwise.serving.load._why import BATCH, EXPLAINED, LOST, MATES, OTHERS, OWN_DECODE, OWN_PROMPT, PROMPTS, WAITS
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.search import LoadResult

# Shares of what is carried at which the load is simulated.
_SHARES = (0.15, 0.3, 0.45, 0.6, 0.72, 0.82, 0.9, 0.96)
_POINTS = 240
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
BLUE, ORANGE, GREEN, PINK = (colour for colour, _ in SERIES[:4])
_WAITED = ("#882255", "#AA4499", "#CC79A7", "#DDCC77")
_CAUSES = {
    **{word: Look(word, colour) for word, colour in zip(WAITS, _WAITED, strict=True)},
    OWN_PROMPT: Look(OWN_PROMPT, "#0072B2"),
    MATES: Look(MATES, "#56B4E9"),
    "transfer of the cache": Look("transfer of the cache", "#44AA99"),
    "joining the decode pool": Look("joining the decode pool", "#117733"),
    OWN_DECODE: Look(OWN_DECODE, "#009E73"),
    BATCH: Look(BATCH, "#999933"),
    PROMPTS: Look(PROMPTS, "#E69F00"),
    OTHERS: Look(OTHERS, "#D55E00"),
    LOST: Look(LOST, "#b2182b"),
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
    for bound in report.options.limits:
        if not bound.of and bound.metric in _NAMES:
            colour = SERIES[list(_NAMES).index(bound.metric)][0]
            upper.axhline(bound.seconds, color=colour, linewidth=0.7, linestyle=(0, (1, 2)))
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
