"""The plot of a search: what none beats, what the best plans are made of, and how the job scales."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from shardwise.answers._canvas import GREY, INK, RED, SIZES, fitting, narrow, paper_width, plain_log
from shardwise.answers._described import describe_job
from shardwise.answers._plan_page import searched_on
from shardwise.answers._plots import (
    Bar,
    BarStyle,
    Unit,
    bytes_unit,
    head_height,
    header,
    limit,
    plan_words,
    row_inches,
    row_names,
    seen,
    sheet,
    stack,
    time_unit,
    totals,
    wrapped,
)
from shardwise.answers._plots_bars import MEMORY, TIME, memory_bars, time_bar
from shardwise.answers._questions import HEADLINES, Effect, Headline, VaryPoint, title_of
from shardwise.search import TrainingResult
from shardwise.training import TrainReport
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each number of devices has a colour and a shape (Okabe and Ito, 2008).
SERIES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#332288", "X"),
)
_MOST_PLANS, _MOST_SERIES = 10, 6


def plan_figure(result: TrainingResult) -> Figure:
    """Return the front in seconds and GiB, the time and memory of the best plans, and strong scaling where searched."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    case, best = result.grid.case, result.best[:_MOST_PLANS]
    text = _words(result)
    fastest = _fastest(result.front)
    on = searched_on(result, "{:,} \u00d7 {}")
    title = f"{case.model.name} on {on}"
    fronts, names = 1 + (len(fastest) > 1), _row_names(best)
    tops = _top_bars(best, names)
    upper_inches = fronts * 2.6 + 0.4 * (fronts - 1) if narrow() else 2.5 + 0.3 * (fronts - 1)
    around = [0.95 + 0.14 * -(-len(_keys(bars, looks)) // fitting(2)) for bars, looks in tops]
    rows = row_inches(names, 0.42 if narrow() else 0.36) * len(best)
    lower_inches = sum(around) + 2 * rows if narrow() else max(around) + rows
    heights = [head_height(title, text), upper_inches, *([lower_inches] if best else [])]
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=(paper_width(), sum(heights)), layout=engine)
    figure.set_label(title)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    header(figure.add_subplot(grid[0]), title, text)
    upper = side_by_side(grid[1], fronts)
    front = figure.add_subplot(upper[0])
    _front(front, result.front, best)
    front.set_title("Pareto front" + ("" if len(fastest) > 1 else " in time and memory"), pad=14)
    if len(fastest) > 1:
        _scaling(figure.add_subplot(upper[1]), fastest)
    if best:
        # The second legend is longer than the first, and the names of the plans stand on the left alone.
        lower = side_by_side(grid[2], len(tops))
        left = figure.add_subplot(lower[0])
        _tops(left, figure.add_subplot(lower[1]), best, tops)
    return figure


def _words(result: TrainingResult) -> list[str]:
    job, counts = result.grid.case.job, result.counts
    asked = f"{describe_job(job)}, {result.grid.case.stack.name}; "
    lines = [asked + f"{result.num_plans:,} plans, {counts.legal:,} legal, {counts.fitting:,} fit"]
    if result.best:
        first = result.best[0]
        speed = f"{show_seconds(first.step_seconds)} a step, MFU {first.mfu:.1%}"
        lines.append(f"best by {result.options.objective}: {speed}: {plan_words(first.plan)}")
        common = _common(result.best[:_MOST_PLANS])
        lines += (
            [f"the {min(len(result.best), _MOST_PLANS)} best have in common: {', '.join(common)}"] if common else []
        )
    else:
        lines.append("no plan of the space fits")
    return wrapped(lines, paper_width() - 0.2)


def _fastest(front: Sequence[TrainReport]) -> list[TrainReport]:
    """Return the fastest plan of each number of devices, fewest devices first."""
    rows = sorted(front, key=lambda r: (r.plan.num_devices, r.step_seconds))
    return [next(own) for _, own in groupby(rows, key=lambda r: r.plan.num_devices)]


def _groups(front: Sequence[TrainReport]) -> list[tuple[str, list[TrainReport]]]:
    """Return the front by devices; where there are many numbers of devices, those between are one group."""
    rows = sorted(front, key=lambda r: (r.plan.num_devices, r.step_seconds))
    groups = [(f"{n:,} devices", list(own)) for n, own in groupby(rows, key=lambda r: r.plan.num_devices)]
    if len(groups) <= _MOST_SERIES:
        return groups
    every = -(-len(groups) // _MOST_SERIES)
    merged = [groups[i : i + every] for i in range(0, len(groups), every)]
    return [
        (f"{few[0][0].split()[0]} to {few[-1][0]}" if len(few) > 1 else few[0][0], [r for _, own in few for r in own])
        for few in merged
    ]


def _front(axes: Axes, front: Sequence[TrainReport], best: Sequence[TrainReport]) -> None:
    """Draw time against memory; the plans at the lower left are those that none beats."""
    axes.set_xlabel("memory of the fullest device, GiB")
    unit = time_unit(max((r.step_seconds for r in front), default=1.0))
    axes.set_ylabel(f"time of a step, {unit.name}")
    axes.grid(True)
    if not front:
        axes.text(0.5, 0.5, "none fits", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    for (name, own), (colour, marker) in zip(_groups(front), SERIES, strict=False):
        xs, ys = [r.device_bytes / 2**30 for r in own], [r.step_seconds / unit.size for r in own]
        axes.plot(xs, ys, marker=marker, color=colour, markersize=3.6, linewidth=0, label=name, alpha=0.85)
    most = front[0].verdict.limit_bytes
    far = 1.05 * most / 2**30
    axes.set_xlim(0, far)
    limit(axes, most / 2**30, f"{front[0].case.cluster.device.name}: {show_bytes(most)}", far)
    if max(r.step_seconds for r in front) > 6 * min(r.step_seconds for r in front):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    else:
        axes.set_ylim(0)
    if best:
        _mark(axes, best[0], unit)
    if len(_groups(front)) > 1:
        under: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "borderaxespad": 0}
        axes.legend(ncols=2 if narrow() else 3, handletextpad=0.1, columnspacing=0.8, labelspacing=0.25, **under)


def _mark(axes: Axes, report: TrainReport, unit: Unit) -> None:
    """Ring the best plan."""
    place = (report.device_bytes / 2**30, report.step_seconds / unit.size)
    axes.plot(*place, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=INK, linewidth=0)
    axes.annotate("#1", place, (-7, 7), textcoords="offset points", fontsize=8, fontweight="bold", ha="right")


def _scaling(axes: Axes, fastest: Sequence[TrainReport]) -> None:
    """Draw tokens a second of the fastest plan of each number of devices, beside what perfect scaling would give."""
    from matplotlib.patheffects import withStroke

    devices = [r.plan.num_devices for r in fastest]
    rates = [r.tokens_per_second_per_gpu * r.plan.num_devices / 1e3 for r in fastest]
    axes.set_title("Strong scaling of the fastest plans", pad=14)
    axes.set_xlabel("devices")
    axes.set_ylabel("thousand tokens a second")
    ideal = [rates[0] * n / devices[0] for n in devices]
    axes.plot(devices, ideal, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), label="linear scaling")
    line: dict[str, Any] = {"color": "#0072B2", "marker": "o", "markersize": 4, "linewidth": 1.3}
    axes.plot(devices, rates, label="fastest plan, and its efficiency", **line)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    # Between powers of two the degrees divide little, which says more of the number than of the cluster.
    shown = [n for n in devices if n & (n - 1) == 0] if len(devices) > 8 else devices
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.minorticks_off()
    plain_log(axes.yaxis)
    for n, rate, whole in zip(devices, rates, ideal, strict=True):
        if n in shown and n != devices[0]:
            spot: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7, "va": "top", "ha": "left"}
            spot["path_effects"] = [withStroke(linewidth=2.2, foreground="white")]
            axes.annotate(f"{rate / whole:.0%}", (n, rate), (3, -5), color=INK, fontweight="bold", **spot)
    axes.grid(True)
    under: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.25), "borderaxespad": 0}
    axes.legend(ncols=1 if narrow() else 2, columnspacing=1.2, labelspacing=0.25, **under)


