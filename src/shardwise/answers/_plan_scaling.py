"""`shardwise plan train --scaling A..B`: the best plan of one job on each of so many devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _figures
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of a search on more and more devices."""
    from shardwise.answers import _plan
    from shardwise.errors import InputError
    from shardwise.search import doubling, scaled_rows, scaled_task

    whole = _plan.question(inputs)
    try:
        works = [(count, scaled_task(whole, count)) for count in doubling(*inputs.values["scaling"])]
    except InputError as error:
        inputs.merge(error)
    inputs.problems.raise_if_any()
    rows = tuple(scaled_rows(works, lambda work: _plan.ask(inputs, work)))
    best = [row.best for row in rows if row.best is not None]
    covered = min(rows[-1].found.covered, 1.0 if len(rows) == len(works) else 0.0)
    commands = [_plan.words(inputs, report) for report in best]
    _plan.save_best(inputs, "train", _plan.case_of(inputs, best[-1]) if best else None)

    def tree() -> dict[str, Any]:
        from shardwise.answers._scaling import scaling_tree

        return scaling_tree(rows, commands)

    def page() -> Page:
        from shardwise.answers._scaling import scaling_page

        return scaling_page(rows, commands[-1] if commands else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_search import plan_figure
        from shardwise.search import scaled_result

        return plan_figure(scaled_result(rows))

    return _figures.plotted(inputs, Answer(_plan.status_of(covered, bool(best)), tree, page), draw)
