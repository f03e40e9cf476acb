"""`shardwise plan train --scaling A..B`: the best plan of one job on each of so many devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.answers import _plan_train
from shardwise.answers._answer import Answer
from shardwise.answers._described import describe_placed
from shardwise.answers._inputs import Inputs
from shardwise.answers._page import FULL, Page, assumptions, command_lines
from shardwise.answers._plan_page import assumed, short_tree
from shardwise.answers._plot import plotted
from shardwise.answers._train_tree import train_tree
from shardwise.search import ScalingRow
from shardwise.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of a search on more and more devices."""
    from shardwise.errors import InputError
    from shardwise.search import doubling, scaled_rows, scaled_task

    whole = _plan_train.question(inputs)
    try:
        works = [(count, scaled_task(whole, count)) for count in doubling(*inputs.values["scaling"])]
    except InputError as error:
        inputs.merge(error)
    inputs.problems.raise_if_any()
    rows = tuple(scaled_rows(works, lambda work: _plan_train.ask(inputs, work)))
    best = [row.best for row in rows if row.best is not None]
    covered = min(rows[-1].found.covered, 1.0 if len(rows) == len(works) else 0.0)
    commands = [_plan_train.words(inputs, report) for report in best]
    _plan_train.save_best(inputs, "train", _plan_train.case_of(inputs, best[-1]) if best else None)

    def tree() -> dict[str, Any]:
        return scaling_tree(rows, commands)

    def page() -> Page:
        return scaling_page(rows, commands[-1] if commands else [], (tuple(inputs.notes), width))

    def draw() -> Figure:
        from shardwise.answers._plots_search import plan_figure
        from shardwise.search import scaled_result

        return plan_figure(scaled_result(rows))

    return plotted(inputs, Answer(_plan_train.status_of(covered, bool(best)), tree, page), draw)


_BAR = 12


def scaling_tree(rows: Sequence[ScalingRow], commands: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the rows as plain values; `commands` are the words that evaluate the best plan of each that has one."""
    found = [row for row in rows if row.best is not None]
    best = [
        {**train_tree(row.best), "command": " ".join(words)}
        for row, words in zip(found, commands, strict=True)
        if row.best is not None
    ]
    return {
        "search": {
            "plans": sum(row.found.num_plans for row in rows),
            "evaluated": sum(row.found.counts.evaluated for row in rows),
            "seconds": sum(row.found.seconds for row in rows),
            "covered": min(row.found.covered for row in rows),
            "objective": rows[0].found.options.objective,
        },
        "scaling": [_row_tree(row) for row in rows],
        "best": best,
        "rejected": [],
    }


def _row_tree(row: ScalingRow) -> dict[str, Any]:
    own = {"num_devices": row.num_devices, "plans": row.found.num_plans, "efficiency": row.efficiency}
    return {**own, "best": short_tree(row.best) if row.best is not None else None}


def scaling_page(
    rows: Sequence[ScalingRow], command: Sequence[str], notes_and_width: tuple[Sequence[str], int]
) -> Page:
    """Return the rows as a page; `command` evaluates the best plan on the most devices."""
    notes, width = notes_and_width
    page = Page(width)
    case = rows[0].found.grid.case
    title = f"{case.model.name} on {rows[0].num_devices:,} to {rows[-1].num_devices:,} x {case.cluster.device.name}"
    page.label("SCALING", f"{title}, {case.job.global_batch:,} sequences a step", "bold", "bold")
    plans, seconds = sum(r.found.num_plans for r in rows), sum(r.found.seconds for r in rows)
    page.note(f"{plans:,} plans in {show_seconds(seconds)}; efficiency is tokens/s per device over the first row's")
    if rows[-1].found.covered < 1:
        page.note(f"interrupted: {rows[-1].found.covered:.1%} of the last row's space was covered")
    page.blank()
    table: list[Sequence[str]] = [("devices", "step", "tokens/s/dev", "MFU", "efficiency", "", "memory")]
    table += [_cells(row) for row in rows]
    page.table(table, right=(0, 1, 2, 3, 4, 6), header=True, indent=2)
    page.blank()
    for row in rows:
        if row.best is not None:
            page.label(f"{row.num_devices:>8,}", describe_placed(row.best), "bold")
    page.blank()
    last = next((row.best for row in reversed(rows) if row.best is not None), None)
    assumptions(page, tuple(dict.fromkeys((*notes, *assumed(case, last)))))
    page.blank()
    if command:
        command_lines(page, "AGAIN", command)
    return page


def _cells(row: ScalingRow) -> tuple[str, ...]:
    if row.best is None or row.efficiency is None:
        return (f"{row.num_devices:,}", "-", "-", "-", "-", "", "nothing fits")
    best = row.best
    bar = FULL * min(_BAR, round(_BAR * row.efficiency))
    rate = f"{best.tokens_per_second_per_gpu:,.0f}"
    shares = f"{best.mfu:.1%}", f"{row.efficiency:.1%}", bar
    return (f"{row.num_devices:,}", show_seconds(best.step_seconds), rate, *shares, show_bytes(best.device_bytes))
