"""`validate` as a page: coverage, errors by metric, by source and by device, runs that fit, and refusals."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.report._page import Page
from shardwise.validation import Errors, Validation, fits_of, reasons, summary

_HEAD = ["rows", "bias", "median", "p90", "mean", "in band"]
_REASONS = 12


def percent(value: float, signed: bool = False) -> str:
    """Return a share as a percentage; beyond tenfold as a factor.

    >>> percent(0.0512), percent(-0.0512, True), percent(23.4)
    ('5.1%', '-5.1%', 'x24')
    """
    if value > 10:
        return f"x{value + 1:.0f}"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _cells(one: Errors) -> list[str]:
    inside = "-" if one.inside is None else f"{one.inside:.0%}"
    absolute = (one.median_abs_error, one.p90_abs_error, one.mean_abs_error)
    return [str(one.count), percent(one.bias, True), *(percent(value) for value in absolute), inside]


def _table(page: Page, word: str, found: Iterable[Errors], fields: tuple[str, ...]) -> None:
    rows = [[*one.group, *_cells(one)] for one in found]
    if rows:
        page.blank()
        page.add((word, "bold"))
        width = len(fields)
        page.table([[*fields, *_HEAD], *rows], right=range(width, width + len(_HEAD)), header=True, indent=0)


def validate_page(found: Validation, by: tuple[str, ...], width: int = 80) -> Page:
    """Return the page of `shardwise validate`."""
    page = Page(width)
    total, predicted = len(found.rows), len(found.predicted)
    page.label("ROWS", f"{predicted:,} of {total:,} predicted ({found.coverage:.1%}), the others refused below")
    page.note("errors are predicted over measured, less one; bias is their median, in band the share inside 10-90 %")
    _table(page, "BY METRIC", summary(found.rows, ("metric",)), ("metric",))
    if by:
        _table(page, "BY " + ", ".join(by).upper(), summary(found.rows, by), by)
    else:
        _table(page, "BY SOURCE", summary(found.rows, ("source", "metric")), ("source", "metric"))
        _table(page, "BY DEVICE", summary(found.rows, ("device", "metric")), ("device", "metric"))
        for name in ("family", "quality", "year"):
            _table(page, f"BY {name.upper()}", summary(found.rows, (name, "metric")), (name, "metric"))
    fits = fits_of(found.rows)
    if fits.ran or fits.failed:
        page.blank()
        said = f"{fits.ran_called_unfit} of {fits.ran} configurations that ran are said not to fit"
        page.label("FITS", f"{said} ({fits.false_alarms:.1%})")
        if fits.failed:
            page.note(
                f"{fits.failed_called_fit} of {fits.failed} that ran out of memory are said to fit ({fits.misses:.1%})"
            )
    why = reasons(found.rows)
    if why:
        page.blank()
        page.add(("REFUSED", "bold"))
        page.items(f"{count:,} rows: {reason}" for reason, count in why[:_REASONS])
        if len(why) > _REASONS:
            page.note(
                f"and {sum(n for _, n in why[_REASONS:]):,} rows for {len(why) - _REASONS} other reasons: --json", "dim"
            )
    return page
