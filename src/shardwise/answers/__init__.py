"""Reports as trees for programs and as pages for people."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazily

if TYPE_CHECKING:
    from shardwise.answers._compare import compare_page, compare_tree
    from shardwise.answers._count import count_page
    from shardwise.answers._counting import Counting, CountReport, count, count_tree
    from shardwise.answers._energy import Energy, energy
    from shardwise.answers._explain import explain_page, explain_tree
    from shardwise.answers._infer import infer_page, infer_tree
    from shardwise.answers._main import run
    from shardwise.answers._page import Page, text_of
    from shardwise.answers._plot import plot, plot_timeline
    from shardwise.answers._roofline_points import Roofline, roofline
    from shardwise.answers._train_page import train_page
    from shardwise.answers._train_tree import train_tree

# Each command needs one of these, so each is loaded when it is used.
__getattr__ = lazily(
    __name__,
    {
        "_compare": "compare_page compare_tree",
        "_count": "count_page",
        "_counting": "CountReport Counting count count_tree",
        "_energy": "Energy energy",
        "_explain": "explain_page explain_tree",
        "_infer": "infer_page infer_tree",
        "_main": "run",
        "_page": "Page text_of",
        "_plot": "plot plot_timeline",
        "_roofline_points": "Roofline roofline",
        "_train_page": "train_page",
        "_train_tree": "train_tree",
    },
)
