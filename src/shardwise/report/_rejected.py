"""Why plans are not among the best: each law and limit with its count and what would do."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shardwise.report._page import Page
from shardwise.search import Rejection

_INDENT = 17


def rejected(page: Page, rows: Sequence[Rejection]) -> None:
    """Append the laws and limits that plans fell to."""
    if not rows:
        return
    page.add(("REJECTED", "bold"))
    for row in rows:
        page.add((f"{row.count:>15,}", ""), (f"  {row.title}", ""))
        for line in textwrap.wrap(row.remedy, page.width - _INDENT, break_long_words=False, break_on_hyphens=False):
            page.add((" " * _INDENT, ""), (line, "dim"))
