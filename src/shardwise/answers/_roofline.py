"""`shardwise roofline`: every operator of a plan against what its device can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from shardwise.answers import _infer, _train
from shardwise.answers._answer import Answer, whole_bytes, whole_shares
from shardwise.answers._described import describe
from shardwise.answers._files import command_words
from shardwise.answers._flags import infer_flags, train_flags
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import Page, assumptions, command_lines
from shardwise.answers._plot import check_drawable, plotted
from shardwise.answers._roofline_points import Roofline, RooflinePoint, roofline
from shardwise.units import show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.serving import InferReport
    from shardwise.training import TrainReport


def ask(inputs: Inputs) -> TrainReport | InferReport:
    """Return the report whose operators are asked for: of serving where a flag says so or only serving has it."""
    only = infer_flags().keys() - train_flags().keys()
    what = inputs.get("what", "infer" if only & inputs.values.keys() else "train")
    return _infer.ask(inputs) if what == "infer" else _train.trained(inputs)


def roofline_tree(result: Roofline) -> dict[str, Any]:
    """Return a roofline as plain values: FLOPs, bytes, seconds, and shares of the group."""
    case = result.report.case
    device = case.cluster.device
    derived = ("intensity", "ridge", "flops_per_second", "bytes_per_second", "of_peak", "of_roof", "total_seconds")
    tree = {
        "model": case.model.name,
        "device": device.name,
        "plan": describe(result.report.plan),
        "memory_bytes_per_second": device.memory_bytes_per_second,
        "seconds": result.seconds,
        "lost_seconds": result.lost_seconds,
        "bound": result.bounds(),
        "operators": [
            {**asdict(point), **{name: getattr(point, name) for name in derived}, "share": result.share(point)}
            for point in result.points
        ],
    }
    return cast(dict[str, Any], whole_bytes(tree))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise roofline`."""
    check_drawable(inputs)
    result = roofline(ask(inputs))

    def tree() -> dict[str, Any]:
        return roofline_tree(result)

    def page() -> Page:
        return roofline_page(result, command_words("roofline", inputs.values), width)

    def draw() -> Figure:
        from shardwise.answers._plots_roofline import roofline_figure

        return roofline_figure(result)

    return plotted(inputs, Answer(0, tree, page), draw)


_PHASES = {
    "backward_input": "input gradients",
    "backward_weight": "weight gradients",
    "recompute": "recompute in backward",
    "decode": "decode step",
}
_BOUNDS = {"compute": "by compute", "memory": "by memory", "start": "by launch overhead"}
# Left out in this order where the page is narrow.
_SPARE = ("ridge", "bytes", "FLOPs", "peak", "a call", "TFLOP/s")
_LEFT = ("operator", "m x n x k", "bound")
_HEAD = (*_LEFT[:2], "FLOPs", "bytes", "FLOP/B", "ridge", "bound", "TFLOP/s", "peak", "roof", "a call", "share")
_NOTES = (
    "peak: share of the dense peak in the operator's data type; roof: share of what the datasheet allows at its "
    "FLOP/byte, memory included; bound: the limit that alone would take longest",
    "a narrow page leaves out columns: a larger --width shows them, --json has everything",
    "messages are not here: `shardwise train` and `infer` show what they expose",
)


def roofline_page(result: Roofline, command: Sequence[str], width: int = 80) -> Page:
    """Return a roofline as a page; `command` are the words that reproduce it."""
    page = Page(width)
    _summary(page, result)
    for (part, phase), own in groupby(_ordered(result.points), key=lambda p: (p.part, p.phase)):
        page.blank()
        _table(page, result, (part, phase), list(own))
    page.blank()
    page.items(_NOTES, "dim")
    page.blank()
    assumptions(page, result.report.assumptions)
    page.blank()
    command_lines(page, "AGAIN", command)
    return page


def _ordered(points: Sequence[RooflinePoint]) -> list[RooflinePoint]:
    """Return points with the passes of a part together, parts and passes in their first order."""
    parts, phases = list(dict.fromkeys(p.part for p in points)), list(dict.fromkeys(p.phase for p in points))
    return sorted(points, key=lambda p: (parts.index(p.part), phases.index(p.phase)))


