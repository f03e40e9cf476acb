"""The plot of a validation: predicted against measured, errors by device, errors by the year of the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._plots import GREY, RED, sheet
from shardwise.measured import Comparison, Validation

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


def validate_figure(found: Validation) -> Figure:
    """Return predicted over measured on logarithmic axes, and the spread of errors by device and by its year."""
    rows = [row for row in found.predicted if row.relative_error is not None and row.metric != "fits"]
    by_device, by_year = _grouped(rows, "device"), _grouped([r for r in rows if r.year], "year")
    share = f"{len(found.predicted):,} of {len(found.rows):,} rows predicted"
    lines = [f"{share}; boxes hold half of the rows, whiskers 8 of 10"]
    heights = [4.4, 0.6 + 0.2 * max(len(by_device), 1), 0.7 + 0.22 * max(len(by_year), 1)]
    figure, (scatter, devices, years) = sheet("predicted against measured", lines, heights)
    _scatter(scatter, rows)
    _boxes(devices, by_device, "by device")
    _boxes(years, by_year, "by year in which the device came out")
    return figure


def _grouped(rows: Sequence[Comparison], field: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        found[str(getattr(row, field))].append(row.relative_error or 0.0)
    most = sorted(found, key=lambda name: -len(found[name]))[:_MOST]
    return {name: found[name] for name in sorted(most)}


def _scatter(axes: Axes, rows: Sequence[Comparison]) -> None:
    for name, (label, colour) in GROUPS.items():
        own = [row for row in rows if group_of(row.metric) == name and row.predicted]
        if own:
            place: list[Any] = [[row.measured for row in own], [row.predicted for row in own]]
            look: dict[str, Any] = {"s": 7, "alpha": 0.45, "color": colour, "linewidths": 0, "rasterized": True}
            axes.scatter(*place, label=f"{label} ({len(own):,})", **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = axes.get_xlim()
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.8, zorder=0)
    axes.set_xlim(low, high)
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
