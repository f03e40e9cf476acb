"""The plot of a roofline: operators in FLOP/s over FLOPs a byte, under the roofs of their device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import whole_shares
from shardwise.answers._canvas import GREY, INK, RED, lay_out, narrow, plain_log
from shardwise.answers._described import describe
from shardwise.answers._plots import plan_words, sheet, title_of
from shardwise.answers._roofline_points import Roofline, RooflinePoint
from shardwise.training import TrainReport
from shardwise.units import show_count, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_KINDS = {
    "matmul": ("GEMMs", "#0072B2"),
    "attention": ("attention core", "#009E73"),
    "grouped": ("expert GEMMs", "#AA4499"),
    "scan": ("scans", "#E69F00"),
    "memory": ("element-wise", "#888888"),
}
_PHASES = {
    "forward": ("forward", "o"),
    "recompute": ("recompute", "D"),
    "backward_input": ("input gradients", "^"),
    "backward_weight": ("weight gradients", "s"),
    "prefill": ("prefill", "o"),
    "decode": ("decode", "s"),
}
_MOST_LABELS, _NARROW_LABELS = 9, 5


def roofline_figure(result: Roofline) -> Figure:
    """Return the operators in FLOP/s over FLOPs a byte on logarithmic axes, with the device's roofs."""
    report = result.report
    case = report.case
    trained = isinstance(report, TrainReport)
    plan = plan_words(report.plan) if trained else describe(report.plan)
    title = title_of(case.model.name, case.cluster.num_devices, case.cluster.device.name)
    figure, (axes,) = sheet(title, [plan, *_words(result)], [5.0 if narrow() else 4.6])
    shown = [p for p in result.points if p.flops > 0]
    _roofs(axes, shown, result)
    for point in shown:
        size = 14 + 420 * result.share(point)
        face: dict[str, Any] = {"c": _KINDS[point.kind][1], "marker": _PHASES[point.phase][1]}
        place = (point.intensity, point.flops_per_second / 1e12)
        axes.scatter(*place, s=size, alpha=0.8, edgecolors="white", linewidths=0.5, zorder=3, **face)
    _keys(axes, shown)
    _labels(axes, result, shown)
    return figure


def _words(result: Roofline) -> list[str]:
    lines = []
    for group, shares in result.bounds().items():
        silent = sum(result.share(p) for p in result.points if not p.flops and result.group(p) == group)
        words = {"compute": "compute", "memory": "memory", "start": "launch overhead"}
        rounded = whole_shares(shares, 1)
        bound = ", ".join(f"{rounded[name]} by {word}" for name, word in words.items() if rounded[name] != "0.0%")
        more = f"; operators without FLOPs, not drawn: {silent:.1%}" if silent >= 5e-4 else ""
        lines.append(f"{result.what[group]}: {show_seconds(result.seconds[group])} of compute, bound {bound}{more}")
    if result.lost_seconds:
        lost, whole = show_seconds(result.lost_seconds), show_seconds(result.lost_seconds + result.seconds["step"])
        lines.append(f"not here: {lost} that overlapped messages and launches add to compute; train has {whole}")
    return lines


