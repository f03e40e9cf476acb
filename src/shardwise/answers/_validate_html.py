"""`validate` as one HTML file: verdict, plots, tables of errors, refusals, and every row."""

from __future__ import annotations

import html
import io
from collections.abc import Iterable, Sequence
from importlib.util import find_spec

from shardwise.answers._validate_view import percent
from shardwise.measured import Comparison, Errors, Validation, examples, fits_of, reasons, rules, summary

_HEAD = ("rows", "bias", "median", "p90", "mean", "largest", "in band")
_TABLES = (("metric",), ("source", "metric"), ("device", "metric"), ("family", "metric"), ("quality", "metric"))
_MOST_ROWS = 5000
_STYLE = """
body { margin: 2rem auto; max-width: 72rem; font: 15px/1.45 system-ui, sans-serif; color: #1a1a1a; padding: 0 1rem }
table { border-collapse: collapse; margin: 0.5rem 0 1.5rem; font-size: 13px }
th, td { padding: 2px 10px; border-bottom: 1px solid #e3e3e3; text-align: left; vertical-align: top }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } summary { cursor: pointer; font-weight: 600; margin: 1rem 0 }
"""


def validate_html(found: Validation) -> str:
    """Return the report as a document of its own: styles and drawings are inside."""
    share = f"{len(found.predicted):,} of {len(found.rows):,} rows predicted ({found.coverage:.1%})"
    parts = [
        "<h1>Predicted against measured</h1>",
        f"<p>{share}; errors are predicted over measured, less one, and bias is their median.</p>",
        _fits(found),
        _drawing(found),
        *(_errors(summary(found.rows, fields), fields) for fields in (*_TABLES, ("year", "metric"))),
        _refused(found),
        "<h2>Columns that are not read</h2>" if found.unread else "",
        _table(("file", "column", "may be meant"), found.unread, ()) if found.unread else "",
        "<h2>What is assumed for blank fields</h2>",
        _table(("field", "rule", "because"), ((r.field, r.says, r.because) for r in rules()), ()),
        _rows(found.rows),
    ]
    head = f'<meta charset="utf-8"><title>predicted against measured</title><style>{_STYLE}</style>'
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>{head}</head>\n<body>\n' + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _fits(found: Validation) -> str:
    fits = fits_of(found.rows)
    said = [f"{fits.ran_called_unfit} of {fits.ran} configurations that ran are said not to fit"] * bool(fits.ran)
    said += [f"{fits.failed_called_fit} of {fits.failed} that ran out of memory are said to fit"] * bool(fits.failed)
    return f"<p>{'; '.join(said)}.</p>" if said else ""


def _refused(found: Validation) -> str:
    first = examples(found.rows)
    rows = [(f"{count:,}", reason, first[reason]) for reason, count in reasons(found.rows)]
    return f"<h2>Refused</h2>\n{_table(('rows', 'reason', 'first'), rows, (0,))}" if rows else ""


def _drawing(found: Validation) -> str:
    """Return the plot as SVG; without matplotlib, where to get it."""
    if find_spec("matplotlib") is None:
        return "<p>Plots need matplotlib: pip install 'shardwise[plots]'.</p>"
    from shardwise.answers._plots import styled
    from shardwise.answers._plots_validate import validate_figure

    made = io.StringIO()
    with styled():
        validate_figure(found).savefig(made, format="svg", metadata={"Date": None})
    drawn = made.getvalue()
    return drawn[drawn.index("<svg") :]


def _errors(found: Iterable[Errors], fields: tuple[str, ...]) -> str:
    rows = []
    for one in found:
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

    def line(cells: Sequence[str], tag: str) -> str:
        mark = (' class="n"' if i in flush else "" for i in range(len(cells)))
        return (
            "<tr>" + "".join(f"<{tag}{m}>{html.escape(c)}</{tag}>" for m, c in zip(mark, cells, strict=True)) + "</tr>"
        )

    return "<table>\n" + line(head, "th") + "\n" + "\n".join(line(row, "td") for row in rows) + "\n</table>"
