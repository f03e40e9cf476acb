"""The drawing of a step: stages as rows, chunks with the numbers of their micro-batches, bubbles, messages, update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers._canvas import GREY, WIDTH, fitting, paper_width
from shardwise.answers._plots import AXES, BarStyle, bytes_unit, ink_on, plan_words, sheet, time_unit, title_of
from shardwise.answers._plots_bars import stage_name
from shardwise.answers._train_tree import without_residue
from shardwise.training import Span, StepTimeline, TrainReport, levels, lifetimes
from shardwise.training.schedules import find_schedule
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One darkness a chunk, so that the passes of a model cut in chunks can be followed.
_PASSES = {
    "forward": ("forward", ("#0072B2", "#56B4E9", "#9AD0F0", "#C7E6F8")),
    "backward": ("backward", ("#009E73", "#5CC3A2", "#9FDCC8", "#C9ECE0")),
    "backward_input": ("backward, input gradients", ("#009E73", "#5CC3A2", "#9FDCC8", "#C9ECE0")),
    "backward_weight": ("weight gradients", ("#E69F00", "#F2C25C", "#F7D998", "#FBECC9")),
}
_ONCE = {
    "send": ("message between stages", AXES["pp"][1]),
    "dp": ("data-parallel messages", AXES["dp"][1]),
    "tied": ("gradients of the tied table", "#882255"),
    "optimizer": ("optimizer step", "#332288"),
    "overhead": ("overhead of the framework", "#888888"),
}
# What a stage holds, the longest-lived at the bottom (training/_lifetimes.py).
_HELD = {
    "weights": BarStyle("weights", "#0072B2"),
    "optimizer": BarStyle("optimizer state", "#332288"),
    "framework": BarStyle("kept by the framework", "#888888"),
    "gradients": BarStyle("gradients", "#56B4E9"),
    "activations": BarStyle("activations", "#009E73"),
    "working": BarStyle("working memory of the pass", "#E69F00"),
}
_AGAIN = ("recompute, within backward", "#DDCC77")
_BUBBLE = ("bubble", "#F4F4F4")
# A number, its points, its colour, and the middle of its chunk.
_Number = tuple[str, float, str, tuple[float, float]]
_WIDEST = 20.0  # inches
_SEEN = 0.004  # of the most bytes: less is no stripe that could be seen
_MOST_KINDS = 4
_SMALLEST, _LARGEST = 6.0, 7.0  # points of a number that can be read


def timeline_figure(report: TrainReport, timeline: StepTimeline) -> Figure:
    """Return one step as a drawing: stages from the top down, time to the right, in the unit that a reader uses."""
    from matplotlib.patches import Patch

    cluster, job = report.case.cluster, report.job
    title = title_of(report.case.model.name, cluster.num_devices, cluster.device.name)
    micro = round(report.evaluation.sizes.num_micro)
    words = f"one step of {show_seconds(timeline.seconds)}: {micro:,} micro-batches of {report.plan.micro_batch} x "
    lines = [plan_words(report.plan), words + f"{job.seq_len:,} tokens", _bubbles(report, timeline)]
    width = _width(timeline)
    columns = fitting(3)
    more = max(-(-(2 * timeline.plan.vpp + 5) // columns) - 5, 0), max(-(-len(_HELD) // columns) - 2, 0)
    kinds = _kinds(report)
    each = [1.25] * (len(kinds) - 1) + [1.65 + 0.17 * more[1]] if len(kinds) > 1 else [2.3 + 0.17 * more[1]]
    figure, (axes, *below) = sheet(title, lines, [1.25 + 0.26 * timeline.plan.pp + 0.17 * more[0], *each], width)
    unit = time_unit(timeline.seconds)
    _rows(axes, timeline, unit.size, 72 * (width - 0.9) / timeline.seconds)
    axes.set_yticks(range(timeline.plan.pp), [f"stage {i}" for i in range(timeline.plan.pp)])
    axes.set_ylim(timeline.plan.pp - 0.45, -0.55)
    axes.set_xlim(0, timeline.seconds / unit.size)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"time from the start of the step, {unit.name}", labelpad=1)
    _key(axes, timeline)
    bytes_of = {kind: levels(lifetimes(report, timeline, kind)) for kind in kinds}
    most = max(sum(parts) for _, own in bytes_of.values() for parts in zip(*own.values(), strict=True))
    for panel, (kind, (times, own)) in zip(below, bytes_of.items(), strict=True):
        _memory(panel, [t / unit.size for t in times], own)
        panel.set_xlim(0, timeline.seconds / unit.size)
        panel.set_ylim(0, 1.12 * most / bytes_unit().size)
        panel.set_title(_named(report, kinds[kind]), fontsize=8)
    shown = [look for key, look in _HELD.items() if any(max(own[key]) > _SEEN * most for _, own in bytes_of.values())]
    keys = [Patch(label=look.label, facecolor=look.colour) for look in shown]
    _legend(below[-1], keys, fitting(3) if width < 10 else 6, -18)
    return figure


def _kinds(report: TrainReport) -> dict[int, int]:
    """Return the first stage of each run of equal ones with the place of the run: the fullest and few others."""
    counts = [int(stage.count) for stage in report.evaluation.stages]
    first = {place: sum(counts[:place]) for place in range(len(counts))}
    ends = [report.peak_stage, 0, len(counts) - 1, *range(1, len(counts) - 1)]
    return {first[place]: place for place in sorted(list(dict.fromkeys(ends))[:_MOST_KINDS])}


def _named(report: TrainReport, place: int) -> str:
    fullest = ", the fullest" if place == report.peak_stage and report.plan.pp > 1 else ""
    return f"tensors on {stage_name(report, place)}{fullest}, {bytes_unit().name}"


def _memory(axes: Axes, times: Sequence[float], bytes_of: Mapping[str, Sequence[float]]) -> None:
    """Draw what a stage holds over the step, by category."""
    under = [0.0] * len(times)
    for category, look in _HELD.items():
        over = [low + more / bytes_unit().size for low, more in zip(under, bytes_of[category], strict=True)]
        axes.fill_between(times, under, over, step="post", facecolor=look.colour, linewidth=0)
        under = over
    axes.grid(axis="y")


def _width(timeline: StepTimeline) -> float:
    """Return inches: those of a page, or what the numbers of three of four chunks need to be read, within reason."""
    chunks = _chunks([s for s in timeline.spans if s.lane == "stage"])
    needed = sorted(_SMALLEST / _fits(span, 1.0) for span, _, _ in chunks if span.micro_batch is not None)
    across = needed[len(needed) * 3 // 4] * timeline.seconds
    return min(max(WIDTH, across / 72 + 0.9), _WIDEST) if paper_width() == WIDTH else paper_width()


def _bubbles(report: TrainReport, timeline: StepTimeline) -> str:
    """Return both meanings of a bubble in words: what stages wait in the mean, and what the slowest one does."""
    waited = sum(s.seconds for s in timeline.spans if s.kind == "bubble")
    mean, step = waited / (timeline.plan.pp * timeline.seconds), report.evaluation.step
    slowest = without_residue(step.pipeline.bubble, step.total) / step.total
    if timeline.plan.pp == 1:
        return "one stage: no bubble"
    return f"bubbles: {mean:.1%} of the step, the mean of all stages; {slowest:.1%} on the slowest, as in the report"


def _chunks(spans: Sequence[Span]) -> Iterator[tuple[Span, float, float]]:
    """Yield every task with its place in its row, in shares of the height: the two of a pair one above the other."""
    for span in spans:
        if span.kind != "pair":
            yield span, 0.0, 1.0
            continue
        for i, part in enumerate(span.parts):
            whole = Span(
                stage=span.stage,
                lane="stage",
                kind=part.kind,
                start=span.start,
                end=span.end,
                micro_batch=part.micro_batch,
                chunk=part.chunk,
            )
            yield whole, i / len(span.parts), 1 / len(span.parts)


def _colour(span: Span) -> str:
    if span.kind in _PASSES:
        shades = _PASSES[span.kind][1]
        return shades[min(span.chunk or 0, len(shades) - 1)]
    return _ONCE.get(span.kind, _BUBBLE)[1]


def _rows(axes: Axes, timeline: StepTimeline, size: float, across: float) -> None:
    """Draw the spans of every stage, all of a colour in one piece; `across` are points of the page a second."""
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    numbers: list[_Number] = []
    on_stages = [s for s in timeline.spans if s.lane == "stage"]
    for span, up, height in _chunks(on_stages):
        colour = _colour(span)
        bottom = span.stage - 0.41 + 0.82 * up
        boxes.setdefault(colour, []).append((span.start / size, bottom, span.seconds / size, 0.82 * height))
        for part in span.parts:
            # Where a pair is drawn one above the other, its parts have no place of their own.
            if part.kind == "recompute":
                box = (part.start / size, bottom, part.seconds / size, 0.82 * height)
                boxes.setdefault(_AGAIN[1], []).append(box)
        if span.micro_batch is not None and (points := min(_LARGEST, _fits(span, across))) >= _SMALLEST:
            place = ((span.start + span.seconds / 2) / size, bottom + 0.41 * height)
            numbers.append((str(span.micro_batch), round(points, 1), ink_on(colour), place))
    _fill(axes, boxes, 0.35 if len(on_stages) < 3000 else 0.0)
    _write(axes, numbers)


def _write(axes: Axes, numbers: Sequence[_Number]) -> None:
    """Write numbers into their chunks as outlines, all of a colour in one piece: thousands of texts take seconds."""
    from matplotlib.collections import PathCollection
    from matplotlib.path import Path
    from matplotlib.textpath import TextPath
    from matplotlib.transforms import Affine2D

    figure = axes.get_figure(root=True)
    if figure is None:
        return
    glyphs: dict[tuple[str, float], Path] = {}
    for text, points, *_ in numbers:
        if (text, points) not in glyphs:
            path = TextPath((0, 0), text, size=points)
            box = path.get_extents()
            middle = Affine2D().translate(-(box.x0 + box.x1) / 2, -(box.y0 + box.y1) / 2)
            glyphs[text, points] = path.transformed(middle)
    for ink in sorted({number[2] for number in numbers}):
        own = [number for number in numbers if number[2] == ink]
        drawn = PathCollection(
            [glyphs[text, points] for text, points, *_ in own],
            offsets=[place for *_, place in own],
            offset_transform=axes.transData,
            facecolors=ink,
            linewidths=0,
        )
        drawn.set_transform(Affine2D().scale(1 / 72) + figure.dpi_scale_trans)
        drawn.set_in_layout(False)
        axes.add_collection(drawn, autolim=False)


def _fits(span: Span, across: float) -> float:
    """Return the size in points at which a number is as wide as nine tenths of its chunk."""
    return 0.9 * span.seconds * across / (0.64 * len(str(span.micro_batch)))


def _fill(axes: Axes, boxes: dict[str, list[tuple[float, float, float, float]]], line: float) -> None:
    from matplotlib.collections import PolyCollection

    # Recompute lies on the backward passes that it is part of.
    for colour, own in sorted(boxes.items(), key=lambda item: item[0] == _AGAIN[1]):
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in own]
        axes.add_collection(PolyCollection(corners, facecolors=colour, edgecolors="white", linewidths=line))


def _which(timeline: StepTimeline, chunk: int) -> str:
    """Return which part of the model a chunk is, or with DualPipe which way its micro-batches go."""
    if find_schedule(timeline.plan.schedule).mirrored:
        return f", entering at stage {timeline.plan.pp - 1 if chunk else 0}"
    return f", chunk {chunk}"


def _key(axes: Axes, timeline: StepTimeline) -> None:
    from matplotlib.patches import Patch

    on_stages = [s for s in timeline.spans if s.lane == "stage"]
    drawn = {(span.kind, span.chunk or 0) for span, _, _ in _chunks(on_stages)}
    kinds = {kind for kind, _ in drawn}
    handles = []
    for kind, (name, shades) in _PASSES.items():
        if kind == "backward_input" and "backward" in kinds:
            # DualPipe splits some of its backward passes, in the same colours.
            continue
        chunks = sorted(chunk for k, chunk in drawn if k == kind)
        for chunk in chunks:
            label = name + (_which(timeline, chunk) if len(chunks) > 1 else "")
            handles.append(Patch(label=label, facecolor=shades[min(chunk, len(shades) - 1)]))
    if any(part.kind == "recompute" for span, _, _ in _chunks(on_stages) for part in span.parts):
        handles.append(Patch(label=_AGAIN[0], facecolor=_AGAIN[1]))
    rest = {**_ONCE, "bubble": _BUBBLE}
    for kind, (name, colour) in rest.items():
        if any(k == kind for k, _ in drawn):
            edge = GREY if kind == "bubble" else colour
            handles.append(Patch(label=name, facecolor=colour, edgecolor=edge, linewidth=0.3))
    _legend(axes, handles, fitting(3) if _width(timeline) < 10 else 5, -30)


def _legend(axes: Axes, handles: Sequence[Any], columns: int, points: float) -> None:
    """Put a legend so many points below a panel, at its left edge."""
    from matplotlib.transforms import offset_copy

    below = offset_copy(axes.transAxes, axes.get_figure(root=True), 0, points, units="points")
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0, 0), "bbox_transform": below}
    space: dict[str, Any] = {"handlelength": 1.2, "columnspacing": 1.4, "borderaxespad": 0, "borderpad": 0}
    axes.legend(handles=list(handles), ncols=columns, **space, **place)
