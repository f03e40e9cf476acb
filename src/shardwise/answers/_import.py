"""`shardwise import`: what a file of another system says, and what became of every word of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _from
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.answers._page import Page


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise import`."""
    if "file" in inputs.values:
        inputs.values["from"] = inputs.values.pop("file")
    if not {"from", "from_args"} & inputs.values.keys() and not inputs.problems.items:
        inputs.fail("file", None, "is missing", "name a file, or give the training command behind --")
    if inputs.imported is None and not inputs.problems.items:
        _from.take(inputs)
    case = inputs.imported
    if case is None or inputs.problems.items:
        raise InputError(inputs.problems.items)

    def words() -> list[str]:
        from shardwise.answers._words import command_words

        kept = {key: value for key, value in inputs.values.items() if key in ("from", "from_args", "set", "skip")}
        named = {"model": "MODEL"} if case.model is None else {}
        usual = "h100-sxm-80gb" if case.num_devices else "64xh100-sxm-80gb"
        return command_words("train", {**named, **kept, "on": inputs.get("on", usual)})

    def tree() -> dict[str, Any]:
        from shardwise.answers._imported import import_tree

        return import_tree(case)

    def page() -> Page:
        from shardwise.answers._imported import import_page

        return import_page(case, words(), width)

    return Answer(0, tree, page)