def _summary(page: Page, result: Roofline) -> None:
    case = result.report.case
    device = case.cluster.device
    title = f"{case.model.name} on {case.cluster.num_devices} x {device.name}: {describe(result.report.plan)}"
    page.label("ROOFLINE", title, "bold", "bold")
    rate = f"memory {show_count(device.memory_bytes_per_second, 'B/s')}"
    peaks = dict(sorted({p.dtype: p.peak_flops_per_second for p in result.points if p.flops}.items()))
    peak_texts = [
        f"{show_count(p, 'FLOP/s')} in {dtype} (ridge {p / device.memory_bytes_per_second:,.0f} FLOP/byte)"
        for dtype, p in peaks.items()
    ]
    page.note(f"{rate}; dense peak {' and '.join(peak_texts)}")
    for group, shares in result.bounds().items():
        own = [p for p in result.points if result.group(p) == group]
        work = sum(p.flops * p.times for p in own) / result.seconds[group]
        rounded = whole_shares(shares, 1)
        bound = ", ".join(f"{rounded[name]} {words}" for name, words in _BOUNDS.items() if rounded[name] != "0.0%")
        seconds = show_seconds(result.seconds[group])
        page.note(f"{result.what[group]}: {seconds} of compute at {show_count(work, 'FLOP/s')}; bound {bound}")
    if result.lost_seconds:
        lost, whole = show_seconds(result.lost_seconds), show_seconds(result.lost_seconds + result.seconds["step"])
        page.note(f"not here: {lost} that overlapped messages and launches add to compute; `train` has {whole}")


def _table(page: Page, result: Roofline, key: tuple[str, str], points: Sequence[RooflinePoint]) -> None:
    part, phase = key
    share = sum(result.share(p) for p in points)
    title = f"{part}, {_PHASES.get(phase, phase)}"
    times = "once" if points[0].times == 1 else f"{points[0].times:,.0f} times"
    aside = f"{times}, {share:.1%} of the compute"
    on_one_line = len(title) + 2 + len(aside) <= page.width
    page.add((title.upper(), "bold"), ("  " + aside if on_one_line else "", "dim"))
    if not on_one_line:
        page.add((aside, "dim"))
    rows = _fitting([_HEAD, *(_row(p, result.share(p)) for p in points)], page.width)
    flush = [i for i, name in enumerate(rows[0]) if name not in _LEFT]
    page.table(rows, right=flush, header=True, indent=0)


def _fitting(rows: list[tuple[str, ...]], width: int) -> list[tuple[str, ...]]:
    """Return a table without the columns that a reader misses least, until it fits the width."""
    for spare in _SPARE:
        longest = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        if sum(longest) + len(longest) - 1 <= width:
            break
        at = rows[0].index(spare)
        rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    return rows


def _row(p: RooflinePoint, share: float) -> tuple[str, ...]:
    m, n, k, batch = p.shape
    product = p.kind in ("matmul", "grouped", "attention") and m
    shape = f"{m:.0f}x{n:.0f}x{k:.0f}" + (f" x{batch:.0f}" if batch != 1 else "") if product else ""
    counted = p.flops > 0
    return (
        p.operator,
        shape,
        show_count(p.flops, "F") if counted else "-",
        show_bytes(p.moved_bytes),
        f"{p.intensity:,.0f}" if p.intensity >= 10 else f"{p.intensity:.1f}" if counted else "-",
        f"{p.ridge:,.0f}" if counted else "-",
        p.bound,
        f"{p.flops_per_second / 1e12:,.0f}" if p.flops_per_second >= 1e13 else _small(p),
        f"{p.of_peak:.1%}" if counted else "-",
        f"{p.of_roof:.1%}",
        show_seconds(p.seconds),
        f"{share:.1%}",
    )


def _small(p: RooflinePoint) -> str:
    return f"{p.flops_per_second / 1e12:.2g}" if p.flops else "-"
