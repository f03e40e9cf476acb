"""Why plans are not among the best: each law and limit with its count and what would do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from shardwise.report._page import Page
from shardwise.search import Rejection, Remedy

_INDENT = 17


def change_tree(remedy: Remedy | None) -> dict[str, Any] | None:
    """Return the change of a remedy as plain values, None where no single change is known that will do."""
    if remedy is None or not remedy.field:
        return None
    value = list(remedy.value) if isinstance(remedy.value, tuple) else remedy.value
    return {"field": remedy.field, "value": value, "loss": remedy.loss, "best": remedy.best}


def rejected(page: Page, rows: Sequence[Rejection]) -> None:
    """Append the laws and limits that plans fell to."""
    if not rows:
        return
    page.add(("REJECTED", "bold"))
    for row in rows:
        page.add((f"{row.count:>15,}", ""), (f"  {row.title}", ""))
        for line in textwrap.wrap(row.remedy, page.width - _INDENT, break_long_words=False, break_on_hyphens=False):
            page.add((" " * _INDENT, ""), (line, "dim"))
