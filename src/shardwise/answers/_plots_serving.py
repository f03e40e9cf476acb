"""Plots of serving: one batch, and a deployment under load."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, INK, RED, narrow, paper_width
from shardwise.answers._described import describe, load_text
from shardwise.answers._plots import (
    Bar,
    bytes_unit,
    head_height,
    header,
    limit,
    row_inches,
    row_names,
    sheet,
    stack,
    time_unit,
    title_of,
    totals,
    wrapped,
)
from shardwise.answers._plots_bars import PHASE, SERVED, served_bars
from shardwise.answers._plots_search import SERIES, key_below, side_by_side
from shardwise.search import ServingResult
from shardwise.serving import InferReport
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.search import LoadResult

_MOST_PLANS = 10


def serving_figure(result: ServingResult) -> Figure:
    """Return the front of seconds a token and tokens a second and device, and the best deployments side by side."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    cluster, best = result.grid.cluster, result.best[:_MOST_PLANS]
    title = title_of(result.grid.model.name, cluster.num_devices, cluster.device.name)
    text = _words(result)
    names = row_names([_name(r) for r in best])
    each = 2.1 + row_inches(names, 0.36) * len(best)
    if narrow():
        each = 2 * (2.3 + row_inches(names, 0.42) * len(best))
    heights = [head_height(title, text), 2.7, *([each] if best else [])]
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.06)
    figure = Figure(figsize=(paper_width(), sum(heights)), layout=engine)
    figure.set_label(title)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    header(figure.add_subplot(grid[0]), title, text)
    _front(figure.add_subplot(grid[1]), result)
    if best:
        lower = side_by_side(grid[2], 2)
        _tops(figure.add_subplot(lower[0]), figure.add_subplot(lower[1]), best, names)
    return figure


def _words(result: ServingResult) -> list[str]:
    job = result.grid.job
    asked = f"{job.input_tokens:,} tokens in and {job.output_tokens:,} out; {result.num_plans:,} plans, "
    lines = [asked + f"{result.counts.evaluated:,} legal, {result.counts.fitting:,} fit and keep the limits"]
    if result.best:
        first = result.best[0]
        rate = _rate(first)
        times = f"TTFT {show_seconds(first.request_ttft_seconds)}"
        if first.job.output_tokens:
            times += f", TPOT {show_seconds(first.request_tpot_seconds)}"
        speed = f"{rate:,.0f} {'output ' * bool(first.job.output_tokens)}tokens/s per device, {times} of a request"
        lines.append(f"best by {result.options.objective}: {speed}: {_name(first)}")
    else:
        lines.append("no plan of the space fits and keeps the limits")
    return wrapped(lines, paper_width() - 0.2)


def _name(report: InferReport) -> str:
    plan = describe(report.plan).replace("one device, nothing split", "one device")
    return f"{plan}, batch {report.job.batch}, {report.case.format.name}, {report.case.engine.name}"


def _latency(report: InferReport) -> float:
    """Return seconds between tokens of a request while the batch stays full, or of the pass where none are made."""
    return report.request_tpot_seconds if report.job.output_tokens else report.request_seconds


def _rate(report: InferReport) -> float:
    if report.job.output_tokens:
        return report.output_tokens_per_second / report.plan.num_devices
    return report.prefill_tokens_per_second / report.plan.num_devices


def _front(axes: Axes, result: ServingResult) -> None:
    """Draw throughput against latency, one series a layout; what none beats goes up to the right."""
    front = sorted(result.front, key=_latency)
    axes.set_title("Pareto front of deployments", pad=14)
    unit = time_unit(max((_latency(r) for r in front), default=1.0))
    generates = bool(result.grid.job.output_tokens)
    axes.set_xlabel(f"{'time between tokens of a request' if generates else 'time of the pass'}, {unit.name}")
    axes.set_ylabel(f"{'output' if generates else 'input'} tokens/s per device")
    axes.grid(True)
    if not front:
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    xs, ys = [_latency(r) / unit.size for r in front], [_rate(r) for r in front]
    # Of decode steps none is beaten; of a request's time between tokens one may be, and the line passes it.
    rises = [k for k, y in enumerate(ys) if y > max(ys[:k], default=0.0)]
    axes.plot([xs[k] for k in rises], [ys[k] for k in rises], color=GREY, linewidth=0.7, zorder=1)
    layouts = list(dict.fromkeys(describe(r.plan) for r in front))
    for i, layout in enumerate(layouts):
        colour, marker = SERIES[min(i, len(SERIES) - 1)]
        own = [k for k, r in enumerate(front) if describe(r.plan) == layout]
        name = layout if i < len(SERIES) - 1 or len(layouts) == len(SERIES) else "others"
        label = name if i < len(SERIES) else "_nolegend_"
        face: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 4, "linewidth": 0}
        axes.plot([xs[k] for k in own], [ys[k] for k in own], label=label, **face)
    axes.set_xlim(0)
    axes.set_ylim(0)
    clear = 1.0
    if generates and result.options.max_tpot_seconds:
        at = result.options.max_tpot_seconds / unit.size
        far = max(axes.get_xlim()[1], 1.05 * at)
        axes.set_xlim(0, far)
        limit(axes, at, f"limit {show_seconds(result.options.max_tpot_seconds)}", far)
        clear = at / far if at / far > 0.7 else 1.0  # the names stand beside the line of the limit
    if result.best:
        place = (_latency(result.best[0]) / unit.size, _rate(result.best[0]))
        axes.plot(*place, marker="o", markersize=10, markerfacecolor="none", markeredgecolor=INK, linewidth=0)
        axes.annotate("#1", place, (-7, -13), textcoords="offset points", fontsize=8, fontweight="bold", ha="right")
    axes.legend(loc="lower right", bbox_to_anchor=(clear, 0), handletextpad=0.2, labelspacing=0.3)


