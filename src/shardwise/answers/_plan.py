"""`shardwise plan`: which search answers what was asked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from shardwise.answers._answer import Answer
from shardwise.answers._inputs import Inputs
from shardwise.answers._plan_tuning import tuned_in_words, tunes
from shardwise.answers._plot import check_files


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise plan`."""
    check_files(inputs)
    what = inputs.get("what")
    if what not in ("infer", "serve"):
        what = "tuning" if asks_to_tune(inputs) else "train"
    answered: Answer = import_module(f"shardwise.answers._plan_{what}").answer(inputs, width)
    return answered


def ask(inputs: Inputs) -> Any:
    """Return the report of the best plan of a search; raises `InputError` where none keeps the limits."""
    from shardwise.answers import _plan_infer, _plan_serve, _plan_train, _plan_tuning
    from shardwise.errors import InputError, Problem

    if asks_to_tune(inputs):
        return _plan_tuning.quickest_report(inputs)
    ways: dict[str, Callable[[Inputs], Any]] = {"infer": _plan_infer.ask, "serve": _plan_serve.ask}
    result = ways.get(inputs.get("what"), _plan_train.searched)(inputs)
    if not result.best:
        # What legal plans fell to: a law, which may refuse more of them, leaves these to choose from.
        missed = [row for row in result.rejected if row.name == "memory" or row.name.startswith(("max_", "min_"))]
        most = max(missed or result.rejected, key=lambda row: row.count, default=None)
        why = f": {most.title}; {most.remedy}" if most is not None else ""
        raise InputError(
            [Problem("plan", None, f"no plan fits and keeps the limits{why}", "the search itself says why")]
        )
    return result.best[0]


def asks_to_tune(inputs: Inputs) -> bool:
    """Return whether ways to fine-tune on given devices are asked for, and no search of plans."""
    return inputs.get("what") not in ("infer", "serve") and "scaling" not in inputs.values and tunes(inputs)


def described(inputs: Inputs, report: Any) -> str:
    """Return the best plan of a search in words."""
    from shardwise.answers._described import describe_deployment, describe_placed

    if inputs.get("what") == "train":
        return tuned_in_words(report) if asks_to_tune(inputs) else describe_placed(report)
    if inputs.get("what") == "serve":
        from shardwise.answers._plan_serve import describe

        return f"{describe(report)}, weights {report.base.case.format.name}"
    return describe_deployment(report)
