"""Figures of the study; colours are those of Okabe and Ito (2008), maps are cividis: all eyes can read both."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cases import GENERATIONS, LAYOUTS, SYSTEMS, TITLES
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from searches import days
from sections import Field, Landscape, Scaling, Size, Sweep

WIDTH = 7.2  # inches: two columns of a paper
INK, GREY = "#1a1a1a", "#5f6368"
COLOURS = {"A100": "#D55E00", "H200": "#0072B2", "B200": "#009E73"}
MARKS = {4: ("^", ":"), 8: ("s", "--"), 64: ("o", "-")}
OF_LAYOUT = {"1d": ("#1a1a1a", "o"), "cp": ("#E69F00", "s"), "summa": ("#56B4E9", "^")}
PARTS = {
    "compute": ("forward and backward", "#0072B2"),
    "tensor": ("exposed: tensor and context", "#D55E00"),
    "data": ("exposed: data parallel", "#CC79A7"),
    "between": ("exposed: between stages", "#E69F00"),
    "bubble": ("pipeline bubble", "#BBBBBB"),
    "update": ("optimizer step", "#332288"),
}
AXES = {"tp": "#D55E00", "tp2": "#56B4E9", "cp": "#E69F00", "pp": "#BBBBBB", "dp": "#CC79A7"}
_STYLE: Any = {
    "font.size": 8, "axes.titlesize": 8.5, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.6, "axes.edgecolor": GREY, "grid.color": "#e3e3e3", "grid.linewidth": 0.5,
    "axes.axisbelow": True, "lines.linewidth": 1.2, "lines.markersize": 4, "hatch.linewidth": 0.5,
    "svg.hashsalt": "design-study", "figure.facecolor": "white",
}  # fmt: skip


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write a figure as SVG, its coordinates to a tenth of a point, and as PNG."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), drawn.getvalue())
    (folder / f"{name}.svg").write_text(re.sub(r"[ \t]+\n", "\n", text), encoding="utf-8")
    figure.savefig(folder / f"{name}.png", dpi=160)


def scaling(found: Scaling, size: Size, folder: Path) -> None:
    """Draw days of a run against devices, the best plan of all layouts on every system."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
        for axes, model in zip(figure.subplots(1, 2), TITLES, strict=True):
            for system in size.systems:
                for domain in size.domains:
                    _scaling_line(axes, found, size, (model, system, domain))
            _by_devices(axes, size.counts)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.10g}")
            axes.set(title=TITLES[model], ylabel="days of the run")
        lines = [Line2D([], [], color=COLOURS[s], label=s) for s in size.systems]
        lines += [_mark(d) for d in size.domains]
        lines.append(Line2D([], [], color="#999999", lw=0.8, label="perfect scaling"))
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
        save(figure, folder, "scaling")


def _mark(domain: int) -> Line2D:
    marker, style = MARKS[domain]
    return Line2D([], [], color=GREY, marker=marker, ls=style, label=f"domains of {domain}")


def _scaling_line(axes: Axes, found: Scaling, size: Size, case: tuple[str, str, int]) -> None:
    model, system, domain = case
    points = [(n, days(model, best[1].seconds)) for n in size.counts if (best := found.any(model, system, domain, n))]
    if not points:
        return
    marker, style = MARKS[domain]
    axes.plot(*zip(*points, strict=True), color=COLOURS[system], marker=marker, ls=style, alpha=0.9, mfc="white")
    if domain == size.domains[-1]:
        # From the count on which a device does the most.
        (first, at), last = min(points, key=lambda point: point[0] * point[1]), points[-1][0]
        axes.plot([first, last], [at, at * first / last], color="#999999", lw=0.8, zorder=1)


def _by_devices(axes: Axes, counts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [f"{n:,}" for n in counts], rotation=45)
    axes.minorticks_off()
    axes.set_xlabel("devices")
    axes.grid(True)


