"""Reports as trees for programs and as pages for people."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.report._compare import compare_page, compare_tree
    from shardwise.report._count import Counting, CountReport, count, count_tree
    from shardwise.report._count_view import count_page
    from shardwise.report._explain import explain_page, explain_tree
    from shardwise.report._infer_view import infer_page, infer_tree
    from shardwise.report._page import Page, text_of
    from shardwise.report._plot import plot, plot_timeline
    from shardwise.report._roofline import Roofline, roofline
    from shardwise.report._train import train_tree
    from shardwise.report._train_view import train_page

# Each command needs one of these, so each is loaded when it is used.
_HOMES = {
    "CountReport": "_count",
    "Counting": "_count",
    "Page": "_page",
    "Roofline": "_roofline",
    "compare_page": "_compare",
    "compare_tree": "_compare",
    "count": "_count",
    "count_page": "_count_view",
    "count_tree": "_count",
    "explain_page": "_explain",
    "explain_tree": "_explain",
    "infer_page": "_infer_view",
    "infer_tree": "_infer_view",
    "plot": "_plot",
    "plot_timeline": "_plot",
    "roofline": "_roofline",
    "text_of": "_page",
    "train_page": "_train_view",
    "train_tree": "_train",
}

__all__ = [
    "CountReport",
    "Counting",
    "Page",
    "Roofline",
    "compare_page",
    "compare_tree",
    "count",
    "count_page",
    "count_tree",
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
        raise AttributeError(f"module 'shardwise.report' has no attribute {name!r}")
    value = getattr(import_module(f"shardwise.report.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
