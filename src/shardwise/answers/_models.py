"""`shardwise models`: what the catalogue of models holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers._answer import Answer, nothing_found
from shardwise.answers._case import Inputs

if TYPE_CHECKING:
    from shardwise.answers._page import Page


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise models`."""
    from shardwise.answers import _listing

    inputs.problems.raise_if_any()
    search = inputs.get("search", "")
    names = _listing.search_models(search)
    if not names:
        from shardwise.models import model_names

        return nothing_found("models", search, model_names())

    if "write" in inputs.values:
        from shardwise.answers._files import one_to_write, write_text

        path = inputs.values["write"]
        write_text(path, _listing.model_file(one_to_write(path, names, "model")))

    def tree() -> dict[str, Any]:
        show = _listing.model_record if len(names) == 1 else _listing.model_row
        return {"models": [show(name) for name in names]}

    def page() -> Page:
        return _listing.models_page(names, width)

    return Answer(0, tree, page)
