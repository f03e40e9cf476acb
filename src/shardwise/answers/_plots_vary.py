"""Plots of one question at many values: time and memory along a field, and a tornado of what moves the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._paper import GREY, RED
from shardwise.answers._plots import sheet
from shardwise.answers._questions import HEADLINES, Effect, Headline, VaryPoint, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#117733")
_PANELS = {
    "train": ("step_seconds", "device_bytes"),
    "infer": ("tpot_seconds", "output_tokens_per_second"),
    "serve": ("ttft_p99_seconds", "capacity_per_second"),
}
_MOST_LINES, _MOST_BARS, _MOST_LETTERS = 8, 24, 70


def vary_figure(points: Sequence[VaryPoint], fields: tuple[str, ...], command: str) -> Figure:
    """Return two panels of headlines along the first field, a line for each value of the others."""
    known = [point for point in points if point.report is not None]
    heads = [head for head in HEADLINES[command] if head.key in _PANELS[command]]
    figure, panels = sheet(f"along {fields[0].replace('_', ' ')}", [title_of(points)], (2.3,) * len(heads))
    for axes, head in zip(panels, heads, strict=True):
        _lines(axes, known, fields, head)
    if len(fields) > 1:
        panels[0].legend(loc="best")
    return figure


def _lines(axes: Axes, points: Sequence[VaryPoint], fields: tuple[str, ...], head: Headline) -> None:
    groups: dict[str, list[VaryPoint]] = {}
    for point in points:
        groups.setdefault(", ".join(f"{name} {point.values[name]}" for name in fields[1:]), []).append(point)
    places = list(dict.fromkeys(str(point.values[fields[0]]) for point in points))
    for i, (label, group) in enumerate(list(groups.items())[:_MOST_LINES]):
        found = [(places.index(str(p.values[fields[0]])), head.of(p.report), p.report) for p in group]
        shown = [(x, y) for x, y, _ in found if y is not None]
        axes.plot(*zip(*shown, strict=True) if shown else ([], []), "-o", ms=3, lw=1.1, color=LINES[i], label=label)
        failed = [(x, y) for x, y, report in found if y is not None and not getattr(report, "fits", True)]
        if failed:
            axes.plot(*zip(*failed, strict=True), "x", ms=6, color=RED)
    slanted = sum(map(len, places)) > _MOST_LETTERS
    axes.set_xticks(range(len(places)), places, rotation=30 if slanted else 0, ha="right" if slanted else "center")
    fails = any(not getattr(point.report, "fits", True) for point in points)
    axes.set_title(head.head + (" (x: does not fit)" if fails and head.key == "device_bytes" else ""))
    most = max((head.of(point.report) or 0.0 for point in points), default=0.0)
    axes.set_ylim(0, 1.08 * most or 1.0)
    if head.key.endswith("_bytes"):
        _in_gib(axes)
    axes.yaxis.set_major_formatter(lambda value, _: head.show(value) if value else "0")
    axes.grid(axis="y")


def _in_gib(axes: Axes) -> None:
    """Put ticks of bytes at round GiB."""
    from matplotlib.ticker import MaxNLocator

    top = axes.get_ylim()[1] / 2**30
    axes.yaxis.set_ticks([tick * 2**30 for tick in MaxNLocator(5).tick_values(0, top) if 0 <= tick <= top])


def tornado_figure(effects: Sequence[Effect], name: str, seconds: float, title: str) -> Figure:
    """Return bars of how far the seconds move: constants over their bands, then choices, the widest first."""
    shown = effects[:_MOST_BARS]
    figure, panels = sheet(f"what moves {name.replace('_', ' ')}", [title], (0.6 + 0.2 * len(shown),))
    axes: Any = panels[0]
    for y, one in enumerate(reversed(shown)):
        colour = LINES[2] if one.is_choice else LINES[0]
        start, end = 100 * (one.least - 1), 100 * (one.most - 1)
        axes.barh(y, end - start, left=start, height=0.7, color=colour if one.fits else GREY)
    names = [f"{one.what} {one.value}" if one.is_choice else one.what for one in reversed(shown)]
    names = [name + ("" if one.fits else " (does not fit)") for name, one in zip(names, reversed(shown), strict=True)]
    axes.set_yticks(range(len(shown)), names)
    axes.margins(x=0.04)
    axes.use_sticky_edges = False
    axes.axvline(0, color=GREY, lw=0.8)
    axes.set_xlabel("change of the seconds, %")
    return figure