_Drawn: TypeAlias = "tuple[list[Bar], dict[str, BarStyle]]"


def _top_bars(best: Sequence[TrainReport], names: Sequence[str]) -> tuple[_Drawn, _Drawn]:
    """Return the bars of the time and of the memory of the best plans, with how their parts look."""
    times = [time_bar(r, name) for r, name in zip(best, names, strict=True)]
    return (times, TIME), ([memory_bars(r, f"#{i}")[0] for i, r in enumerate(best, 1)], MEMORY)


def _tops(left: Axes, right: Axes, best: Sequence[TrainReport], tops: tuple[_Drawn, _Drawn]) -> None:
    """Draw the time and the memory of the best plans beside each other, one row a plan, with their bands."""
    (times, _), (memory, _) = tops
    most = 1.17 * max(max(bar.length, bar.high) for bar in times)
    unit = time_unit(max(bar.length for bar in times))
    ceiling = best[0].verdict.limit_bytes
    # Totals that would stand on the line of the capacity stand beyond it.
    far = 1.33 * max(max(max(bar.length, bar.high) for bar in memory), ceiling)
    gib = bytes_unit()
    for axes, bars, looks, scale in ((left, times, TIME, (unit, most)), (right, memory, MEMORY, (gib, far))):
        stack(axes, bars, looks, *scale, wide=0.7 if narrow() else 0.45)
        totals(axes, bars, *scale, fontsize=7)
        axes.set_xlabel(scale[0].name, labelpad=1, loc="right")
        key_below(axes, bars, looks)
    left.set_title(f"Time of a step, the {len(best)} best" if len(best) > 1 else "Time of a step", pad=14)
    right.set_title("Memory of the fullest device", pad=14)
    left.tick_params(axis="y", labelsize=6.2)
    limit(right, ceiling / gib.size, show_bytes(ceiling), far / gib.size)


