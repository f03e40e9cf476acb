"""`shardwise plan`: which search answers what was asked."""

from __future__ import annotations

from importlib import import_module

from shardwise.answers._answer import Answer
from shardwise.answers._inputs import Inputs
from shardwise.answers._plan_tuning import tunes
from shardwise.answers._plot import check_files


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan`."""
    check_files(inputs)
    what = inputs.get("what")
    if what not in ("infer", "serve"):
        what = "tuning" if "scaling" not in inputs.values and tunes(inputs) else "train"
    found: Answer = import_module(f"shardwise.answers._plan_{what}").answer(inputs, width)
    return found
