"""The page and the plot of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, fitting, narrow, paper_width, plain_log, slide
from shardwise.answers._page import Page
from shardwise.answers._plots import header
from shardwise.answers._plots_search import SERIES
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.search import StudyQuestion, StudyResult

TableRow = Mapping[str, Any]
_SHOWN = 20
_LATENCIES = {"step_seconds": "step", "tpot_seconds": "TPOT", "request_seconds": "request"}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
# Series that have a look of their own, values that are named on an axis, models with a landscape, bars of a plot.
_MOST_SERIES, _MOST_TICKS, _MOST_MODELS, _MOST_BARS = 14, 8, 3, 24


def sweep_page(result: StudyResult, asked: Sequence[StudyQuestion], shown: Sequence[str], width: int) -> Page:
    """Return how far a study is, the best plan of its first questions, and where the tables are."""
    page = Page(width)
    best = [row for row in result.rows if row["rank"] == 1]
    none = sum(row["rank"] == -1 for row in result.rows)
    wrong = [row for row in result.rows if row["rank"] is None]
    progress = f"{len(asked) - result.left:,} of {len(asked):,} questions answered, {result.before:,} of them before"
    page.label("STUDY", f"{progress}; {len(best):,} have a plan, {none:,} none that fits")
    if result.left:
        page.note(f"{result.left:,} left: run the same command again")
    if result.stale:
        many = "answers in the folder are" if len(result.stale) > 1 else "answer in the folder is"
        page.note(f"{len(result.stale):,} {many} stale: to another question, another file or another release")
    if wrong:
        page.note(f"{len(wrong):,} refused, the first: {wrong[0]['problem']}")
    if best:
        page.blank()
        latency = next((word for name, word in _LATENCIES.items() if best[0].get(name)), "seconds")
        page.table([("", *shown, latency, "devices"), *(_line(row, shown) for row in best[:_SHOWN])], header=True)
    if len(best) > _SHOWN:
        page.note(f"{len(best) - _SHOWN:,} more{' in the tables' if result.tables else ''}")
    page.blank()
    for path in result.tables:
        page.label("TABLE", str(path))
    if not result.left and not result.tables:
        page.label("TABLE", "none: they need polars, pip install 'shardwise[sweep]', and the same command again")
    return page


def _line(row: TableRow, shown: Sequence[str]) -> tuple[str, ...]:
    seconds = next((row[name] for name in _LATENCIES if row.get(name)), 0.0)
    return ("", *(_text(row.get(name)) for name in shown), show_seconds(seconds), str(row["devices"]))


def _text(value: Any) -> str:
    return "-" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> float | None:
    """Return a value of a study as a number: of devices how many there are, of a rate its figure in the plain unit.

    >>> _number("8xh100"), _number("2x8xh100"), _number(2.5), _number("3.35TB/s"), _number("900GB/s"), _number("h100")
    (8.0, 16.0, 2.5, 3350000000000.0, 900000000000.0, None)
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    counts = re.match(r"((?:\d+\s*[xX]\s*)+)(?=\D)", str(value))
    if counts:
        return float(math.prod(int(n) for n in re.findall(r"\d+", counts[1])))
    figure = re.match(r"(\d+(?:\.\d+)?)\s*([kKMGTP]?)", str(value))
    return float(figure[1]) * _PREFIXES[figure[2]] if figure else None


