"""`shardwise validate`: predicted against measured, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _figures
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._page import Page
    from shardwise.measured import Validation


def ask(inputs: Inputs) -> Validation:
    """Return the validation of the files that were named."""
    from shardwise.measured import BY, validate

    by = inputs.get("by", ())
    for name in by:
        if name not in BY:
            inputs.fail("by", name, "is not a field of rows", "use some of " + ", ".join(BY))
    if not inputs.get("files", ()):
        inputs.fail("files", None, "names no file of measurements", "give a CSV file; docs/own-runs.md has its columns")
    inputs.problems.raise_if_any()
    return validate(inputs.get("files", ()))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise validate`."""
    _figures.check(inputs)
    found = ask(inputs)
    by = tuple(inputs.get("by", ()))
    _write(inputs, found)

    def tree() -> dict[str, Any]:
        from shardwise.answers._validate_tree import validate_tree

        return validate_tree(found, by or ("source", "metric", "device"))

    def page() -> Page:
        from shardwise.answers._validate_view import validate_page

        return validate_page(found, by, width)

    def draw() -> Figure:
        from shardwise.answers._plots_validate import validate_figure

        return validate_figure(found)

    status = 0 if found.predicted or not found.rows else 1
    return _figures.plotted(inputs, Answer(status, tree, page), draw)


def _write(inputs: Inputs, found: Validation) -> None:
    """Write the rows and the report where files are named for them."""
    from shardwise.answers._files import write_text

    if "rows" in inputs.values:
        from shardwise.measured import rows_csv

        write_text(inputs.values["rows"], rows_csv(found.rows))
    if "html" in inputs.values:
        from shardwise.answers._validate_html import validate_html

        write_text(inputs.values["html"], validate_html(found))
