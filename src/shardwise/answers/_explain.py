"""`shardwise explain`: any number of a report, opened down to its inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.answers import _train
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs
from shardwise.answers._words import command_words

if TYPE_CHECKING:
    from shardwise.answers._explain_page import Opened
    from shardwise.answers._page import Page

UNITS = {
    "step": "seconds",
    "memory": "bytes",
    "tokens_per_second_per_gpu": "",
    "mfu": "",
    "hfu": "",
    "ttft": "seconds",
    "tpot": "seconds",
    "request": "seconds",
    "kv_cache": "bytes",
}
_SERVING = ("ttft", "tpot", "request", "kv_cache")


def _root(inputs: Inputs, what: str) -> Opened:
    from shardwise.answers._explain_page import Opened

    if what in _SERVING or (what == "memory" and _serves(inputs)):
        from shardwise.answers._infer import ask

        return Opened(ask(inputs).explain(what), UNITS[what])
    return Opened(_train.ask(inputs).explain(what), UNITS[what])


def _serves(inputs: Inputs) -> bool:
    """Return whether a flag that only serving has was given."""
    from shardwise.answers._flags import infer_flags, train_flags

    return bool(inputs.values.keys() & (infer_flags().keys() - train_flags().keys()))


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise explain`."""
    from shardwise.answers._explain_page import explain_page, explain_tree, follow

    what, depth = inputs.get("what", "step"), inputs.get("depth", 2)
    at = follow(_root(inputs, what), inputs.get("path", ""))
    words = command_words("explain", {k: v for k, v in inputs.values.items() if k != "path"})

    def tree() -> dict[str, Any]:
        return {"what": what, "path": list(at.path), "times": at.times, **explain_tree(at, depth)}

    def page() -> Page:
        return explain_page(at, what, depth, words, width)

    return Answer(0, tree, page)
