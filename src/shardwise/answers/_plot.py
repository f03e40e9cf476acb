"""Plots and timelines from Python: an answer and a file name in, a file out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwise.answers._answer import Answer
from shardwise.answers._converters import FIGURES, fail
from shardwise.answers._inputs import Inputs
from shardwise.errors import InputError, Problem, plain
from shardwise.field_types import typed
from shardwise.libraries import is_installed
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._canvas import Canvas
    from shardwise.answers._page import Page
    from shardwise.answers._roofline_points import Roofline
    from shardwise.search import LoadResult, ServingResult, TrainingResult
    from shardwise.serving import InferReport
    from shardwise.serving.load import ServeReport
    from shardwise.training import StepTimeline, TrainReport

    Drawn: TypeAlias = TrainReport | InferReport | ServeReport | Roofline | TrainingResult | ServingResult | LoadResult


def figure_of(answer: Drawn) -> Figure:
    """Return the figure of an answer, to be changed further or shown in a notebook; draw it within `styled`."""
    from shardwise.answers._roofline_points import Roofline
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport

    if isinstance(answer, TrainReport):
        from shardwise.answers._plots_bars import train_figure

        return train_figure(answer)
    if isinstance(answer, InferReport):
        from shardwise.answers._plots_bars import infer_figure

        return infer_figure(answer)
    if isinstance(answer, Roofline):
        from shardwise.answers._plots_roofline import roofline_figure

        return roofline_figure(answer)
    from shardwise.search import LoadResult, ServingResult
    from shardwise.serving.load import ServeReport

    if isinstance(answer, ServeReport):
        from shardwise.answers._plots_load import load_figure

        return load_figure(answer)
    if isinstance(answer, LoadResult):
        from shardwise.answers._plots_serving import front_figure

        return front_figure(answer)
    if isinstance(answer, ServingResult):
        from shardwise.answers._plots_serving import serving_figure

        return serving_figure(answer)
    from shardwise.answers._plots_search import plan_figure
    from shardwise.search import TrainingResult

    if not isinstance(answer, TrainingResult):
        rule, remedy = "is not an answer that is drawn", "give that of train, infer, serve, roofline or a search"
        raise InputError([Problem("answer", plain(answer), rule, remedy)])
    return plan_figure(answer)


def paper_of(size: str, dark: bool) -> Canvas:
    """Return what to draw on; raises `InputError` for a size that is not known."""
    from shardwise.answers._canvas import SIZES, Canvas

    if size not in SIZES:
        raise InputError([Problem("size", size, "is not a size of pictures", "use one of " + ", ".join(SIZES))])
    return Canvas(size, bool(dark))


@typed
def plot(
    answer: Drawn,
    path: str | PathLike[str],
    size: str = "page",
    dark: bool = False,
) -> None:
    """Write the plot of an answer to an .svg, .png, .pdf or .html file; raises `InputError` where it cannot.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    >>> plot(report, "step.jpg")
    Traceback (most recent call last):
        ...
    shardwise.errors.InputError: path = 'step.jpg': does not say what to write; end the name in .svg or .png or ...
    """
    path = _checked(path, FIGURES)
    from shardwise.answers._canvas import save, styled

    with styled(paper_of(size, dark)):
        save(figure_of(answer), path)


@typed
def plot_timeline(
    report: TrainReport, path: str | PathLike[str], size: str = "page", dark: bool = False
) -> StepTimeline:
    """Write one step to a file and return it, chunk by chunk in seconds, which are simulated.

    The name's end says as what: a trace for Perfetto (.json), PyTorch's memory snapshot (.pickle), or a drawing
    (.svg, .png, .pdf or .html). Raises `InputError` for another end, and where a step has too many chunks.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> plan, job = Plan(pp=2, dp=0), Training(seq_len=1024, global_batch=8)
    >>> report = train(load_model("gpt2"), Cluster.parse("2xh100"), plan, job)
    >>> timeline = plot_timeline(report, getfixture("tmp_path") / "step.json")
    >>> abs(timeline.seconds / report.step_seconds - 1) < timeline.tolerance
    True
    """
    from shardwise.training import TrainReport

    if not isinstance(report, TrainReport):
        raise InputError([Problem("report", plain(report), "must be the answer of train", "write train(...)")])
    path = _checked(path, (".json", ".pickle", *FIGURES))
    timeline = report.timeline()
    if path.lower().endswith(".json"):
        from shardwise.answers._trace import trace_tree

        with open(path, "w", encoding="utf-8", newline="\n") as file:
            json.dump(trace_tree(report, timeline), file, separators=(",", ":"), allow_nan=False)
        return timeline
    if path.lower().endswith(".pickle"):
        import pickle

        from shardwise.answers._trace import snapshot_tree

        with open(path, "wb") as binary:
            pickle.dump(snapshot_tree(report, timeline), binary, protocol=4)
        return timeline
    from shardwise.answers._canvas import save, styled
    from shardwise.answers._plots_timeline import timeline_figure

    with styled(paper_of(size, dark)):
        save(timeline_figure(report, timeline), path)
    return timeline


def _checked(given: str | PathLike[str], endings: tuple[str, ...]) -> str:
    """Return a path as text; raises `InputError` where it does not say what to write, or nothing is there to draw."""
    path = str(os.fspath(given))
    if not path.lower().endswith(endings):
        remedy = "end the name in " + " or ".join(endings)
        raise InputError([Problem("path", path, "does not say what to write", remedy)])
    if not path.lower().endswith((".json", ".pickle")) and not is_installed("matplotlib"):
        rule, remedy = "needs matplotlib, which is not installed", "pip install 'shardwise[plots]'"
        raise InputError([Problem("path", path, rule, remedy)])
    return path


DRAWN = ("plot", "timeline")


def check_drawable(inputs: Inputs) -> None:
    """Record a problem for each file that is to be drawn where nothing is installed to draw it."""
    for key in DRAWN:
        path = inputs.get(key)
        if path is not None and not path.lower().endswith(".json") and not is_installed("matplotlib"):
            inputs.fail(key, path, "needs matplotlib, which is not installed", "pip install 'shardwise[plots]'")


def plotted(inputs: Inputs, answer: Answer, draw: Callable[[], Figure]) -> Answer:
    """Return an answer that says where its plot was written to; without `--plot` the answer as it is."""
    path = inputs.get("plot")
    if path is None:
        return answer
    _draw(inputs, path, draw)
    return _saying(answer, "plot", {"file": path}, f"written to {path}")


def timed(inputs: Inputs, answer: Answer, report: TrainReport) -> Answer:
    """Return an answer that says where the timeline of its step was written to, and how far it is from the step."""
    path = inputs.get("timeline")
    if path is None:
        return answer
    from shardwise.answers._trace import compared

    try:
        timeline = plot_timeline(report, path, inputs.get("size", "page"), inputs.get("dark", False))
    except OSError as error:
        raise _unwritable("timeline", path, error) from None
    return _saying(answer, "timeline", {"file": path, **compared(timeline)}, f"written to {path}: {_against(timeline)}")


def _against(timeline: StepTimeline) -> str:
    """Return how long a timeline is beside the reported step."""
    off = timeline.difference
    length = "as long as" if abs(off) < 5e-6 else f"{abs(off):.3%} {'longer' if off > 0 else 'shorter'} than"
    known = f"known to be within {timeline.tolerance:.1%} with {timeline.plan.schedule}"
    return f"{show_seconds(timeline.seconds)} by simulation, {length} the step in closed form ({known})"


def _draw(inputs: Inputs, path: str, draw: Callable[[], Figure]) -> None:
    from shardwise.answers._canvas import save, styled

    with styled(paper_of(inputs.get("size", "page"), inputs.get("dark", False))):
        figure = draw()
        try:
            save(figure, path)
        except OSError as error:
            raise _unwritable("plot", path, error) from None


def _unwritable(key: str, path: str, error: OSError) -> Exception:
    rule = f"cannot be written ({error.strerror or error})"
    return fail(key, path, rule, "give a file in a folder that exists")


def _saying(answer: Answer, key: str, more: dict[str, Any], text: str) -> Answer:
    """Return an answer with more in its tree, and a line at the end of its page."""

    def tree() -> Any:
        return {**answer.tree(), key: more}

    def page() -> Page:
        made = answer.page()
        made.blank()
        made.label(key.upper(), text)
        return made

    return Answer(answer.status, tree, page)


WRITTEN = ("plot", "save_best", "save")


def check_files(inputs: Inputs) -> None:
    """Record a problem for each file that cannot be written or drawn."""
    check_drawable(inputs)
    for key in WRITTEN:
        path = inputs.get(key)
        if path is None or key in inputs.bad:
            continue
        folder = os.path.dirname(path) or "."
        if not os.path.isdir(folder):
            inputs.fail(key, path, f"cannot be written ({folder} is no folder)", "give a file in a folder that exists")
        elif os.path.isdir(path):
            inputs.fail(key, path, "cannot be written (it is a folder)", "give the name of a file")
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK):
            inputs.fail(key, path, "cannot be written (no permission)", "give a file that you may write")
