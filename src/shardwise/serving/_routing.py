"""How unevenly the router of a model chooses experts in served text: routing.toml."""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.files import own_table
from shardwise.models import Model


@cache
def _popularity(family: str, experts: int) -> tuple[float, bool]:
    """Return the popularity of a family with so many experts in a layer, and whether they were counted."""
    table: dict[str, Any] = own_table(__file__, "routing.toml")
    for one in table["routing"]:
        if family in one["families"] and one.get("experts", experts) == experts:
            return float(one["popularity"]), True
    rest = table["uncounted"]
    return (float(rest["popularity"]) if experts >= rest["least_experts"] else 1.0), False


def popularity_of(model: Model) -> float:
    """Return how many times as often the most popular expert of a layer is chosen as the least popular one.

    >>> from shardwise.models import load_model
    >>> [popularity_of(load_model(name)) for name in ("qwen3-30b-a3b", "deepseek-r1", "kimi-k2", "mixtral-8x7b")]
    [100.0, 13.0, 13.0, 1.0]
    """
    return _popularity(model.family, model.most_experts)[0]


def routing_notes(model: Model) -> tuple[str, ...]:
    """Return how unevenly the experts of a model are taken to be chosen, nothing where it has none.

    >>> from shardwise.models import load_model
    >>> routing_notes(load_model("mixtral-8x7b"))
    ('routing: every expert as popular as any other, none of the family were counted',)
    """
    if not model.has_experts:
        return ()
    popularity, counted = _popularity(model.family, model.most_experts)
    if popularity == 1:
        why = "" if counted else ", none of the family were counted"
        return (f"routing: every expert as popular as any other{why}",)
    why = "" if counted else ", as in the most even of the families that were counted"
    return (f"routing: the most popular expert is chosen {popularity:g} times as often as the least of a layer{why}",)
