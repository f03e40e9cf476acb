"""`shardwise dtypes`: recipes of precision, formats of weights and caches, and presets of widths."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._case import Inputs
from shardwise.answers._kinds import fail

if TYPE_CHECKING:
    from shardwise.answers._page import Page


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise dtypes`."""
    from shardwise.answers import _dtypes_page as _dtypes

    inputs.problems.raise_if_any()
    search = inputs.get("search", "")
    rows = _dtypes.search_dtypes(search)
    if not rows:
        return nothing_found("dtypes", search, tuple(dict.fromkeys(row["name"] for row in _dtypes.search_dtypes())))
    if "write" in inputs.values:
        _write(inputs.values["write"], search, rows)

    def tree() -> dict[str, Any]:
        return {"dtypes": rows}

    def page() -> Page:
        return _dtypes.dtypes_page(rows, width)

    return Answer(0, tree, page)


def _write(path: str, search: str, rows: list[dict[str, Any]]) -> None:
    """Write one recipe of training as a file of one's own catalogue."""
    from shardwise.answers._files import write_text
    from shardwise.plans import find_precision, precision_to_toml

    found = [row for row in rows if row["kind"] == "training"]
    if len(found) != 1:
        rule = f"needs one recipe of training, and {len(found)} match {search!r}"
        raise fail("write", path, rule, "name one, such as bf16")
    write_text(path, precision_to_toml(find_precision(found[0]["name"])))
