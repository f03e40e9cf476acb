"""Files beside an answer: plots, and the timeline of a step."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._kinds import fail
from shardwise.units import show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.training import TrainReport
    from shardwise.training._timeline import StepTimeline

KEYS = ("plot", "timeline")


def check(inputs: Inputs) -> None:
    """Record a problem for each file that is to be drawn where nothing is installed to draw it."""
    for key in KEYS:
        path = inputs.get(key)
        if path is not None and not path.lower().endswith(".json") and find_spec("matplotlib") is None:
            inputs.fail(key, path, "needs matplotlib, which is not installed", "pip install 'shardwise[plots]'")


def plotted(inputs: Inputs, answer: Answer, draw: Callable[[], Figure]) -> Answer:
    """Return an answer that says where its plot was written to; without `--plot` the answer as it is."""
    path = inputs.get("plot")
    if path is None:
        return answer
    _draw("plot", path, draw)
    return _saying(answer, "plot", {"file": path}, f"written to {path}")


def timed(inputs: Inputs, answer: Answer, report: TrainReport) -> Answer:
    """Return an answer that says where the timeline of its step was written to, and how far it is from the step."""
    path = inputs.get("timeline")
    if path is None:
        return answer
    from shardwise.answers._plot import plot_timeline
    from shardwise.answers._trace import compared

    try:
        timeline = plot_timeline(report, path)
    except OSError as error:
        raise _unwritable("timeline", path, error) from None
    return _saying(answer, "timeline", {"file": path, **compared(timeline)}, f"written to {path}: {_against(timeline)}")


def _against(timeline: StepTimeline) -> str:
    """Return how long a timeline is beside the reported step."""
    off = timeline.difference
    length = "as long as" if abs(off) < 5e-6 else f"{abs(off):.3%} {'longer' if off > 0 else 'shorter'} than"
    known = f"known to be within {timeline.tolerance:.1%} with {timeline.plan.schedule}"
    return f"{show_seconds(timeline.seconds)} by simulation, {length} the step in closed form ({known})"


def _draw(key: str, path: str, draw: Callable[[], Figure]) -> None:
    from shardwise.answers._plots import save, styled

    with styled():
        figure = draw()
        try:
            save(figure, path)
        except OSError as error:
            raise _unwritable(key, path, error) from None


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
