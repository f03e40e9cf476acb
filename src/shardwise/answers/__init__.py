"""Reports as trees for programs and as pages for people."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.answers._compare import compare_page, compare_tree
    from shardwise.answers._count import count_page
    from shardwise.answers._counting import Counting, CountReport, count, count_tree
    from shardwise.answers._energy import Energy, energy
    from shardwise.answers._explain import explain_page, explain_tree
    from shardwise.answers._infer import infer_page, infer_tree
    from shardwise.answers._page import Page, text_of
    from shardwise.answers._plot import plot, plot_timeline
    from shardwise.answers._roofline_points import Roofline, roofline
    from shardwise.answers._train_page import train_page
    from shardwise.answers._train_tree import train_tree

# Each command needs one of these, so each is loaded when it is used.
_HOMES = {
    "CountReport": "_counting",
    "Counting": "_counting",
    "Energy": "_energy",
    "Page": "_page",
    "Roofline": "_roofline_points",
    "compare_page": "_compare",
    "compare_tree": "_compare",
    "count": "_counting",
    "count_page": "_count",
    "count_tree": "_counting",
    "energy": "_energy",
    "explain_page": "_explain",
    "explain_tree": "_explain",
    "infer_page": "_infer",
    "infer_tree": "_infer",
    "plot": "_plot",
    "plot_timeline": "_plot",
    "roofline": "_roofline_points",
    "text_of": "_page",
    "train_page": "_train_page",
    "train_tree": "_train_tree",
}

__all__ = [
    "CountReport",
    "Counting",
    "Energy",
    "Page",
    "Roofline",
    "compare_page",
    "compare_tree",
    "count",
    "count_page",
    "count_tree",
    "energy",
    "explain_page",
    "explain_tree",
    "infer_page",
    "infer_tree",
    "plot",
    "plot_timeline",
    "roofline",
    "text_of",
    "train_page",
    "train_tree",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise.answers' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.answers.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