def layouts(found: Scaling, size: Size, folder: Path) -> None:
    """Draw the step of the 2D layouts over that of the best 1D plan."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        grid = figure.subplots(2, len(size.domains), sharex=True, sharey="row", squeeze=False)
        first = next((name for name in size.systems if name != size.systems[-1]), size.systems[-1])
        for row, model in zip(grid, TITLES, strict=True):
            for axes, domain in zip(row, size.domains, strict=True):
                for system in dict.fromkeys((first, size.systems[-1])):
                    _ratios(axes, found, size, (model, system, domain))
                axes.axhline(1, color=INK, lw=0.8)
                _by_devices(axes, size.counts)
                axes.set_title(f"{TITLES[model].split(',')[0]}, domains of {domain}")
            row[0].set_ylabel("seconds of a step / best 1D")
        for axes in grid[0]:
            axes.set_xlabel("")
        lines = [
            Line2D([], [], color=c, marker=m, label=LAYOUTS[name]) for name, (c, m) in OF_LAYOUT.items() if name != "1d"
        ]
        lines += [Line2D([], [], color=GREY, ls=s, label=n) for s, n in {":": first, "-": size.systems[-1]}.items()]
        figure.legend(handles=lines, loc="outside lower center", ncols=len(lines))
        save(figure, folder, "layouts")


def _ratios(axes: Axes, found: Scaling, size: Size, case: tuple[str, str, int]) -> None:
    for layout in ("cp", "summa"):
        points = []
        for count in size.counts:
            plain, other = found.one(*case, "1d", count), found.one(*case, layout, count)
            if plain and other:
                points.append((count, other.seconds / plain.seconds))
        colour, marker = OF_LAYOUT[layout]
        if points:
            style = "-" if case[1] == size.systems[-1] else ":"
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=style)


def degrees(found: Scaling, size: Size, folder: Path) -> None:
    """Draw the degrees of the best plans on B200 in domains of 8, and what their steps are made of."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
        upper, lower = figure.subplots(2, 2, sharex="col")
        for above, below, model in zip(upper, lower, TITLES, strict=True):
            bests = {n: best[1] for n in size.counts if (best := found.any(model, size.systems[-1], 8, n))}
            names = [f"{n:,}" for n in bests]
            rows = [{axis: float(np.log2(getattr(b.plan, axis))) for axis in AXES} for b in bests.values()]
            texts = [{axis: str(getattr(b.plan, axis)) for axis in AXES} for b in bests.values()]
            _bars(above, names, rows, AXES, texts)
            above.set(title=f"{TITLES[model]}: best plan", ylabel="log2 of the degrees", yticks=range(0, 15, 2))
            shares = [{name: 100 * share for name, share in b.shares.items()} for b in bests.values()]
            said = [{name: f"{share:.0f}" for name, share in row.items()} for row in shares]
            _bars(below, names, shares, {name: colour for name, (_, colour) in PARTS.items()}, said)
            below.set(ylabel="share of the step, %", xlabel="devices", ylim=(0, 100))
            below.tick_params(axis="x", rotation=45)
        bests = [found.any(model, size.systems[-1], 8, n) for model in TITLES for n in size.counts]
        used = {axis: colour for axis, colour in AXES.items() if any(b and getattr(b[1].plan, axis) > 1 for b in bests)}
        handles = [Patch(color=colour, label=axis) for axis, colour in used.items()]
        upper[0].legend(handles=handles, ncols=5, loc="upper left", handlelength=1, columnspacing=1)
        upper[0].set_ylim(0, 17)
        upper[1].set_ylim(0, 17)
        figure.legend(handles=_part_patches(), loc="outside lower center", ncols=3)
        save(figure, folder, "degrees")


def _part_patches() -> list[Patch]:
    return [Patch(color=colour, label=label) for label, colour in PARTS.values()]


def _bars(
    axes: Axes,
    names: Sequence[str],
    rows: Sequence[Mapping[str, float]],
    colours: Mapping[str, str],
    texts: Sequence[Mapping[str, str]],
) -> None:
    """Draw stacked bars with a text in every part that is tall enough."""
    whole = max((sum(row.values()) for row in rows), default=1.0)
    for x, (row, text) in enumerate(zip(rows, texts, strict=True)):
        at = 0.0
        for key, colour in colours.items():
            amount = row.get(key, 0.0)
            if amount <= 0:
                continue
            axes.bar(x, amount, 0.72, bottom=at, color=colour, edgecolor="white", linewidth=0.5)
            if amount > 0.055 * whole and text.get(key):
                pale = colour in ("#BBBBBB", "#E69F00", "#56B4E9", "#CC79A7")
                axes.text(x, at + amount / 2, text[key], ha="center", va="center", fontsize=6.5,
                          color=INK if pale else "white")  # fmt: skip
            at += amount
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="y")