def side_by_side(place: Any, count: int) -> Any:
    """Return places for panels side by side, or below each other on narrow paper."""
    return place.subgridspec(count, 1) if narrow() else place.subgridspec(1, count)


def _common(best: Sequence[TrainReport]) -> list[str]:
    """Return the words that all of several plans share; degrees stay with each plan."""
    words = [plan_words(r.plan).split(", ") for r in best]
    return [w for w in words[0] if not w[-1].isdigit() and all(w in own for own in words)] if len(best) > 1 else []


def _row_names(best: Sequence[TrainReport]) -> list[str]:
    common = _common(best)
    return row_names([", ".join(w for w in plan_words(r.plan).split(", ") if w not in common) for r in best])


def _keys(bars: Sequence[Bar], looks: dict[str, BarStyle]) -> list[Any]:
    """Return what a legend of panels of half the page's width shows: the parts that are seen, and what whiskers are."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    least = seen(bars, 1.0 if narrow() else 0.45)
    shown = [look for key, look in looks.items() if any(bar.parts.get(key, 0.0) > least for bar in bars)]
    handles: list[Any] = [Patch(label=look.label, facecolor=look.colour) for look in shown]
    if any(bar.high > bar.low for bar in bars):
        whisker: dict[str, Any] = {"marker": "|", "markersize": 4, "linewidth": 1.0, "label": "8 of 10 published runs"}
        handles.append(Line2D([], [], color=INK, **whisker))
    return handles


def key_below(axes: Axes, bars: Sequence[Bar], looks: dict[str, BarStyle], columns: int = 2) -> None:
    """Put the names of the parts that occur below a panel of half the page's width, and what whiskers are."""
    from matplotlib.transforms import offset_copy

    handles = _keys(bars, looks)
    below = offset_copy(axes.transAxes, axes.get_figure(root=True), 0, -27, units="points")
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
    tight: dict[str, Any] = {"borderaxespad": 0, "borderpad": 0, "fontsize": 6.6, "handletextpad": 0.5}
    axes.legend(handles=handles, ncols=fitting(columns), handlelength=1.2, columnspacing=1.0, **tight, **place)


LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#117733")
_PANELS = {
    "train": ("step_seconds", "device_bytes"),
    "infer": ("tpot_seconds", "output_tokens_per_second"),
    "serve": ("ttft_p99_seconds", "capacity_per_second"),
}
_MOST_LINES, _MOST_BARS, _MOST_LETTERS = 8, 24, 70


def vary_figure(points: Sequence[VaryPoint], fields: tuple[str, ...], command: str) -> Figure:
    """Return two panels of headlines along the first field, a line for each value of the others; bars of words.

    Around each lies the band of 8 of 10 published runs.
    """
    known = [point for point in points if point.report is not None]
    heads = [head for head in HEADLINES[command] if head.key in _PANELS[command]]
    bars = _worded(fields[0], points)
    names = ["devices" if field == "on" else field.replace("_", " ") for field in fields]
    banded = any(_band(point.report, head)[1] for point in known for head in heads)
    lines = [title_of(points), *([f"{'whiskers' if bars else 'areas'}: 8 of 10 published runs"] if banded else [])]
    title = f"{' and '.join(head.head for head in heads)} by {' and '.join(names)}"
    figure, panels = sheet(title, lines, (2.3,) * len(heads))
    for axes, head in zip(panels, heads, strict=True):
        _lines(axes, known, fields, head)
        axes.set_xlim(-0.5, len({str(point.values[fields[0]]) for point in known}) - 0.5)
    panels[-1].set_xlabel(names[0])
    if len(fields) > 1:
        below: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, -0.3), "borderaxespad": 0}
        panels[-1].legend(ncols=fitting(4), **below)
    return figure


def _worded(field: str, points: Sequence[VaryPoint]) -> bool:
    """Return whether what is varied has no order along which a line could run: devices, models, words."""
    return field in ("on", "model") or not all(str(point.values[field])[:1].isdigit() for point in points)


def _lines(axes: Axes, points: Sequence[VaryPoint], fields: tuple[str, ...], head: Headline) -> None:
    groups: dict[str, list[VaryPoint]] = {}
    for point in points:
        groups.setdefault(", ".join(f"{name} {point.values[name]}" for name in fields[1:]), []).append(point)
    places = list(dict.fromkeys(str(point.values[fields[0]]) for point in points))
    drawn, bars = list(groups.items())[:_MOST_LINES], _worded(fields[0], points)
    for i, (label, group) in enumerate(drawn):
        aside = (i - (len(drawn) - 1) / 2) * 0.7 / len(drawn) if bars else 0.0
        placed = [(places.index(str(p.values[fields[0]])) + aside, head.of(p.report), p.report) for p in group]
        shown = [(x, y) for x, y, _ in placed if y is not None]
        at = list(zip(*shown, strict=True)) or [(), ()]
        if bars:
            axes.bar(at[0], at[1], width=0.7 / len(drawn), color=LINES[i], label=label)
        else:
            axes.plot(*at, "-o", ms=3, lw=1.1, color=LINES[i], label=label)
        _bands(axes, [(x, report) for x, y, report in placed if y is not None], head, "" if bars else LINES[i])
        failed = [(x, y) for x, y, report in placed if y is not None and not getattr(report, "fits", True)]
        if failed:
            axes.plot(*zip(*failed, strict=True), "x", ms=6, color=RED)
    slanted = sum(map(len, places)) > _MOST_LETTERS * paper_width() / SIZES["page"]
    axes.set_xticks(range(len(places)), places, rotation=30 if slanted else 0, ha="right" if slanted else "center")
    fails = any(not getattr(point.report, "fits", True) for point in points)
    axes.set_title(head.head + (" (x: does not fit)" if fails else ""))
    most = max((max(head.of(point.report) or 0.0, *_band(point.report, head)) for point in points), default=0.0)
    axes.set_ylim(0, 1.08 * most or 1.0)
    if head.key.endswith("_bytes"):
        _in_gib(axes)
    axes.yaxis.set_major_formatter(lambda value, _: _tick(head.show(value)) if value else "0")
    axes.grid(axis="y")


