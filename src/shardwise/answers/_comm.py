"""`shardwise comm`: who talks to whom under a plan, what, how often, how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _figures, _train
from shardwise.answers._answer import Answer, check_finite
from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.training import CommReport


def ask(inputs: Inputs) -> CommReport:
    """Return the communication report of a training case; raises `InputError` with every problem."""
    from shardwise.training import CommReport

    return CommReport(report=_train.ask(inputs))


def words(inputs: Inputs, found: CommReport) -> list[str]:
    """Return the command that gives the same report, every deduction written out."""
    first, *rest = _train.words(inputs, found.report)
    return [first.replace("shardwise train", "shardwise comm", 1), *rest]


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise comm`."""
    _figures.check(inputs)
    found = ask(inputs)
    report = found.report
    check_finite({"step_seconds": report.step_seconds, "device_bytes": report.device_bytes})

    def tree() -> dict[str, Any]:
        from shardwise.answers._comm_tree import comm_tree

        return comm_tree(found)

    def page() -> Page:
        from shardwise.answers._comm_view import comm_page

        return comm_page(found, words(inputs, found), width, bool(inputs.get("all")))

    def draw() -> Figure:
        from shardwise.answers._plots_comm import comm_figure

        return comm_figure(found)

    return _figures.plotted(inputs, Answer(0 if report.fits else 1, tree, page), draw)
