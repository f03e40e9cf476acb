"""What every plot shares: style, palette, header, stacked bars, and writing to a file.

Colours are those of Okabe and Ito (jfly.uni-koeln.de/color, 2008) and of Paul Tol (personal.sron.nl/~pault, 2021),
which people with any kind of colour vision tell apart; what is hidden is hatched as well.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise._version import __version__
from shardwise.answers._canvas import GREY, INK, ON_DARK, ON_LIGHT, RED, WIDTH, fitting, narrow, paper_width
from shardwise.answers._described import describe
from shardwise.records import dataclass
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.plans import Plan

WHISKER = "8 of 10 published runs"
AXES = {
    "tp": ("tensor parallel", "#D55E00"),
    "tp2": ("tensor parallel, second axis", "#A63D00"),
    "cp": ("context parallel", "#E69F00"),
    "ep": ("expert parallel", "#AA4499"),
    "etp": ("expert tensor parallel", "#882255"),
    "pp": ("between stages", "#F0A58F"),
    "dp": ("data parallel", "#CC79A7"),
    "host": ("host link", "#44AA99"),
}


@dataclass(frozen=True, slots=True)
class BarStyle:
    """How one part of a bar looks: its label and colour, and whether it is hatched."""

    label: str
    colour: str
    hatch: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """One stacked bar: its name, its parts by key, and where 8 of 10 measurements of its length lie, if known.

    At `limit` a line crosses it, which no text may stand on; 0 is without one.
    """

    name: str
    parts: Mapping[str, float]
    low: float = 0.0
    high: float = 0.0
    limit: float = 0.0

    @property
    def length(self) -> float:
        """The sum of the parts."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of an axis: its name, its size in SI units, and how values are printed."""

    name: str
    size: float
    show: Callable[[float], str]


