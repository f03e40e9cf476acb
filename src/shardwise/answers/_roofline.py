"""`shardwise roofline`: every operator of a plan against what its device can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _figures, _infer, _train
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._words import command_words

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.serving import InferReport
    from shardwise.training import TrainReport


def ask(inputs: Inputs) -> TrainReport | InferReport:
    """Return the report whose operators are asked for: of serving where a flag says so or only serving has it."""
    from shardwise.answers._flags import infer_flags, train_flags

    only = infer_flags().keys() - train_flags().keys()
    what = inputs.get("what", "infer" if only & inputs.values.keys() else "train")
    return _infer.ask(inputs) if what == "infer" else _train.ask(inputs)


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise roofline`."""
    from shardwise.answers._roofline_tree import roofline, roofline_tree

    _figures.check(inputs)
    found = roofline(ask(inputs))

    def tree() -> dict[str, Any]:
        return roofline_tree(found)

    def page() -> Page:
        from shardwise.answers._roofline_view import roofline_page

        return roofline_page(found, command_words("roofline", inputs.values), width)

    def draw() -> Figure:
        from shardwise.answers._plots_roofline import roofline_figure

        return roofline_figure(found)

    return _figures.plotted(inputs, Answer(0, tree, page), draw)
