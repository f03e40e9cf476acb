"""The plot of a validation: predicted against measured, errors by device, errors by the year of the device."""

from __future__ import annotations

import html
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, RED, Canvas, page_of, plain_log, styled, svg_of
from shardwise.answers._plots import sheet
from shardwise.libraries import is_installed
from shardwise.measured import Comparison, Errors, Validation, examples, fits_of, reasons, rules, summary
from shardwise.units import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# What metrics measure -> its name and colour; the unit of both axes is that of the metric.
GROUPS = {
    "seconds": ("times", "#0072B2"),
    "rates": ("rates", "#E69F00"),
    "bytes": ("memory", "#009E73"),
    "other": ("the rest", "#888888"),
}
_MOST = 24
_FAR = 3.0


def group_of(metric: str) -> str:
    """Return what a metric measures, by its name.

    >>> group_of("step_time"), group_of("tokens_per_second_per_gpu"), group_of("peak_memory")
    ('seconds', 'rates', 'bytes')
    """
    if "per_second" in metric or metric in ("mfu", "hfu"):
        return "rates"
    if "memory" in metric or "bytes" in metric or "kv_cache" in metric:
        return "bytes"
    return "other" if metric in ("fits", "gpu_hours") or metric.startswith("op_efficiency") else "seconds"


def validate_figure(validation: Validation) -> Figure:
    """Return predicted over measured on logarithmic axes, and the spread of errors by device and by its year."""
    rows = [row for row in validation.predicted if row.relative_error is not None and row.metric != "fits"]
    by_device, by_year = _grouped(rows, "device"), _grouped([r for r in rows if r.year], "year")
    share = f"{len(validation.predicted):,} of {len(validation.rows):,} rows predicted"
    lines = [f"{share}; boxes hold half of the rows, whiskers 8 of 10"]
    heights = [4.4, 0.6 + 0.2 * max(len(by_device), 1), 0.7 + 0.22 * max(len(by_year), 1)]
    figure, (scatter, devices, years) = sheet("predicted against measured", lines, heights)
    _scatter(scatter, rows)
    _boxes(devices, by_device, "by device")
    _boxes(years, by_year, "by year in which the device came out")
    return figure


def _grouped(rows: Sequence[Comparison], field: str) -> dict[str, list[float]]:
    errors_of: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors_of[str(getattr(row, field))].append(row.relative_error or 0.0)
    most = sorted(errors_of, key=lambda name: -len(errors_of[name]))[:_MOST]
    return {name: errors_of[name] for name in sorted(most)}


def _scatter(axes: Axes, rows: Sequence[Comparison]) -> None:
    area = max(7.0, min(28.0, 2000 / max(len(rows), 1)))
    for name, (label, colour) in GROUPS.items():
        own = [row for row in rows if group_of(row.metric) == name and row.predicted]
        if own:
            place: list[Any] = [[row.measured for row in own], [row.predicted for row in own]]
            look: dict[str, Any] = {"s": area, "alpha": 0.7, "color": colour, "linewidths": 0, "rasterized": True}
            axes.scatter(*place, label=f"{label} ({len(own):,})", **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, zorder=0)
    axes.set_xlim(low, high)
    if high < 100 * low:  # over few decades matplotlib labels minor ticks too, one over the other
        plain_log(axes.xaxis)
        plain_log(axes.yaxis)
    axes.set_xlabel("measured, SI units")
    axes.set_ylabel("predicted")
    axes.grid(True)
    if rows:
        axes.legend(loc="upper left")


def _boxes(axes: Axes, groups: dict[str, list[float]], title: str) -> None:
    axes.set_title(title)
    names = [f"{name} ({len(errors):,})" for name, errors in groups.items()]
    if not groups:
        axes.axis("off")
        return
    shown = [[min(error, _FAR) * 100 for error in errors] for errors in groups.values()]
    style: Any = {"color": GREY, "linewidth": 0.8}
    axes.boxplot(
        shown, orientation="horizontal", whis=(10, 90), showfliers=False, widths=0.55,
        medianprops={"color": RED, "linewidth": 1.2}, boxprops=style, whiskerprops=style, capprops=style,
    )  # fmt: skip
    axes.set_yticks(range(1, len(names) + 1), names)
    axes.set_ylim(len(names) + 0.6, 0.4)
    axes.axvline(0, color=GREY, linewidth=0.6, zorder=0)
    axes.set_xlabel("predicted over measured less one, percent")
    axes.grid(axis="x")


