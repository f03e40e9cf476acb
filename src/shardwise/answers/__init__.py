"""Reports as trees for programs and as pages for people."""

from typing import TYPE_CHECKING

from shardwise._lazy import lazily

if TYPE_CHECKING:
    from shardwise.answers._counting import Counting, CountReport, count, count_tree
    from shardwise.answers._energy import Energy, energy
    from shardwise.answers._main import run
    from shardwise.answers._plot import plot, plot_timeline
    from shardwise.answers._roofline_points import Roofline, roofline
    from shardwise.answers._train_tree import train_tree
    from shardwise.answers._values import values_of
    from shardwise.answers._whole_steps import plan_training, train

# Each command needs one of these, so each is loaded when it is used.
__getattr__ = lazily(
    __name__,
    {
        "_counting": "CountReport Counting count count_tree",
        "_energy": "Energy energy",
        "_main": "run",
        "_plot": "plot plot_timeline",
        "_roofline_points": "Roofline roofline",
        "_train_tree": "train_tree",
        "_values": "values_of",
        "_whole_steps": "plan_training train",
    },
)
