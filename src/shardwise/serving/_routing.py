"""How unevenly the router of a model chooses experts in served text: routing.toml."""

from __future__ import annotations

from functools import cache

from shardwise.files import own_table
from shardwise.models import Model


@cache
def popularity_of(family: str) -> float:
    """Return how many times as often the most popular expert of a layer is chosen as the least popular one.

    >>> popularity_of("qwen3_moe"), popularity_of("mixtral")
    (100.0, 1.0)
    """
    rows = own_table(__file__, "routing.toml")["routing"]
    return next((float(one["popularity"]) for one in rows if family in one["families"]), 1.0)


def routing_notes(model: Model) -> tuple[str, ...]:
    """Return how unevenly the experts of a model are taken to be chosen, nothing where it has none.

    >>> from shardwise.models import load_model
    >>> routing_notes(load_model("mixtral-8x7b"))
    ('routing: every expert as popular as any other, none of the family were counted',)
    """
    if not model.has_experts:
        return ()
    popularity = popularity_of(model.family)
    if popularity == 1:
        return ("routing: every expert as popular as any other, none of the family were counted",)
    return (f"routing: the most popular expert is chosen {popularity:g} times as often as the least of a layer",)