_HEAD = ("rows", "bias", "median", "p90", "mean", "largest", "in band")
_TABLES = (("metric",), ("source", "metric"), ("device", "metric"), ("family", "metric"), ("quality", "metric"))
_MOST_ROWS = 5000


def validate_html(validation: Validation, dark: bool = False) -> str:
    """Return the report as a document of its own: styles and drawings are inside."""
    share = f"{len(validation.predicted):,} of {len(validation.rows):,} rows predicted ({validation.coverage:.1%})"
    parts = [
        "<h1>Predicted against measured</h1>",
        f"<p>{share}; errors are predicted over measured, less one, and bias is their median.</p>",
        _fits(validation),
        _drawing(validation, dark),
        *(_errors(summary(validation.rows, fields), fields) for fields in (*_TABLES, ("year", "metric"))),
        _refused(validation),
        "<h2>Columns that are not read</h2>" if validation.unread else "",
        _table(("file", "column", "may be meant"), validation.unread, ()) if validation.unread else "",
        "<h2>What is assumed for blank fields</h2>",
        _table(("field", "rule", "because"), ((r.field, r.says, r.because) for r in rules()), ()),
        _rows(validation.rows),
    ]
    return page_of("predicted against measured", "\n".join(parts), dark)


def _fits(validation: Validation) -> str:
    fits = fits_of(validation.rows)
    lines = [f"{fits.ran_called_unfit} of {fits.ran} configurations that ran are said not to fit"] * bool(fits.ran)
    lines += [f"{fits.failed_called_fit} of {fits.failed} that ran out of memory are said to fit"] * bool(fits.failed)
    return f"<p>{'; '.join(lines)}.</p>" if lines else ""


def _refused(validation: Validation) -> str:
    first = examples(validation.rows)
    rows = [(f"{count:,}", reason, first[reason]) for reason, count in reasons(validation.rows)]
    return f"<h2>Refused</h2>\n{_table(('rows', 'reason', 'first'), rows, (0,))}" if rows else ""


def _drawing(validation: Validation, dark: bool) -> str:
    """Return the plot as SVG; without matplotlib, where to get it."""
    if not is_installed("matplotlib"):
        return "<p>Plots need matplotlib: pip install 'shardwise[plots]'.</p>"
    with styled(Canvas(dark=dark)):
        return svg_of(validate_figure(validation))


def _errors(errors: Iterable[Errors], fields: tuple[str, ...]) -> str:
    rows = []
    for one in errors:
        inside = "-" if one.inside is None else f"{one.inside:.0%}"
        absolute = (one.median_abs_error, one.p90_abs_error, one.mean_abs_error, one.largest_abs_error)
        group = (name or "not stated" for name in one.group)
        rows.append((*group, str(one.count), percent(one.bias, True), *map(percent, absolute), inside))
    width = len(fields)
    title = f"<h2>By {', '.join(fields)}</h2>\n"
    return title + _table((*fields, *_HEAD), rows, range(width, width + len(_HEAD))) if rows else ""


def _rows(rows: Sequence[Comparison]) -> str:
    shown = rows[:_MOST_ROWS]
    cells = (
        (row.case_id, row.metric, row.device, row.model, _figure(row.measured), _figure(row.predicted),
         "" if row.relative_error is None else percent(row.relative_error, True),
         f"{_figure(row.low)} to {_figure(row.high)}" if row.low is not None else "",
         row.reason or "; ".join(row.assumed))
        for row in shown
    )  # fmt: skip
    head = ("case", "metric", "device", "model", "measured", "predicted", "error", "10-90 %", "assumed, or why refused")
    more = (
        f"<p>The first {len(shown):,} of {len(rows):,} rows; --rows writes all.</p>" if len(shown) < len(rows) else ""
    )
    return f"<details><summary>Every row</summary>{more}{_table(head, cells, (4, 5, 6))}</details>"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> str:
    flush = set(right)

    def line(cells: Sequence[str], tag: str, scope: str = "") -> str:
        mark = (' class="n"' if i in flush else "" for i in range(len(cells)))
        each = (f"<{tag}{scope}{m}>{html.escape(c)}</{tag}>" for m, c in zip(mark, cells, strict=True))
        return f"<tr>{''.join(each)}</tr>"

    top, body = line(head, "th", ' scope="col"'), "\n".join(line(row, "td") for row in rows)
    words = "" if flush else ' class="words"'
    return f'<div class="wide" tabindex="0"><table{words}>\n{top}\n{body}\n</table></div>'
