"""How unevenly the router of a model chooses experts in served text: routing.toml."""

from __future__ import annotations

from functools import cache

from shardwise.files import own_table


@cache
def popularity_of(family: str) -> float:
    """Return how many times as often the most popular expert of a layer is chosen as the least popular one.

    >>> popularity_of("qwen3_moe"), popularity_of("mixtral")
    (100.0, 1.0)
    """
    rows = own_table(__file__, "routing.toml")["routing"]
    return next((float(one["popularity"]) for one in rows if family in one["families"]), 1.0)
