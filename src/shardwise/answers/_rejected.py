"""Why plans are not among the best: each law and limit with its count and what would do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardwise.answers._page import Page
from shardwise.search import Rejection, Remedy, RunnerUp

_INDENT = 17


def change_tree(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return the change of a remedy as plain values, None where no single change is known that helps."""
    if remedy is None or not remedy.field:
        return None
    value = list(remedy.value) if isinstance(remedy.value, tuple) else remedy.value
    return {"field": remedy.field, "value": value, "loss": remedy.loss, "best": remedy.best}


def runner_up_tree(runner_up: RunnerUp) -> dict[str, Any]:
    """Return by how much a plan is behind the best, and the constants that could put it ahead."""
    return {"behind": runner_up.behind, "sensitivity": [asdict(swap) for swap in runner_up.sensitivity]}


def wrapped(row: tuple[str, ...], text: str, room: int) -> list[tuple[str, ...]]:
    """Return a row of a table with its text in as many lines as it takes.

    >>> wrapped(("1", "2"), "tp 4, dp 2", 6)
    [('1', '2', 'tp 4,'), ('', '', 'dp 2')]
    """
    first, *more = textwrap.wrap(text, max(room, 24) if room > 6 else 6, break_long_words=False) or [""]
    return [(*row, first), *(((*("",) * len(row), line)) for line in more)]


def next_best(page: Page, near: Sequence[tuple[RunnerUp, str]]) -> None:
    """Append the next plans, each with what is other than in the best, and which constants could put it ahead."""
    if near:
        page.add(("NEXT", "bold"), ("      what is behind the best, and what could put it ahead", ""))
    for runner_up, text in near:
        page.note(f"{runner_up.behind:.2%} behind: {text}")
        page.items([_swaps(runner_up)], "dim")


def _swaps(runner_up: RunnerUp) -> str:
    """Return in words what puts a runner_up ahead."""
    at = "{} at {:.3f} of what is assumed (band {:.2f} to {:.2f}; the best would then cost {:.1%})"
    said = [at.format(s.constant, s.factor, s.low, s.high, s.regret) for s in runner_up.sensitivity]
    return "ahead with " + ", or ".join(said) if said else "no constant within its band puts it ahead"


def rejected(page: Page, rows: Sequence[Rejection]) -> None:
    """Append the laws and limits that reject plans."""
    if not rows:
        return
    page.add(("REJECTED", "bold"))
    for row in rows:
        page.add((f"{row.count:>15,}" if row.count else " " * 15, ""), (f"  {row.title}", ""))
        for line in textwrap.wrap(row.remedy, page.width - _INDENT, break_long_words=False, break_on_hyphens=False):
            page.add((" " * _INDENT, ""), (line, "dim"))
