"""Plots and timelines from Python: an answer and a file name in, a file out."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardwise.errors import InputError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._roofline_points import Roofline
    from shardwise.search import ServingResult, TrainingResult
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport
    from shardwise.training._timeline import StepTimeline

FIGURES = (".svg", ".png", ".pdf", ".html")


def figure_of(answer: TrainReport | InferReport | Roofline | TrainingResult | ServingResult) -> Figure:
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
    from shardwise.search import ServingResult

    if isinstance(answer, ServingResult):
        from shardwise.answers._plots_serving import serving_figure

        return serving_figure(answer)
    from shardwise.answers._plots_search import plan_figure

    return plan_figure(answer)


def plot(answer: TrainReport | InferReport | Roofline | TrainingResult | ServingResult, path: str) -> None:
    """Write the plot of an answer to an .svg, .png, .pdf or .html file; raises `InputError` where it cannot.

    >>> from shardwise import Cluster, Plan, Training, load_model, train
    >>> report = train(load_model("gpt2"), Cluster.parse("1xh100"), Plan(), Training(seq_len=1024, global_batch=8))
    >>> plot(report, "step.jpg")
    Traceback (most recent call last):
        ...
    shardwise.errors.InputError: path = 'step.jpg': does not say what to write; end the name in .svg or .png or ...
    """
    _check(path, FIGURES)
    from shardwise.answers._plots import save, styled

    with styled():
        save(figure_of(answer), path)


def plot_timeline(report: TrainReport, path: str) -> StepTimeline:
    """Write one step and return it; its seconds are simulated.

    The name's end says as what: a trace for Perfetto (.json), PyTorch's memory snapshot (.pickle), or a drawing.
    """
    _check(path, (".json", ".pickle", *FIGURES))
    timeline = report.timeline()
    if path.lower().endswith(".json"):
        from shardwise.answers._trace import trace_tree

        with open(path, "w", encoding="utf-8") as file:
            json.dump(trace_tree(report, timeline), file, separators=(",", ":"), allow_nan=False)
        return timeline
    if path.lower().endswith(".pickle"):
        import pickle

        from shardwise.answers._trace import snapshot_tree

        with open(path, "wb") as binary:
            pickle.dump(snapshot_tree(report, timeline), binary, protocol=4)
        return timeline
    from shardwise.answers._plots import save, styled
    from shardwise.answers._plots_timeline import timeline_figure

    with styled():
        save(timeline_figure(report, timeline), path)
    return timeline


def _check(path: str, endings: tuple[str, ...]) -> None:
    """Raise `InputError` for a name that does not say what to write, and where nothing is installed to draw."""
    if not path.lower().endswith(endings):
        remedy = "end the name in " + " or ".join(endings)
        raise InputError([Problem("path", path, "does not say what to write", remedy)])
    if not path.lower().endswith((".json", ".pickle")) and find_spec("matplotlib") is None:
        rule, remedy = "needs matplotlib, which is not installed", "pip install 'shardwise[plots]'"
        raise InputError([Problem("path", path, rule, remedy)])