def sweep_figure(rows: Sequence[TableRow], shown: Sequence[str], headline: str) -> Figure:
    """Return the plots that a study has: seconds by devices and rates, landscapes of two of them, dollars by device.

    A study of neither has the headline of each model and device, and one without a plan says so.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    best = [row for row in rows if row["rank"] == 1]
    scales = [name for name in shown if name not in ("model", "on") and _spread(best, name)]
    # A price moves no second.
    scales = sorted(scales, key=lambda name: name == "price")[:2]
    lines = [*(["on"] if _spread(best, "on") else []), *scales]
    barred = _barred(best, lines, headline)
    bars = len({_series_of(row, best) for row in best if row.get(barred)})
    heights = [2.4] * len(lines) + ([2.4] if len(scales) == 2 else [])
    heights += [0.7 + 0.16 * min(bars, _MOST_BARS)] if barred else []
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06, rect=(0.03, 0, 0.97, 1))
    columns = 2 if slide() else 1
    tall = [max(heights[i : i + columns]) for i in range(0, len(heights), columns)]
    figure = Figure(figsize=(paper_width(), 1.2 + sum(tall)), layout=engine)
    grid = figure.add_gridspec(1 + len(tall), columns, height_ratios=[0.4, *tall])
    shown_models = _models(best)[: 1 if narrow() else _MOST_MODELS] if len(scales) == 2 else []
    header(figure.add_subplot(grid[0, :]), *_headings(best, len(rows), lines, shown_models))
    places = iter([(1 + i // columns, i % columns) for i in range(len(heights))])
    for name in lines:
        _lines(figure.add_subplot(grid[next(places)]), best, name, _headline(name, best, headline))
    if lines:
        _legend(figure, best)
    if len(scales) == 2:
        inner = grid[next(places)].subgridspec(1, len(shown_models))
        for i, model in enumerate(shown_models):
            some = [row for row in best if row.get("model") == model]
            _landscape(figure.add_subplot(inner[i]), some, scales, _headline(scales[1], best, headline))
    if barred:
        _bars(figure.add_subplot(grid[next(places)]), best, barred)
    return figure


def _barred(best: Sequence[TableRow], lines: Sequence[str], headline: str) -> str:
    """Return what bars show: dollars where there are several, else the headline where nothing else is drawn."""
    if len({_series_of(row, best) for row in best if row.get(_dollars(row))}) > 1:
        return _dollars(best[0])
    return headline if best and not lines else ""


def _headings(
    best: Sequence[TableRow], count: int, lines: Sequence[str], landscapes: Sequence[str]
) -> tuple[str, list[str]]:
    """Return the title, how many rows there are and what of a name all of them share, and what panels leave out."""
    shared = [words for words in (_models(best), _devices(best)) if len(words) == 1]
    words = ", ".join(str(one[0]) for one in shared)
    texts = [f"{len(best):,} of {count:,} rows have a plan" + f"; {words}" * bool(words)]
    if not best:
        texts.append("no question has a plan that fits: there is nothing to draw")
    notes = ["the best over what a panel does not show"] if len(lines) > 1 else []
    notes += ["a line for each model"] if lines and not _named(best) and len(_models(best)) > len(SERIES) else []
    if landscapes and len(landscapes) < len(_models(best)):
        notes.append(f"landscapes of {len(landscapes)} of {len(_models(best))} models")
    return "The best plan of every question", [*texts, *(notes if narrow() else filter(None, ["; ".join(notes)]))]


def _spread(rows: Sequence[TableRow], name: str) -> bool:
    values = [_number(row.get(name)) for row in rows]
    return None not in values and len(set(values)) > 1


def _device(row: TableRow) -> str:
    return re.sub(r"^(\d+\s*[xX]\s*)+", "", str(row.get("on")))


def _models(rows: Sequence[TableRow]) -> list[str]:
    return list(dict.fromkeys(str(row.get("model")) for row in rows))


def _devices(rows: Sequence[TableRow]) -> list[str]:
    return list(dict.fromkeys(map(_device, rows)))


def _series_of(row: TableRow, rows: Sequence[TableRow]) -> str:
    """Return what tells the line of a row from others: its model, its device, or both where both vary."""
    words = [str(row.get("model"))] if len(_models(rows)) > 1 else []
    return " on ".join([*words, *([_device(row)] if len(_devices(rows)) > 1 or not words else [])])


def _dollars(row: TableRow) -> str:
    return "usd" if row.get("usd") else "usd_per_million_output_tokens"


def _headline(name: str, rows: Sequence[TableRow], headline: str) -> str:
    """Return what is drawn over an axis of a study: over prices dollars, where there are any."""
    return _dollars(rows[0]) if name == "price" and rows and rows[0].get(_dollars(rows[0])) else headline


_TITLES = {
    "step_seconds": "time of a step, seconds", "request_seconds": "time of a request, seconds", "usd": "dollars",
    "usd_per_million_output_tokens": "dollars per million output tokens", "price": "price, dollars a device hour",
    "on": "devices",
}  # fmt: skip


def _title(name: str) -> str:
    """Return the words of a headline or of an axis of a study.

    >>> _title("step_seconds"), _title("slow_bandwidth"), _title("peak_flops.bf16")
    ('time of a step, seconds', 'slow bandwidth', 'peak flops bf16')
    """
    return _TITLES.get(name) or re.sub("[_.]", " ", name)


def _named(rows: Sequence[TableRow]) -> bool:
    """Return whether each series has a look and a name of its own."""
    return len({_series_of(row, rows) for row in rows}) <= _MOST_SERIES


def _looks(rows: Sequence[TableRow]) -> dict[str, dict[str, Any]]:
    """Return how each series is drawn; many have the colour of their device, and the marker of their model."""
    series = {_series_of(row, rows): (_device(row), str(row.get("model"))) for row in rows}
    looks = [{"color": c, "marker": m, "ls": line} for line in ("-", "--", ":", "-.") for c, m in SERIES]
    if _named(rows):
        return dict(zip(series, looks, strict=False))
    devices, models = _devices(rows), _models(rows)
    own = {name: looks[place % len(looks)] for place, name in enumerate(devices)}
    markers = {name: looks[place % len(looks)]["marker"] for place, name in enumerate(models)}
    by_model = len(models) <= len(SERIES)
    return {
        one: own[device] | ({"marker": markers[model]} if by_model else {}) for one, (device, model) in series.items()
    }


def _legend(figure: Figure, rows: Sequence[TableRow]) -> None:
    """Name the series of all lines once, below the plots: where they are many, the devices and the models."""
    from matplotlib.lines import Line2D

    looks = _looks(rows)
    named: dict[str, dict[str, Any]] = looks
    if not _named(rows):
        by_model = len(_models(rows)) <= len(SERIES)
        named = {_device(row): looks[_series_of(row, rows)] | ({"marker": ""} if by_model else {}) for row in rows}
        plain = {"color": GREY, "ls": ""}
        named |= {str(r.get("model")): looks[_series_of(r, rows)] | plain for r in rows} if by_model else {}
    if 1 < len(named) <= 2 * _MOST_SERIES:
        handles = [Line2D([], [], ms=3.5, label=name, **look) for name, look in named.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=fitting(3))


def _lines(axes: Axes, rows: Sequence[TableRow], name: str, headline: str) -> None:
    """Draw the least of the headline at each value of an axis, a line for each model and device."""
    drawn: dict[str, dict[float, float]] = {}
    for row in rows:
        least, at = drawn.setdefault(_series_of(row, rows), {}), _number(row[name]) or 0.0
        least[at] = min(least.get(at, math.inf), row[headline])
    looks = _looks(rows)
    for one, least in drawn.items():
        axes.plot(sorted(least), [least[at] for at in sorted(least)], ms=3.5, lw=1.1, **looks[one])
    axes.set(xscale="log", yscale="log", xlabel=_title(name))
    axes.set_ylabel(_title(headline))
    plain_log(axes.yaxis)
    plain_log(axes.xaxis)
    words = _words(rows, name)
    if len(words) <= _MOST_TICKS:
        axes.set_xticks(list(words), list(words.values()), minor=False)
        axes.set_xticks([], minor=True)


def _words(rows: Sequence[TableRow], name: str) -> dict[float, str]:
    """Return the values of an axis in order, each as the study has it."""
    names = {_number(row[name]) or 0.0: row[name] for row in rows}
    return {at: f"{at:g}" if name == "on" else str(names[at]) for at in sorted(names)}


def _landscape(axes: Axes, rows: Sequence[TableRow], names: Sequence[str], headline: str) -> None:
    """Draw the least of the headline of one model over two axes of the study."""
    least: dict[tuple[float, float], float] = {}
    for row in rows:
        at = (_number(row[names[0]]) or 0.0, _number(row[names[1]]) or 0.0)
        least[at] = min(least.get(at, math.inf), row[headline])
    across, up = (_words(rows, name) for name in names)
    grid = [[least.get((x, y), math.nan) for x in across] for y in up]
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="cividis_r")
    turned = 90 if max(map(len, across.values())) * len(across) > 12 else 0
    axes.set_xticks(range(len(across)), list(across.values()), rotation=turned)
    axes.set_yticks(range(len(up)), list(up.values()))
    across_title, up_title = (_title(name).partition(",")[0] for name in names)
    axes.set(xlabel=across_title, ylabel=up_title, title=str(rows[0].get("model")))
    axes.figure.colorbar(image, ax=axes, label=f"least {_title(headline)}", format=lambda value, _: f"{value:,.10g}")


def _bars(axes: Axes, rows: Sequence[TableRow], headline: str) -> None:
    """Draw the least headline, such as dollars, of each model and device; the least of them where there are many."""
    least: dict[str, float] = {}
    for row in rows:
        if value := row.get(headline):
            label = _series_of(row, rows)
            least[label] = min(least.get(label, math.inf), value)
    order = sorted(least, key=lambda label: -least[label])[-_MOST_BARS:]
    axes.barh(order, [least[label] for label in order], color=GREY)
    axes.locator_params(axis="x", nbins=2 if narrow() else 8)
    if len(order) < 3:
        axes.set_ylim(-1, len(order))
    axes.set_xlabel(f"{_title(headline)},\nthe {'cheapest' if headline.startswith('usd') else 'least'} of the study")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
