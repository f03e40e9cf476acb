"""The page and the plot of a study."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._page import Page
from shardwise.answers._paper import GREY, paper_width
from shardwise.answers._plots import header
from shardwise.answers._plots_search import SERIES
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.search import StudyQuestion, StudyResult

Row = Mapping[str, Any]
_SHOWN = 20
_LATENCIES = ("step_seconds", "tpot_seconds", "request_seconds")


def sweep_page(found: StudyResult, asked: Sequence[StudyQuestion], shown: Sequence[str], width: int) -> Page:
    """Return how far a study is, the best plan of its first questions, and where the tables are."""
    page = Page(width)
    best = [row for row in found.rows if row["rank"] == 1]
    none = sum(row["rank"] == -1 for row in found.rows)
    wrong = [row for row in found.rows if row["rank"] is None]
    said = f"{len(asked) - found.left:,} of {len(asked):,} questions answered, {found.before:,} of them before"
    page.label("STUDY", f"{said}; {len(best):,} have a plan, {none:,} none that fits")
    if found.left:
        page.note(f"{found.left:,} left: run the same command again")
    if found.stale:
        page.note(f"{len(found.stale):,} answers in the folder are stale: to a question, a file or a release of before")
    if wrong:
        page.note(f"{len(wrong):,} were refused, the first: {wrong[0]['problem']}")
    if best:
        page.blank()
        page.table([("", *shown, "seconds", "devices"), *(_line(row, shown) for row in best[:_SHOWN])], header=True)
    if len(best) > _SHOWN:
        page.note(f"{len(best) - _SHOWN:,} more in the tables")
    page.blank()
    for path in found.tables:
        page.label("TABLE", str(path))
    if not found.left and not found.tables:
        page.label("TABLE", "none: they need polars, pip install 'shardwise[sweep]', and the same command again")
    return page


def _line(row: Row, shown: Sequence[str]) -> tuple[str, ...]:
    seconds = next((row[name] for name in _LATENCIES if row.get(name)), 0.0)
    return ("", *(_text(row.get(name)) for name in shown), show_seconds(seconds), str(row["devices"]))


def _text(value: Any) -> str:
    return "-" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _number(value: Any) -> float | None:
    """Return a value of a study as a number: of devices how many there are, of a rate its figure.

    >>> _number("8xh100"), _number("2x8xh100"), _number(2.5), _number("3.35TB/s"), _number("h100")
    (8.0, 16.0, 2.5, 3.35, None)
    """
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value)
    counts = re.match(r"((?:\d+\s*[xX]\s*)+)(?=\D)", str(value))
    if counts:
        return float(math.prod(int(n) for n in re.findall(r"\d+", counts[1])))
    figure = re.match(r"\d+(\.\d+)?", str(value))
    return float(figure[0]) if figure else None


def sweep_figure(rows: Sequence[Row], shown: Sequence[str], headline: str) -> Figure:
    """Return the plots that a study has: seconds by devices, a landscape of two rates, and devices by price."""
    from matplotlib.figure import Figure

    best = [row for row in rows if row["rank"] == 1]
    scales = [name for name in shown if name not in ("model", "on") and _spread(best, name)]
    draws: list[tuple[str, Any]] = []
    if _spread(best, "on"):
        draws.append(("devices", lambda axes: _lines(axes, best, "on", headline)))
    draws += [(name, lambda axes, name=name: _lines(axes, best, name, headline)) for name in scales[:2]]
    if len(scales) >= 2:
        draws.append(("landscape", lambda axes: _landscape(axes, best, scales[:2], headline)))
    if any(row.get("usd") for row in best) or any(row.get("usd_per_million_output_tokens") for row in best):
        draws.append(("price", lambda axes: _by_price(axes, best)))
    figure = Figure(figsize=(paper_width(), 0.5 + 2.6 * max(1, len(draws))), layout="constrained")
    axes = figure.subplots(len(draws) + 1, 1, squeeze=False, height_ratios=[0.12, *[1.0] * len(draws)])[:, 0]
    header(axes[0], "The best plan of every question", [f"{len(best):,} of {len(rows):,} rows have a plan"])
    for place, (_, draw) in zip(axes[1:], draws, strict=True):
        draw(place)
    return figure


def _spread(rows: Sequence[Row], name: str) -> bool:
    values = [_number(row.get(name)) for row in rows]
    return None not in values and len(set(values)) > 1


def _device(row: Row) -> str:
    return re.sub(r"^(\d+\s*[xX]\s*)+", "", str(row.get("on")))


def _series(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.get('model')} on {_device(row)}", []).append(row)
    return found


def _lines(axes: Axes, rows: Sequence[Row], name: str, headline: str) -> None:
    """Draw the least of the headline at each value of an axis, a line for each model and device."""
    for (label, some), (colour, mark) in zip(_series(rows).items(), _looks(), strict=False):
        least: dict[float, float] = {}
        for row in some:
            at = _number(row[name]) or 0.0
            least[at] = min(least.get(at, math.inf), row[headline])
        axes.plot(sorted(least), [least[at] for at in sorted(least)], color=colour, marker=mark, ms=3.5, label=label)
    axes.set(xscale="log", yscale="log", xlabel="devices" if name == "on" else name.replace("_", " "))
    axes.set_ylabel(headline.replace("_", " "))
    axes.legend(fontsize=6.5)


def _looks() -> list[tuple[str, str]]:
    return [(colour, mark) for _ in range(8) for colour, mark in SERIES]


def _landscape(axes: Axes, rows: Sequence[Row], names: Sequence[str], headline: str) -> None:
    """Draw the least of the headline over two axes of the study."""
    least: dict[tuple[float, float], float] = {}
    for row in rows:
        at = (_number(row[names[0]]) or 0.0, _number(row[names[1]]) or 0.0)
        least[at] = min(least.get(at, math.inf), row[headline])
    across, up = (sorted({at[i] for at in least}) for i in (0, 1))
    grid = [[least.get((x, y), math.nan) for x in across] for y in up]
    image = axes.imshow(grid, origin="lower", aspect="auto", cmap="cividis_r")
    axes.set_xticks(range(len(across)), [f"{x:g}" for x in across])
    axes.set_yticks(range(len(up)), [f"{y:g}" for y in up])
    axes.set(xlabel=names[0].replace("_", " "), ylabel=names[1].replace("_", " "))
    axes.figure.colorbar(image, ax=axes, label=headline.replace("_", " "))


def _by_price(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw what the best plan of each device costs."""
    least: dict[str, float] = {}
    for row in rows:
        cost = row.get("usd") or row.get("usd_per_million_output_tokens")
        if cost:
            label = f"{row.get('model')} on {_device(row)}"
            least[label] = min(least.get(label, math.inf), cost)
    order = sorted(least, key=lambda label: -least[label])
    axes.barh(order, [least[label] for label in order], color=GREY)
    axes.set_xlabel("dollars, the cheapest of the study")