def _tick(text: str) -> str:
    """Return a number with its unit as an axis says it: without zeros behind the point.

    >>> _tick("20.00 s"), _tick("2.50 GiB"), _tick("1,000"), _tick("50.0%")
    ('20 s', '2.5 GiB', '1,000', '50%')
    """
    return re.sub(r"\.(\d*?)0+(?!\d)", lambda match: f".{match[1]}" if match[1] else "", text)


def _band(report: Any, head: Headline) -> tuple[float, float]:
    """Return the ends between which 8 of 10 published runs lie, zeros where none are known for a headline."""
    return cast(tuple[float, float], getattr(report, "interval", {}).get(head.key, (0.0, 0.0)))


def _bands(axes: Axes, reports: Sequence[tuple[float, Any]], head: Headline, colour: str) -> None:
    """Draw the bands of headlines: an area along a line of a colour, else a whisker on each bar."""
    ends = [(x, *_band(report, head)) for x, report in reports if _band(report, head)[1]]
    if not ends:
        return
    at, low, high = zip(*ends, strict=True)
    if colour:
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    else:
        axes.vlines(at, low, high, color=INK, linewidth=1.0)


def _in_gib(axes: Axes) -> None:
    """Put ticks of bytes at round GiB."""
    from matplotlib.ticker import MaxNLocator

    top = axes.get_ylim()[1] / 2**30
    axes.yaxis.set_ticks([tick * 2**30 for tick in MaxNLocator(5).tick_values(0, top) if 0 <= tick <= top])


def tornado_figure(effects: Sequence[Effect], name: str, seconds: float, title: str) -> Figure:
    """Return bars of how far the seconds move: constants over their bands, then choices, the widest first."""
    from matplotlib.patches import Patch

    shown = [one for one in effects if f"{one.least:.3f} {one.most:.3f}" != "1.000 1.000"][:_MOST_BARS]
    asked = f"What moves the {name.replace('_seconds', '')} of {show_seconds(seconds)}"
    figure, panels = sheet(asked, [title], (0.9 + 0.2 * len(shown),))
    axes: Any = panels[0]
    for y, one in enumerate(reversed(shown)):
        colour = LINES[2] if one.is_choice else LINES[0]
        start, end = 100 * (one.least - 1), 100 * (one.most - 1)
        axes.barh(y, end - start, left=start, height=0.7, color=colour if one.fits else GREY)
        change = f"{start:+.1f} to {end:+.1f}" if not one.is_choice else f"{start if start else end:+.1f}"
        axes.annotate(change, (max(end, 0), y), (3, 0), textcoords="offset points", fontsize=6.5, va="center")
    names = [f"{one.what} {one.value}" if one.is_choice else one.what for one in reversed(shown)]
    axes.set_yticks(range(len(shown)), names)
    axes.margins(x=0.14)
    axes.use_sticky_edges = False
    kinds = [(LINES[0], "constant, over its band"), (LINES[2], "choice, beside the plan"), (GREY, "does not fit")]
    kinds = kinds if any(not one.fits for one in shown) else kinds[:2]
    handles = [Patch(facecolor=colour, label=label) for colour, label in kinds]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.7 / (0.6 + 0.2 * len(shown))), ncols=fitting(3)
    )
    axes.axvline(0, color=GREY, lw=0.8)
    axes.set_xlabel("change of the seconds, %")
    return figure
