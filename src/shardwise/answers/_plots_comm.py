"""The communication of a plan as a picture: the grid of ranks coloured by group, and bytes between nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, PALE, narrow, paper_width
from shardwise.answers._plots import head_height, header, ink_on, plan_words, title_of, wrapped
from shardwise.units import counted, show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from shardwise.training import CommReport, NodeTraffic

# Paul Tol's "muted" scheme (personal.sron.nl/~pault, 2021), then each half way to white or to black.
COLOURS = ("#332288", "#88CCEE", "#44AA99", "#117733", "#999933", "#DDCC77", "#CC6677", "#882255", "#AA4499",
           "#9990C3", "#446677", "#A1D4CC", "#88BB99", "#4C4C19", "#6E663B", "#E5B2BB", "#C390AA",
           "#D4A1CC")  # fmt: skip
LABELLED_NODES, SHOWN_NODES, GRIDS_A_ROW = 16, 32, 3
MOST_CELLS = 64  # a row of the matrix: more are hairlines


def comm_figure(report: CommReport) -> Figure:
    """Return the picture of a communication report: a grid of ranks for each axis, and the matrix of nodes."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    cluster, names = report.report.case.cluster, list(report.axes)
    title = f"Communication groups: {title_of(report.report.case.model.name, cluster.num_devices, cluster.device.name)}"
    text, side = wrapped(_lines(report), paper_width()), 1 if narrow() else max(1, min(GRIDS_A_ROW, len(names)))
    head, rows = head_height(title, text), max(1, -(-len(names) // side))
    each = min(2.6, max(1.0, 0.45 + 0.16 * cluster.num_nodes))
    below = 3.6 if cluster.num_nodes > 1 else 0.0
    heights = [head, *[each] * rows, *([below] if below else [])]
    engine = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(paper_width(), sum(heights)), layout=engine)
    figure.set_label(title)
    grid = figure.add_gridspec(len(heights), side, height_ratios=heights)
    header(figure.add_subplot(grid[0, :]), title, text)
    for i, name in enumerate(names):
        _ranks(figure.add_subplot(grid[1 + i // side, i % side]), report, name)
    if not names:
        _nothing(figure.add_subplot(grid[1, :]), report)
    if below:
        _nodes(figure, figure.add_subplot(grid[-1, :]), report)
    return figure


def _nothing(axes: Axes, report: CommReport) -> None:
    """Say why there is no grid of ranks: one device, or copies of a plan that sends nothing."""
    devices = report.report.case.cluster.num_devices
    text = "one device: nothing is sent" if devices == 1 else f"{devices:,} devices, nothing split: nothing is sent"
    axes.axis("off")
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, fontsize=9)


def _binned(pairs: NodeTraffic, num_nodes: int) -> tuple[Any, int]:
    """Return bytes from nodes to other nodes as a matrix of few cells, and the nodes of a cell's side."""
    import numpy

    size = 1
    while -(-num_nodes // size) > MOST_CELLS:
        size *= 2
    cells = -(-num_nodes // size)
    matrix: Any = numpy.zeros((cells, cells))
    source, target, amount = (numpy.array(column) for column in (pairs.source, pairs.target, pairs.bytes))
    leaves = source != target
    numpy.add.at(matrix, (source[leaves] // size, target[leaves] // size), amount[leaves])
    return matrix, size


def _lines(report: CommReport) -> list[str]:
    busiest = report.traffic_map.busiest
    lines = [f"{plan_words(report.plan)}; order {' '.join(a for a in report.plan.order if a != 'tp2')}"]
    if busiest is not None:
        share = busiest.seconds / report.report.step_seconds
        lines.append(f"busiest link: {busiest.tier}, {show_seconds(busiest.seconds)}, {share:.0%} of the step")
    if report.report.case.cluster.num_nodes > SHOWN_NODES:
        lines.append(f"the grids show the first {SHOWN_NODES} of {report.report.case.cluster.num_nodes:,} nodes")
    if any(axis.num_groups > len(COLOURS) for axis in report.axes.values()):
        lines.append(f"colours repeat after {len(COLOURS)} groups")
    return lines


def _ranks(axes: Axes, report: CommReport, name: str) -> None:
    """Draw the ranks, one row a node, coloured by their group of an axis."""
    import numpy
    from matplotlib.colors import ListedColormap

    cluster, axis = report.report.case.cluster, report.axes[name]
    node = cluster.devices_per_node
    cells: Any = numpy.full(cluster.num_nodes * node, numpy.nan)
    groups = [g for g in report.groups(name) if len(g) > 1]
    for i, group in enumerate(groups):
        cells[list(group)] = i % len(COLOURS)
    nodes = min(cluster.num_nodes, SHOWN_NODES)
    cells = cells.reshape(cluster.num_nodes, node)[:nodes]
    look: Any = {"cmap": ListedColormap(COLOURS), "vmin": 0, "vmax": len(COLOURS) - 1, "interpolation": "nearest"}
    axes.imshow(cells, aspect="auto", **look)
    axes.set_title(f"{name}: {counted(axis.num_groups, 'group')} of {axis.size}")
    axes.set_xlabel("device")
    axes.set_ylabel("node")
    few = cluster.num_nodes <= LABELLED_NODES and node <= LABELLED_NODES
    axes.set_xticks(range(node) if node <= LABELLED_NODES else [0, node - 1])
    axes.set_yticks(range(nodes) if few else [0, nodes - 1])
    axes.tick_params(length=0)
    axes.set_xticks([x - 0.5 for x in range(1, node)], minor=True)
    if few:
        axes.set_yticks([y - 0.5 for y in range(1, cluster.num_nodes)], minor=True)
        for i, group in enumerate(groups):
            for rank in group:
                place: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 5.5}
                axes.text(rank % node, rank // node, str(rank), color=ink_on(COLOURS[i % len(COLOURS)]), **place)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _nodes(figure: Figure, axes: Axes, report: CommReport) -> None:
    """Draw the bytes that travel from each node to each other in a step; what stays in a node is left out."""
    import numpy
    from matplotlib.colors import LogNorm

    n = report.report.case.cluster.num_nodes
    matrix, size = _binned(report.traffic_map.between_nodes, n)
    shown: Any = numpy.ma.masked_less_equal(matrix, 0.0)
    among = "from node to node" if size == 1 else f"from {size} nodes to {size} nodes, what stays in a node left out,"
    axes.set_title(f"bytes {among} in a step")
    axes.set_xlabel("to node")
    axes.set_ylabel("from node")
    axes.set_facecolor("#f4f4f4")
    few = n <= LABELLED_NODES
    ticks = list(range(n)) if few else [0, n // 4, n // 2, 3 * n // 4, n - 1]
    # A tick names the first node of its cell.
    axes.set_xticks([tick // size for tick in ticks], [str(tick - tick % size) for tick in ticks])
    axes.set_yticks([tick // size for tick in ticks], [str(tick - tick % size) for tick in ticks])
    axes.tick_params(length=0)
    if not matrix.any():
        axes.imshow(matrix, cmap="Greys", vmin=0, vmax=1)
        axes.text(0.5, 0.5, "nothing leaves a node", transform=axes.transAxes, ha="center", va="center", color=GREY)
        return
    low, high = float(shown.min()), float(shown.max())
    drawn = axes.imshow(
        shown, cmap="viridis", interpolation="nearest", norm=LogNorm(low, high if high > low else 2 * low)
    )
    axes.set_anchor("W")
    if n <= LABELLED_NODES // 2:
        _write_bytes(axes, matrix, (low * high) ** 0.5)
        return
    bar = figure.colorbar(drawn, cax=axes.inset_axes((1.04, 0.0, 0.04, 1.0)))
    bar.outline.set_edgecolor(PALE)
    at = [low, (low * high) ** 0.5, high] if high > low else [low]
    bar.set_ticks(at, labels=[show_bytes(value) for value in at])
    bar.ax.minorticks_off()


def _write_bytes(axes: Axes, matrix: Any, middle: float) -> None:
    """Write the bytes into the cells of a matrix, in white on the dark ones: those up to the middle of the scale.

    A cell is as wide as a number, so the unit stands below it.
    """
    for source, row in enumerate(matrix):
        for target, amount in enumerate(row):
            if amount:
                ink = ink_on("#000000" if amount <= middle else "#ffffff")
                words = show_bytes(amount).replace(" ", "\n")
                axes.text(target, source, words, ha="center", va="center", fontsize=6.2, color=ink)