def _roofs(axes: Axes, shown: Sequence[RooflinePoint], result: Roofline) -> None:
    """Draw the slope of the memory and the flat roof of every data type that occurs, ridges marked."""
    from matplotlib.patheffects import withStroke

    bandwidth = result.report.case.cluster.device.memory_bytes_per_second
    dtypes = {p.peak_flops_per_second: p.dtype for p in shown}
    peaks = sorted(dtypes, reverse=True)
    ridges = [peak / bandwidth for peak in peaks]
    low = min([0.6 * p.intensity for p in shown] + [ridges[-1] / 4])
    high = max([1.8 * p.intensity for p in shown] + [ridges[0] * 4])
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot([low, ridges[0]], [low * bandwidth / 1e12, peaks[0] / 1e12], color=INK, linewidth=1.3)
    halo = [withStroke(linewidth=2, foreground="white")]
    for number, (peak, ridge) in enumerate(zip(peaks, ridges, strict=True)):
        axes.plot([ridge, high], [peak / 1e12] * 2, color=INK, linewidth=1.3)
        axes.plot([ridge] * 2, [1e-9, peak / 1e12], color=RED, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
        foot: dict[str, Any] = {"textcoords": "offset points", "fontsize": 7.2, "color": RED, "path_effects": halo}
        at = axes.get_xaxis_transform()
        # Each name stands above that of the ridge at its right, since ridges may be near.
        axes.annotate(f"ridge {ridge:,.0f}", (ridge, 0.0), (3, 3 + 9 * number), xycoords=at, **foot)
    axes.set_xlim(low, high)
    bottom = min([p.flops_per_second / 2e12 for p in shown] + [low * bandwidth / 1e12])
    axes.set_ylim(max(bottom, 1e-4), (1.6 if narrow() else 2.4) * peaks[0] / 1e12)
    plain_log(axes.xaxis)
    plain_log(axes.yaxis)
    axes.set_xlabel("arithmetic intensity, FLOPs a byte moved")
    axes.set_ylabel("predicted rate, TFLOP/s")
    axes.grid(True, which="major")


def _named(result: Roofline, shown: Sequence[RooflinePoint]) -> dict[str, RooflinePoint]:
    """Return the operators that take most of the time by what they are called, the passes of training once."""
    names: dict[str, RooflinePoint] = {}
    for point in sorted(shown, key=lambda p: -result.share(p)):
        served = point.phase in ("prefill", "decode")
        text = f"{point.operator}, {point.phase}" if served else point.operator
        if result.share(point) >= 0.01 and len(names) < (_NARROW_LABELS if narrow() else _MOST_LABELS):
            names.setdefault(text, point)
    return names


# Where a name may stand, in points from its operator: near first, below and to the right before others.
_SPOTS = [(dx, dy) for far in (10, 20, 32, 46, 62, 80) for dx, dy in ((8, -far), (-far, -far - 6), (8, far + 8))]
_CHARACTER, _LINE = 4.1, 9.0
_Box = tuple[float, float, float, float]


def _labels(axes: Axes, result: Roofline, shown: Sequence[RooflinePoint]) -> None:
    """Name the roofs, and the operators that take most of the time, no name over another or over an operator."""
    from matplotlib.patheffects import withStroke

    figure = axes.get_figure(root=True)
    if figure is None:
        return
    lay_out(figure)
    points = 72.0 / figure.dpi
    _slope(axes, result)
    spots = {id(p): axes.transData.transform((p.intensity, p.flops_per_second / 1e12)) * points for p in shown}
    boxes: list[_Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in spots.values()]
    boxes += [_box(text.get_window_extent(), points) for text in axes.texts]
    boxes += _peaks(axes, result, boxes, points)
    inside = _box(axes.get_window_extent(), points)
    for text, point in _named(result, shown).items():
        x, y = spots[id(point)]
        wide = _CHARACTER * len(text) + 3
        spots_of = [*_SPOTS, *((-wide - 8, dy) for _, dy in _SPOTS)]  # at the left where the frame ends at the right
        options = [(dx, dy, (x + dx - 3, y + dy - _LINE, x + dx + wide, y + dy)) for dx, dy in spots_of]
        free = [o for o in options if _within(o[2], inside) and not any(_meet(o[2], box) for box in boxes)]
        if not free:
            continue
        dx, dy, box = free[0]
        boxes.append(box)
        place = (point.intensity, point.flops_per_second / 1e12)
        arrow: dict[str, Any] = {"arrowprops": {"arrowstyle": "-", "color": GREY, "linewidth": 0.5}}
        made = axes.annotate(text, place, (dx, dy), textcoords="offset points", fontsize=7, va="top", zorder=4, **arrow)
        made.set_path_effects([withStroke(linewidth=2, foreground="white")])


def _peaks(axes: Axes, result: Roofline, occupied: Sequence[_Box], points: float) -> list[_Box]:
    """Name each flat roof, at its right end or beside its ridge, where no operator lies; return the boxes of names."""
    from matplotlib.patheffects import withStroke

    bandwidth = result.report.case.cluster.device.memory_bytes_per_second
    boxes: list[_Box] = []
    for peak, dtype in {p.peak_flops_per_second: p.dtype for p in result.points if p.flops}.items():
        rate = show_count(peak, "FLOP/s")
        text = f"{dtype} {rate}" if narrow() else f"dense {dtype} peak {rate}"
        name = axes.annotate(text, (1, 1), (0, 0), textcoords="offset points", fontsize=7.4, color=INK)
        name.set_path_effects([withStroke(linewidth=2, foreground="white")])
        ends = ((axes.get_xlim()[1], -2), (peak / bandwidth, 4))
        spots = [(x, dx, dy) for x, dx in ends for dy in (4, -9)]
        for x, dx, dy in (*spots, spots[0]):
            name.xy, name.xyann = (x, peak / 1e12), (dx, dy)
            name.set_horizontalalignment("right" if dx < 0 else "left")
            box = _box(name.get_window_extent(), points)
            if not any(_meet(box, other) for other in (*occupied, *boxes)):
                break
        boxes.append(box)
    return boxes


def _slope(axes: Axes, result: Roofline) -> None:
    """Name the slope of the memory along it."""
    bandwidth = result.report.case.cluster.device.memory_bytes_per_second
    low, high = axes.get_xlim()[0], min(p.ridge for p in result.points)
    at = [low * (high / low) ** share for share in (0.3, 0.6)]
    (x0, y0), (x1, y1) = (axes.transData.transform((x, x * bandwidth / 1e12)) for x in at)
    text = f"memory {show_count(bandwidth, 'B/s')}"
    turned: dict[str, Any] = {"rotation": math.degrees(math.atan2(y1 - y0, x1 - x0)), "rotation_mode": "anchor"}
    place = (at[0], 1.08 * at[0] * bandwidth / 1e12)
    axes.text(*place, text, fontsize=7.4, color=INK, ha="left", va="bottom", **turned)


def _box(extent: Any, points: float) -> _Box:
    """Return a box of pixels in points."""
    return (extent.x0 * points, extent.y0 * points, extent.x1 * points, extent.y1 * points)


def _within(box: _Box, frame: _Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meet(a: _Box, b: _Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _keys(axes: Axes, shown: Sequence[RooflinePoint]) -> None:
    from matplotlib.lines import Line2D

    point: dict[str, Any] = {"linewidth": 0, "markersize": 5.5}
    kinds = [v for k, v in _KINDS.items() if any(p.kind == k for p in shown)]
    phases = [v for k, v in _PHASES.items() if any(p.phase == k for p in shown)]
    handles = [Line2D([], [], marker="o", color=colour, label=name, **point) for name, colour in kinds]
    handles += [Line2D([], [], marker=marker, color=GREY, label=name, **point) for name, marker in phases]
    area = "area: share of time" if narrow() else "area grows with the share of the time"
    handles.append(Line2D([], [], linewidth=0, label=area))
    if narrow():  # a column has no place above the roofs
        below: dict[str, Any] = {
            "loc": "upper left",
            "bbox_to_anchor": (-0.1, -0.14),
            "columnspacing": 1.0,
            "fontsize": 6.6,
        }
        axes.legend(handles=handles, ncols=2, handletextpad=0.3, labelspacing=0.35, borderaxespad=0, **below)
        return
    axes.legend(handles=handles, loc="upper left", handletextpad=0.3, labelspacing=0.35)