def sweeps(rows: Sequence[Sweep], limit_bytes: float, folder: Path) -> None:
    """Draw what steps are made of where one degree stands; local minima are marked, and what does not fit is named."""
    with _styled():
        height = -(-len(rows) // 2)
        figure = Figure(figsize=(WIDTH, 0.5 + 2.35 * height), layout="constrained")
        panels = figure.subplots(height, 2, squeeze=False).ravel()
        for axes, row in zip(panels, rows, strict=False):
            parts = [{name: share * b.seconds for name, share in b.shares.items()} for b in row.found]
            _bars(axes, row.names, parts, {name: colour for name, (_, colour) in PARTS.items()}, [{} for _ in parts])
            top = max(b.seconds for b in row.found)
            for x, best in enumerate(row.found):
                if best.held_bytes > limit_bytes:
                    axes.bar(x, best.seconds, 0.72, fill=False, hatch="//////", edgecolor="white", linewidth=0)
                weight = "bold" if x in row.minima() else "normal"
                axes.text(
                    x, best.seconds + 0.02 * top, f"{best.seconds:.3g}", ha="center", fontsize=6.5, fontweight=weight
                )
            axes.plot(row.minima(), [row.found[i].seconds + 0.12 * top for i in row.minima()], "v", color=INK, ms=5)
            axes.set_ylim(0, 1.3 * top)
            axes.tick_params(axis="x", labelsize=6)
            axes.set(
                title=f"{TITLES[row.model].split(',')[0]}, {LAYOUTS[row.layout]}\n{row.stands}",
                ylabel="seconds of a step",
            )
        for axes in panels[len(rows) :]:
            axes.axis("off")
        handles = [*_part_patches(), Line2D([], [], color=INK, marker="v", ls="", label="local minimum")]
        large = f"does not fit {limit_bytes / 1e9:.0f} GB"
        handles.append(Patch(facecolor="#888888", edgecolor="white", hatch="//////", linewidth=0, label=large))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        save(figure, folder, "sweeps")


def landscapes(drawn: Sequence[Landscape], limit_bytes: float, folder: Path) -> None:
    """Draw step times over two degrees as numbered cells; hatched where they do not fit, the best framed."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
        panels = figure.subplots(1, len(drawn), squeeze=False)[0]
        for axes, one in zip(panels, drawn, strict=True):
            _landscape(axes, one, limit_bytes)
        figure.legend(
            handles=[
                Patch(
                    facecolor="white",
                    edgecolor="#777777",
                    hatch="//////",
                    label=f"does not fit {limit_bytes / 1e9:.0f} GB",
                ),
                Patch(facecolor="white", edgecolor="#D55E00", linewidth=2, label="best that fits"),
            ],
            loc="outside lower center",
            ncols=2,
        )
        save(figure, folder, "landscapes")


def _landscape(axes: Axes, one: Landscape, limit_bytes: float) -> None:
    cells = np.array([[np.nan if s is None else s for s in row] for row in one.seconds(np.inf)])
    fits = np.array([[s is not None for s in row] for row in one.seconds(limit_bytes)])
    norm = matplotlib.colors.LogNorm(np.nanmin(cells), np.nanmax(cells))
    axes.pcolormesh(cells, cmap="cividis_r", norm=norm, edgecolor="white", linewidth=0.5)
    for (y, x), seconds in np.ndenumerate(cells):
        if np.isnan(seconds):
            axes.text(x + 0.5, y + 0.5, "-", ha="center", va="center", fontsize=6.5, color=GREY)
            continue
        colour = "white" if norm(seconds) > 0.55 else INK
        axes.text(x + 0.5, y + 0.5, f"{seconds:.3g}", ha="center", va="center", fontsize=6.5, color=colour)
        if not fits[y, x]:
            axes.add_patch(Rectangle((x, y), 1, 1, fill=False, hatch="//////", edgecolor="#777777", linewidth=0))
    if fits.any():
        y, x = np.unravel_index(np.argmin(np.where(fits, cells, np.inf)), cells.shape)
        axes.add_patch(Rectangle((float(x), float(y)), 1, 1, fill=False, edgecolor="#D55E00", linewidth=2, zorder=4))
    axes.set_xticks(np.arange(cells.shape[1]) + 0.5, list(map(str, one.across[1])))
    axes.set_yticks(np.arange(cells.shape[0]) + 0.5, list(map(str, one.up[1])))
    stands = ", ".join(f"{name.replace('_', '-')} {n}" for name, n in one.stands)
    axes.set(
        xlabel=one.across[0], ylabel=one.up[0], title=f"{TITLES[one.model].split(',')[0]}, {stands}: seconds of a step"
    )
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _contours(figure: Figure, axes: Axes, drawn: Field) -> None:
    """Draw filled contours in steps of equal ratio, lines with their values, and hatches where nothing fits."""
    values = np.array([[np.nan if v is None else v for v in row] for row in drawn.values])
    low, high = np.nanmin(values), np.nanmax(values)
    levels = np.geomspace(low * 0.999, high * 1.001, 19)
    norm = matplotlib.colors.LogNorm(levels[0], levels[-1])
    filled = axes.contourf(drawn.xs, drawn.ys, values, levels=levels, cmap="cividis_r", norm=norm)
    lines = axes.contour(drawn.xs, drawn.ys, values, levels=levels[2:-1:4], colors=INK, linewidths=0.6)
    for text in axes.clabel(lines, fmt=lambda v: f"{v:.3g}", fontsize=6.5):
        text.set_path_effects([withStroke(linewidth=2, foreground="white", alpha=0.8)])
    axes.patch.set(hatch="////", edgecolor="#bbbbbb", facecolor="#f4f4f4")
    bar = figure.colorbar(filled, ax=axes, ticks=levels[::3], format=lambda v, _: f"{v:.3g}", pad=0.02)
    bar.ax.minorticks_off()
    bar.set_label("days of the run")
    axes.set_title(drawn.title)


def _devices(axes: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    for name, (x, y) in points.items():
        axes.plot(x, y, "o", color="white", mec=INK, ms=5, clip_on=False, zorder=6)
        last = name == "B200-next"
        place: dict[str, Any] = {"xytext": (-6, -10) if last else (6, 4), "ha": "right" if last else "left"}
        look: dict[str, Any] = {"fontsize": 7, "fontweight": "bold", "color": INK, "zorder": 6}
        note = axes.annotate(name, (x, y), textcoords="offset points", **look, **place)
        note.set_path_effects([withStroke(linewidth=2.5, foreground="white", alpha=0.9)])


def capacities(fields: Sequence[Field], folder: Path) -> None:
    """Draw days over capacity (GB) and bandwidth (TB/s)."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 3.1), layout="constrained")
        for axes, drawn in zip(figure.subplots(1, 2), fields, strict=True):
            _contours(figure, axes, drawn)
            here = {name: GENERATIONS[name] for name in SYSTEMS}
            axes.set_yscale("log", base=2)
            axes.set_yticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
            axes.minorticks_off()
            _devices(axes, {name: (c / 1e9, b / 1e12) for name, (c, b, *_) in here.items()})
            axes.set(xlabel="HBM capacity, GB", ylabel="HBM bandwidth, TB/s")
        save(figure, folder, "capacity")


def generations(fields: Sequence[Field], size: Size, folder: Path) -> None:
    """Draw days over the memory of a generation and the FLOP rate."""
    with _styled():
        figure = Figure(figsize=(WIDTH, 3.3), layout="constrained")
        for axes, drawn in zip(figure.subplots(1, 2), fields, strict=True):
            _contours(figure, axes, drawn)
            rows = {name: GENERATIONS[name] for name in size.generations}
            names = {"next": "B200-next"}
            _devices(axes, {names.get(n, n): (c / 1e9, m / 1e12) for n, (c, _, m, _) in rows.items()})
            ticks = [c / 1e9 for c, *_ in rows.values()]
            axes.set_xticks(ticks, [f"{c / 1e9:.0f}\n{b / 1e12:.1f}" for c, b, *_ in rows.values()])
            axes.set_yscale("log", base=2)
            axes.set_yticks(
                [m / 1e12 for _, _, m, _ in rows.values()], [f"{m / 1e12:,.0f}" for _, _, m, _ in rows.values()]
            )
            axes.minorticks_off()
            axes.set(xlabel="HBM capacity, GB (bandwidth below, TB/s)", ylabel="bf16 peak, TFLOP/s")
        save(figure, folder, "generations")