def sheet(
    title: str, lines: Sequence[str], heights: Sequence[float], width: float = 0.0, first: int = 0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with a header, and one panel under the other of so many inches each.

    Those after the `first` few stand in a second column, where there are such.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = width or paper_width()
    text = wrapped(lines, width)
    head = head_height(title, text)
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    parts = [part for part in (heights[: first or None], heights[first:] if first else []) if part]
    tall = max(map(sum, parts))
    figure = Figure(figsize=(width, head + tall), layout=engine)
    figure.set_label(title)
    if len(parts) == 1:
        grid = figure.add_gridspec(1 + len(heights), 1, height_ratios=[head, *heights])
        header(figure.add_subplot(grid[0]), title, text)
        return figure, [figure.add_subplot(grid[i + 1]) for i in range(len(heights))]
    grid = figure.add_gridspec(2, 1, height_ratios=[head, tall])
    header(figure.add_subplot(grid[0]), title, text)
    sides = grid[1].subgridspec(1, 2)
    columns = [sides[i].subgridspec(len(part), 1, height_ratios=part) for i, part in enumerate(parts)]
    return figure, [
        figure.add_subplot(column[i]) for column, part in zip(columns, parts, strict=True) for i in range(len(part))
    ]


def wrapped(lines: Sequence[str], width: float) -> list[str]:
    """Return the lines of a header, cut to the width of a picture in inches; those of one text are alike in length.

    >>> wrapped(["4,096 tokens a sequence and 8 fit"], 2.2)
    ['4,096 tokens a', 'sequence and 8 fit']
    """
    return [piece for line in lines for piece in _balanced(line, round(14 * width))]


def _balanced(line: str, most: int) -> list[str]:
    """Return a line in as few pieces as fit, cut so that no word is left alone on the last."""
    ways = (textwrap.wrap(line, width, break_on_hyphens=False) for width in range(max(most // 2, 12), most))
    pieces = textwrap.wrap(line, most, break_on_hyphens=False)
    if len(pieces) == 1 or len(pieces[-1]) >= most // 3:
        return pieces
    return next((way for way in ways if len(way) == len(pieces)), pieces)


def row_names(names: Sequence[str]) -> list[str]:
    """Return plans in words, numbered and in lines that fit beside their bars; nothing is cut."""
    width = 24 if narrow() else 36
    # A word and its number stay together.
    numbered = [f"#{i}  {name}".replace(" ", "\u00a0").replace(",\u00a0", ", ") for i, name in enumerate(names, 1)]
    return ["\n".join(textwrap.wrap(name, width, break_on_hyphens=False)) for name in numbered]


def row_inches(names: Sequence[str], least: float) -> float:
    """Return the height of a row whose name has as many lines as the longest."""
    return max(least, 0.06 + 0.107 * max((name.count("\n") + 1 for name in names), default=1))


def _titled(title: str) -> list[str]:
    """Return a title in lines as long as the paper has room for beside the version."""
    return textwrap.wrap(title, round(11 * paper_width()) - 4) or [""]


def head_height(title: str, text: Sequence[str]) -> float:
    """Return the inches of a header."""
    return 0.3 + 0.16 * len(text) + 0.18 * (len(_titled(title)) - 1)


def header(axes: Axes, title: str, text: Sequence[str]) -> None:
    """Write a title and lines below it into axes of their own."""
    from matplotlib.transforms import blended_transform_factory

    axes.axis("off")
    texts, start, at = _titled(title), 0.0, axes.transAxes
    if narrow():
        # Names of bars take so much of a column that the header begins at its edge.
        start, at = 0.03, blended_transform_factory(axes.figure.transFigure, axes.transAxes)
    shown = axes.text(start, 1, "\n".join(texts), fontsize=11, fontweight="bold", va="top", transform=at, color=INK)
    under: dict[str, Any] = {
        "xytext": (0, -17 - 13.2 * (len(texts) - 1)),
        "textcoords": "offset points",
        "va": "top",
        "color": GREY,
        "fontsize": 8,
    }
    lines = axes.annotate("\n".join(text), (start, 1), xycoords=at, linespacing=1.35, **under)
    if narrow():
        for one in (shown, lines):
            one.set_in_layout(False)
        # Of the texts that reach beyond the panels only the height counts.
        tall = "\n".join(" " * max(len(text), 1 + (len(texts) + len(text)) // 2))
        axes.annotate(tall, (0, 1), xycoords="axes fraction", linespacing=1.35, **under)
    if not narrow():
        right: dict[str, Any] = {"ha": "right", "va": "top", "transform": axes.transAxes, "color": GREY}
        axes.text(1, 1, f"shardwise {__version__}", fontsize=6.5, **right)


def time_unit(largest: float) -> Unit:
    """Return the unit in which a time axis is read.

    >>> time_unit(0.05).name, time_unit(12.0).name
    ('milliseconds', 'seconds')
    """
    names = {1e-6: "microseconds", 1e-3: "milliseconds", 1.0: "seconds"}
    size = next((s for s in (1.0, 1e-3) if largest >= s), 1e-6)
    return Unit(names[size], size, show_seconds)


def bytes_unit() -> Unit:
    """Return the unit of memory."""
    return Unit("GiB", 2.0**30, lambda value: f"{value / 2**30:.1f} GiB" if value >= 2**30 / 20 else _mib(value))


def _mib(value: float) -> str:
    return f"{value / 2**20:.0f} MiB"


def ink_on(colour: str) -> str:
    """Return black or white, whichever reads better on a colour (WCAG 2 relative luminance).

    >>> ink_on("#ffffff"), ink_on("#0072B2")
    ('#000000', '#fefefe')
    """
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return ON_LIGHT if luminance > 0.22 else ON_DARK


def stack(
    axes: Axes, bars: Sequence[Bar], looks: Mapping[str, BarStyle], unit: Unit, most: float, wide: float = 1.0
) -> None:
    """Draw stacked bars from the top down, with values in the parts that are wide enough, and whiskers.

    `wide` is the share of the page's width that the panel has.
    """
    for row, bar in enumerate(bars):
        at = 0.0
        for key, look in looks.items():
            amount = bar.parts.get(key, 0.0)
            if amount > 0:
                _part(axes, (row, at, amount, bar.limit), look, unit, most * WIDTH / wide / paper_width())
                at += amount
        if bar.high > bar.low:
            _whisker(axes, row, bar, unit)
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.45, -0.55)
    axes.set_xlim(0, most / unit.size)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)


def _part(axes: Axes, place: tuple[int, float, float, float], look: BarStyle, unit: Unit, most: float) -> None:
    """Draw one part; `most` is what an axis as wide as the page would show."""
    row, at, amount, crossed = place
    edge: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.6}
    face: dict[str, Any] = {"color": look.colour, "hatch": look.hatch, "alpha": 0.55 if look.hatch else 1.0}
    axes.barh(row, amount / unit.size, left=at / unit.size, height=0.62, **face, **edge)
    text = unit.show(amount)
    middle = middle_of(at, at + amount, crossed, 0.0112 * len(text) * most)
    if middle is not None:
        ink = INK if look.hatch else ink_on(look.colour)
        axes.text(middle / unit.size, row, text, ha="center", va="center", fontsize=6.8, color=ink)


def middle_of(start: float, end: float, crossed: float, width: float) -> float | None:
    """Return the middle of a text so wide between two ends and off the line that crosses, None where it has no room.

    >>> middle_of(0, 10, 0, 4), middle_of(0, 10, 6, 4), middle_of(0, 10, 5, 6)
    (5.0, 3.0, None)
    """
    middle = (start + end) / 2
    if start < crossed < end and abs(crossed - middle) < width / 2:
        start, end = max((start, crossed), (crossed, end), key=lambda part: part[1] - part[0])
        middle = (start + end) / 2
    return middle if end - start > width else None


def totals(axes: Axes, bars: Sequence[Bar], unit: Unit, most: float, fontsize: float = 8.0) -> None:
    """Write the length of every bar beside it, or beyond the line of its limit where it would stand on that.

    An axis goes to `most`; its width in points is that of a page's panel, or in small print of half of one.
    """
    across = most / (460 if fontsize >= 8 else 150) * (1.0 if narrow() and fontsize < 8 else WIDTH / paper_width())
    for row, bar in enumerate(bars):
        text = unit.show(bar.length)
        # Bold digits are 0.7 of the size wide, and a line needs two points of air.
        end = bar.length + (6 + 0.68 * fontsize * len(text)) * across
        at = bar.limit if bar.length - 2 * across < bar.limit < end else bar.length
        bold: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontweight": "bold", "color": INK}
        axes.annotate(text, (at / unit.size, row), (4, 0), fontsize=fontsize, zorder=8, **bold)


def _whisker(axes: Axes, row: int, bar: Bar, unit: Unit) -> None:
    low, end, high = (value / unit.size for value in (bar.low, bar.length, bar.high))
    reach = [[max(0.0, end - low)], [max(0.0, high - end)]]
    axes.errorbar(end, row + 0.4, xerr=reach, fmt="|", color=INK, capsize=2.5, linewidth=1.0, markersize=5, zorder=5)


def seen(bars: Sequence[Bar], wide: float = 1.0) -> float:
    """Return what a part must be more of to be half a point wider than its edges, on so much of the page's width."""
    return 1.1 / (62 * wide * paper_width()) * max((bar.length for bar in bars), default=0.0)


def legend(axes: Axes, bars: Sequence[Bar], looks: Mapping[str, BarStyle], unit: Unit) -> None:
    """Put the parts that occur below a panel, with their amounts and shares where there is one bar."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.transforms import offset_copy

    alone, handles = len(bars) == 1, list[Any]()
    least = 0.0 if alone else seen(bars)  # what is thinner is named beside its amount alone
    for key, look in looks.items():
        amounts = [bar.parts.get(key, 0.0) for bar in bars]
        if max(amounts) > least:
            more = f"  {unit.show(amounts[0])}, {amounts[0] / bars[0].length:.1%}" if alone else ""
            face: dict[str, Any] = {"facecolor": look.colour, "hatch": look.hatch, "alpha": 0.55 if look.hatch else 1.0}
            handles.append(Patch(label=look.label + more, edgecolor="white", **face))
    if any(bar.high > bar.low for bar in bars):
        handles.append(Line2D([], [], color=INK, marker="|", markersize=4, linewidth=1.0, label=WHISKER))
    below = offset_copy(axes.transAxes, axes.get_figure(root=True), 0, -27, units="points")
    place: dict[str, Any] = {
        "loc": "upper left",
        "bbox_to_anchor": (0, 0),
        "bbox_transform": below,
        "borderaxespad": 0,
        "borderpad": 0,
    }
    columns = columns_of(bars)
    axes.legend(handles=handles, ncols=columns, handlelength=1.4, handleheight=1.0, columnspacing=1.6, **place)


def columns_of(bars: Sequence[Bar]) -> int:
    """Return the columns of a legend: amounts beside the names take the room of one."""
    return fitting(2 if len(bars) == 1 else 3)


def limit(axes: Axes, at: float, text: str, most: float) -> None:
    """Draw the capacity of the device as a line across a panel, named at its upper end."""
    axes.axvline(at, color=RED, linewidth=1.2, linestyle=(0, (4, 2)), zorder=4)
    left = at > 0.6 * most
    axes.annotate(
        text,
        (at, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(-3 if left else 3, 1),
        textcoords="offset points",
        ha="right" if left else "left",
        va="bottom",
        color=RED,
        fontsize=7.2,
    )


def title_of(model: str, count: int, device: str) -> str:
    """Return the title of a plot: the model and what it runs on."""
    return f"{model} on {count:,} \u00d7 {device}"


def plan_words(plan: Plan) -> str:
    """Return a plan in words, the schedule included where there is a pipeline.

    >>> from shardwise import Plan
    >>> plan_words(Plan(tp=2, pp=4, dp=2, micro_batch=2))
    'tp 2, pp 4, dp 2, 1f1b, micro-batch 2, sequence parallel'
    """
    words = [describe(plan), *([plan.schedule] if plan.pp > 1 else []), f"micro-batch {plan.micro_batch}"]
    return ", ".join([*words, *(["sequence parallel"] if plan.sequence_parallel and plan.tp > 1 else [])])
