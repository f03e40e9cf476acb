"""An answer to a command: the exit status, the tree that `--json` prints and the page that people read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, Problem
from shardwise.records import dataclass

if TYPE_CHECKING:
    from shardwise.answers._page import Page


@dataclass(frozen=True, slots=True)
class Answer:
    """An exit status, and how to make the tree or the page; only the one that is printed is made."""

    status: int
    tree: Callable[[], Any]
    page: Callable[[], Page]


def check_finite(headlines: Mapping[str, float]) -> None:
    """Raise `InputError` where a headline is beyond what numbers can hold."""
    problems = [
        Problem(name, str(value), "is beyond what can be computed", "use rates and sizes that exist")
        for name, value in headlines.items()
        if not math.isfinite(value)
    ]
    if problems:
        raise InputError(problems)


def nothing_found(what: str, search: str, names: tuple[str, ...]) -> Answer:
    """Return the answer of a search without results: status 1 and the nearest names."""
    from shardwise.answers._converters import nearest

    near = nearest(search, names, 3)

    def page() -> Page:
        from shardwise.answers._page import Page

        made = Page(80)
        made.add((f"no {what} match {search!r}; near it: {near}", ""))
        return made

    return Answer(1, lambda: {what: [], "near": near.split(" or ")}, page)


# Parts of a report in which every number is bytes.
_BYTES = ("categories", "moments", "at_peak")
_ENDS = ("_bytes", "_bytes_per_gpu", "bytes_per_step", "sent_per_step")


def whole_bytes(tree: Any, inside: bool = False) -> Any:
    """Return a report's tree with bytes rounded to whole ones.

    Bytes are values whose key ends with "_bytes", "_bytes_per_gpu" or "_per_step" of bytes, what lies below such a key,
    and the parts of a peak. Rates a second stay as they are.

    >>> whole_bytes({"peak_bytes": 10.4, "seconds": 0.5, "at_peak": {"weights": 6.6}})
    {'peak_bytes': 10, 'seconds': 0.5, 'at_peak': {'weights': 7}}
    """
    if isinstance(tree, dict):
        return {key: whole_bytes(value, inside or key in _BYTES or key.endswith(_ENDS)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(whole_bytes(value, inside) for value in tree)
    return round(tree) if inside and isinstance(tree, float) else tree