def _tops(left: Axes, right: Axes, best: Sequence[InferReport], names: Sequence[str]) -> None:
    """Draw a decode step and the memory of the best deployments beside each other, one row a deployment."""
    rows = [served_bars(r, name) for r, name in zip(best, names, strict=True)]
    generates = any(decode.length for _, _, decode in rows)
    times = [decode if generates else prefill for _, prefill, decode in rows]
    memory = [Bar(name=f"#{i}", parts=bar.parts, limit=bar.limit) for i, (bar, _, _) in enumerate(rows, 1)]
    gib, unit = bytes_unit(), time_unit(max(bar.length for bar in times))
    ceilings = [r.memory.limit for r in best]
    # Totals that would stand on the line of what may be used stand beyond it.
    far = 1.33 * max(*(bar.length for bar in memory), *ceilings)
    most = 1.2 * max(max(bar.length, bar.high) for bar in times)
    for axes, bars, looks, scale in ((left, times, PHASE, (unit, most)), (right, memory, SERVED, (gib, far))):
        stack(axes, bars, looks, *scale, wide=0.7 if narrow() else 0.45)
        totals(axes, bars, *scale, fontsize=7)
        axes.set_xlabel(scale[0].name, labelpad=1, loc="right")
        key_below(axes, bars, looks, 1)
    left.set_title("Time of a decode step" if generates else "Time of the pass", pad=14)
    right.set_title("Memory of the fullest device", pad=14)
    left.tick_params(axis="y", labelsize=6.2)
    if len(set(ceilings)) == 1:
        limit(right, ceilings[0] / gib.size, f"may use {show_bytes(ceilings[0])}", far / gib.size)
        return
    for row, most_bytes in enumerate(ceilings):
        right.plot([most_bytes / gib.size] * 2, [row - 0.45, row + 0.45], color=RED, linewidth=1.2)


def front_figure(result: LoadResult) -> Figure:
    """Return output tokens/s per device against those per user: the front, and the best deployments on it."""
    workload = result.workload
    shown = result.best[0] if result.best else result.nearest
    name = shown.base.case.model.name if shown is not None else "no deployment"
    device = f" on {shown.base.case.cluster.device.name}" if shown is not None else ""
    asked = f"{load_text(workload)}, {workload.input_tokens.mean:,.0f} tokens in and "
    figure, (axes,) = sheet(name + device, [asked + f"{workload.output_tokens.mean:,.0f} out"], [3.4])
    axes.set_title("Throughput against interactivity", pad=14)
    axes.set_xlabel("interactivity, output tokens/s per user")
    axes.set_ylabel("output tokens/s per device")
    axes.grid(True)
    sizes: dict[int, list[tuple[float, float]]] = {}
    for point in result.front:
        each = (point.tokens_per_second_per_user, point.tokens_per_second_per_gpu)
        sizes.setdefault(point.plan.num_devices, []).append(each)
    every = [one for points in sizes.values() for one in points]
    if every:
        axes.plot(*zip(*sorted(every), strict=True), color=GREY, linewidth=0.7, zorder=1)
    for number, (size, points) in enumerate(sorted(sizes.items())):
        colour, marker = SERIES[number % len(SERIES)]
        label = f"{size} {'device' if size == 1 else 'devices'} a replica"
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, linewidth=0, label=label)
    best = [
        (1 / max(one.latencies["tpot"]["mean"], 1e-9), one.output_tokens_per_second / one.devices)
        for one in result.best
    ]
    for place, at in enumerate(best):
        mark: dict[str, Any] = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "markeredgecolor": INK}
        axes.plot(*at, linewidth=0, label="" if place else "#: the best, as simulated", **mark)
    axes.set_xlim(0)
    axes.set_ylim(0)
    for at, name in _named(best, (axes.get_xlim()[1], axes.get_ylim()[1])):
        # The front falls to the right, so that nothing stands above a point at its right.
        axes.annotate(name, at, (5, 5), textcoords="offset points", fontsize=8, fontweight="bold")
    if sizes:
        axes.legend(loc="upper right")
    return figure


def _named(points: Sequence[tuple[float, float]], ends: tuple[float, float]) -> list[tuple[tuple[float, float], str]]:
    """Return the numbers of points, and where they stand: of those whose names would touch, one names all.

    >>> _named([(50.0, 9.0), (51.0, 9.1), (10.0, 2.0)], (100.0, 10.0))
    [((50.0, 9.0), '#1, #2'), ((10.0, 2.0), '#3')]
    """
    groups: list[tuple[tuple[float, float], str]] = []
    for number, point in enumerate(points, 1):
        near = (abs(point[0] - at[0]) < 0.08 * ends[0] and abs(point[1] - at[1]) < 0.08 * ends[1] for at, _ in groups)
        place = next((i for i, is_near in enumerate(near) if is_near), None)
        if place is None:
            groups.append((point, f"#{number}"))
        else:
            groups[place] = groups[place][0], f"{groups[place][1]}, #{number}"
    return groups
