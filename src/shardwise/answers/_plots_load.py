"""Plots of a deployment under load: latency and goodput by rate, distributions, timeline, causes of each p99."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, INK, PALE, RED, narrow, slide
from shardwise.answers._plots import BarStyle, ink_on, sheet, time_unit, title_of
from shardwise.answers._plots_search import SERIES
from shardwise.ledger.number import quantile
from shardwise.plans import Metric
from shardwise.records import replace
from shardwise.serving.load import (
    BATCH,
    EXPLAINED,
    LOST,
    MATES,
    OTHERS,
    OWN_DECODE,
    OWN_PROMPT,
    PROMPTS,
    SERVER,
    WAITS,
    ServeReport,
    serve,
)
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Shares of what is carried at which the load is simulated.
_SHARES = (0.15, 0.3, 0.45, 0.6, 0.72, 0.82, 0.9, 0.96)
_POINTS = 240
_NAMES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
BLUE, ORANGE, GREEN, PINK = (colour for colour, _ in SERIES[:4])
_WAITED = ("#882255", "#AA4499", "#CC79A7", "#DDCC77")
_CAUSES = {
    SERVER: BarStyle(SERVER, "#332288"),
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


# Share of the axis beyond the last line, and how far beyond the capacity a load is still drawn.
_ROOM, _FAR = 1.25, 2.0


def load_figure(report: ServeReport, measured: Mapping[str, Sequence[float]] | None = None) -> Figure:
    """Return what a deployment does under its load, and under others where it has a rate; measured latencies beside."""
    base = report.base
    title = title_of(base.case.model.name, report.devices, base.case.cluster.device.name)
    groups = f" of {report.groups} attention groups" if report.groups > 1 else ""
    words = f"{report.replicas} x tp {base.plan.tp}, pp {base.plan.pp}{groups}, {base.case.engine.name}; "
    asked = report.workload.arrivals.rate
    words += f"load {asked:,.2f}, capacity " if asked else "capacity "
    lines = [words + f"{report.capacity_per_second:,.2f} requests/s"]
    rated = report.fits and report.workload.arrivals.kind in ("poisson", "constant", "gamma")
    causes = waterfall_of(report) if report.requests else {}
    falls = [0.85 + _row_inches(parts) * (1 + len(parts)) for parts in causes.values()]
    heights = [*([2.1, 1.5] if rated else []), *([1.9, 1.7, *falls] if report.requests else [])] or [0.5]
    figure, panels = sheet(title, lines, heights, first=len(heights) - len(falls) if slide() and falls else 0)
    if rated:
        _rates(panels[0], panels[1], curve_of(report), report)
    if report.requests:
        last = panels[2 * rated :]
        _distributions(last[0], report, measured or {})
        _timeline(last[1], report)
        for axes, (metric, parts) in zip(last[2:], causes.items(), strict=True):
            _waterfall(axes, report, metric, parts)
    elif not rated:
        panels[0].axis("off")
    return figure


def curve_of(report: ServeReport) -> list[ServeReport]:
    """Return the deployment at shares of its capacity."""
    case, asked = report.base.case, report.workload
    options = replace(report.options, limits=report.options.limits, autoscale=None)
    rates = (share * report.capacity_per_second for share in _SHARES)
    every = (replace(asked, arrivals=replace(asked.arrivals, rate=rate), finite=True) for rate in rates)
    # Of two pools the way of the caches knows the devices of both.
    cluster = report.fleet.link.cluster if report.fleet.link else case.cluster
    return [serve(case.model, cluster, case.plan, one, case.job, options) for one in every]


def knee_of(curve: Sequence[ServeReport]) -> float:
    """Return the rate beyond which more load costs more than it brings.

    Under limits that of the most requests a second within them; without, where the p99 end to end over rates lies
    farthest below the line from its first to its last point (Satopaa et al. 2011, Kneedle).
    """
    rates = [one.workload.arrivals.rate for one in curve]
    if curve[0].options.limits:
        return max(zip((one.goodput_share * rate for one, rate in zip(curve, rates, strict=True)), rates, strict=True))[
            1
        ]
    tails = [one.latencies["e2e"]["p99"] for one in curve]
    rise, run = max(tails[-1] - tails[0], 1e-12), rates[-1] - rates[0]
    below = [(r - rates[0]) / run - (t - tails[0]) / rise for r, t in zip(rates, tails, strict=True)]
    return rates[below.index(max(below))]


def _key(axes: Axes) -> None:
    """Name the series above a panel, beside its title, where no line is."""
    if narrow():
        small: dict[str, Any] = {"fontsize": 5.2, "labelspacing": 0.15, "columnspacing": 0.8, "borderpad": 0}
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, handlelength=1.6, **small)
        return
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, columnspacing=1.0, handlelength=1.6, borderpad=0)


def _tick(seconds: float, _: object = None) -> str:
    """Return a power of ten of seconds as an axis says it.

    >>> _tick(10.0), _tick(0.1), _tick(1e-5)
    ('10 s', '100 ms', '10 us')
    """
    size, name = next((pair for pair in ((1.0, "s"), (1e-3, "ms")) if seconds > 0.999 * pair[0]), (1e-6, "us"))
    return f"{seconds / size:.4g} {name}"


def _rates(upper: Axes, lower: Axes, curve: Sequence[ServeReport], report: ServeReport) -> None:
    """Draw p99 and p50 latencies and goodput against the rate, with the capacity and the load that was asked."""
    rates = [one.workload.arrivals.rate for one in curve]
    capacity, asked = report.capacity_per_second, report.workload.arrivals.rate
    # Room for the words beside the lines of capacity and load, where the load is not far beyond.
    far = _ROOM * (max(capacity, asked) if asked <= _FAR * capacity else capacity)
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
            limit_text = f"{bound.quantile} {_NAMES[bound.metric]} <= {show_seconds(bound.seconds)}"
            if not narrow():  # a column has no place beside the curves, which end before the capacity
                upper.annotate(
                    limit_text, (far, bound.seconds), (-1, 2), textcoords="offset points", fontsize=6, color=INK,
                    ha="right",
                )  # fmt: skip
    upper.set_yscale("log")
    upper.yaxis.set_major_formatter(_tick)
    upper.set_title("Latency against rate", pad=26)
    _key(upper)
    kept = [one.goodput_share * rate for one, rate in zip(curve, rates, strict=True)]
    lower.plot(rates, rates, color=PALE, linewidth=1.0, label="load")
    lower.plot(rates, kept, color=GREEN, linewidth=1.4, marker="^", markersize=3, label="within every limit")
    lower.set_title("Goodput against rate", pad=26)
    lower.set_xlabel("requests/s that arrive")
    lower.set_ylabel("requests/s")
    lower.set_ylim(0)
    _key(lower)
    knee = knee_of(curve)
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": 6.5, "color": GREY}
    for axes in (upper, lower):
        axes.set_xlim(0, far)
        axes.grid(True)
        # Names stand at the foot, since the key is above the panel: the knee is never beyond the capacity.
        axes.axvline(capacity, color=RED, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
        at: dict[str, Any] = {"xycoords": ("data", "axes fraction"), **small}
        axes.annotate("capacity", (capacity, 0.02), (2, 0), **{**at, "color": RED})
        axes.axvline(knee, color=GREY, linewidth=0.8, linestyle=(0, (4, 2)))
        axes.annotate("knee", (knee, 0.02), (-2, 0), ha="right", **at)
        axes.axvline(asked, color=INK, linewidth=0.8, linestyle=(0, (1, 1)))
    # Above the words at the foot and beside the curve, which rises.
    if asked < far:
        left = capacity / 2 < asked <= capacity
        place = {"ha": "right" if left else "left", "xycoords": ("data", "axes fraction"), **small, "color": INK}
        lower.annotate("this load", (asked, 0.7 if asked <= capacity / 2 else 0.16), (-2 if left else 2, 0), **place)


def _published(upper: Axes, lower: Axes, report: ServeReport) -> None:
    """Draw where 8 of 10 published runs lie: each p99 at the load that was asked, and the capacity."""
    rate = report.workload.arrivals.rate
    for metric, (colour, _) in zip(_NAMES, SERIES, strict=False):
        band = report.interval.get(metric, {}).get("p99_seconds")
        if band and rate and band["high"]:
            upper.plot([rate] * 2, [band["low"], band["high"]], color=colour, marker="_", linewidth=2.4)
    carried = report.interval["capacity"]["requests_per_second"]
    shown = carried["low"], min(carried["high"], _ROOM * report.capacity_per_second)
    lower.axvspan(*shown, color=RED, alpha=0.12, linewidth=0, label="8 of 10 published runs")


def _distributions(axes: Axes, report: ServeReport, measured: Mapping[str, Sequence[float]]) -> None:
    """Draw the share of requests within so many seconds, measured ones dashed; the time is logarithmic.

    Below stand percentiles as they were measured over those predicted.
    """
    ratios = []
    for metric, (colour, _) in zip(_NAMES, SERIES, strict=False):
        simulated = [getattr(request, f"{metric}_seconds") for request in report.requests]
        own, seen = (sorted(filter(None, values)) for values in (simulated, measured.get(metric, ())))
        for ordered, style, word in ((own, "-", ""), (seen, "--", " measured")):
            if ordered:
                shares = [(i + 1) / len(ordered) for i in range(len(ordered))]
                axes.step(ordered, shares, where="post", color=colour, linestyle=style, label=_NAMES[metric] + word)
        if own and seen:
            p50, p99 = (quantile(seen, q) / quantile(own, q) for q in (0.5, 0.99))
            ratios.append(f"{_NAMES[metric]} p50 {p50:.2f}, p99 {p99:.2f}")
    if ratios:
        axes.set_xlabel(
            "\n".join(textwrap.wrap("measured over predicted: " + "; ".join(ratios), 60 if narrow() else 110))
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_tick)
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
    series = series_of(report)
    axes.plot(series["seconds"], series["running"], color=BLUE, linewidth=1.0, label="running")
    axes.plot(series["seconds"], series["waiting"], color=RED, linewidth=1.0, label="waiting")
    if report.scaling:
        times, counts = zip(*report.scaling.replicas, strict=True)
        last = max(report.scaling.span_seconds, times[-1])
        replica_axes = axes.twinx()
        replica_axes.step([*times, last], [*counts, counts[-1]], where="post", color=GREEN, linewidth=1.2)
        replica_axes.set_ylim(0, report.replicas + 0.5)
        replica_axes.set_ylabel("replicas", color=GREEN)
    axes.set_ylim(0)
    axes.set_xlabel("seconds", loc="right", labelpad=1)
    axes.set_title("Requests over time, all replicas", pad=26)
    axes.grid(True)
    _key(axes)


def waterfall_of(report: ServeReport) -> dict[Metric, list[tuple[str, float]]]:
    """Return the causes of each p99 in the order in which they delay a request, in seconds."""
    every = {metric: dict(report.why(metric)) for metric in EXPLAINED}
    return {metric: [(word, why[word]) for word in _CAUSES if word in why] for metric, why in every.items() if why}


def _names(parts: Sequence[tuple[str, float]]) -> list[str]:
    """Return the names of causes in lines that stand beside a panel."""
    return ["\n".join(textwrap.wrap(word, 18 if narrow() else 28)) for word, _ in parts]


def _row_inches(parts: Sequence[tuple[str, float]]) -> float:
    """Return the height of a row that holds the longest of its names."""
    return max(0.23, *(0.03 + 0.115 * (1 + name.count("\n")) for name in _names(parts)))


def _waterfall(axes: Axes, report: ServeReport, metric: Metric, parts: Sequence[tuple[str, float]]) -> None:
    """Draw the causes of a p99 one after another, each from where the one before it ends, and their sum.

    The line at the sum says where 8 of 10 published runs lie.
    """
    whole, band = sum(seconds for _, seconds in parts), report.interval[metric]["p99_seconds"]
    unit, at, far = time_unit(whole), 0.0, max(1.1 * whole, min(1.02 * band["high"], 2 * whole))
    wide = 0.42 if narrow() else 0.25  # of the panel: what a text takes
    for row, (word, seconds) in enumerate(parts):
        axes.barh(row, seconds / unit.size, left=at / unit.size, height=0.62, color=_CAUSES[word].colour)
        inside, end = seconds > wide * whole, at + seconds
        # Beside its bar: behind it while there is room, else before it.
        side = "center" if inside else "left" if end + wide * whole < far or at < wide * whole else "right"
        place = {"center": (at + end) / 2, "left": end, "right": at}[side] / unit.size, row
        ink = ink_on(_CAUSES[word].colour) if inside else INK
        kind: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 6.8, "color": ink}
        text = f"{unit.show(seconds)}, {seconds / whole:.0%}"
        axes.annotate(text, place, ({"center": 0, "left": 4, "right": -4}[side], 0), ha=side, **kind)
        at += seconds
        axes.plot([at / unit.size] * 2, [row + 0.31, row + 0.69], color=GREY, linewidth=0.7)
    axes.barh(len(parts), whole / unit.size, height=0.62, color=INK)
    low, high = (min(band[name], far) / unit.size for name in ("low", "high"))
    axes.plot([low, high], [len(parts)] * 2, color=RED, marker="|", markersize=5, linewidth=1.0, zorder=5)
    axes.set_yticks(range(1 + len(parts)), [*_names(parts), "in all"], fontsize=6.8)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(parts) + 0.55, -0.55)
    axes.set_xlim(0, far / unit.size)
    axes.grid(axis="x")
    axes.set_xlabel(unit.name, loc="right", labelpad=1)
    axes.set_title(f"p99 {_NAMES[metric]} {show_seconds(report.latencies[metric]['p99'])}, cause by cause", pad=8)
