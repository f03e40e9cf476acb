"""Rows that tables of fused experts were measured with: what the collector routes to the rank that it times.

`balanced` spreads the tokens evenly. `power_law_A` draws the weight of each expert from a power law of exponent A
between 1 and 0.8 of the tokens, or 0.01 and 2 where there are fewer choices than experts, rounds the rows, and times
the rank with the most. A token chooses no expert twice: what an expert has beyond the tokens, and what rounding loses,
goes to those with the fewest rows, one rank after another, so that few tokens reach nearly as many experts as they
have choices (aiconfigurator 095f58a51 collector/helper.py, _generate_power_law_distribution since 13dadba3b of
2026-04-19, and the collectors of each engine, Apache-2.0). The first collector, that of TensorRT-LLM 1.0.0, left it to
the experts with the most and to the kernels that choose, which take no expert twice either.
"""

from __future__ import annotations

from functools import cache
from math import ceil
from typing import Any

from accuracy.kernels.tables import tables
from shardwise.measured import refuse

DRAWS = 64
_STEEPEST = 8.0


def check(routing: str, top_k: float, experts: float, ranks: float) -> None:
    """Refuse more choices than experts, and a law that cannot be drawn."""
    if top_k > experts:
        raise refuse("top_k", top_k, f"is more than the {experts:g} experts")
    if not routing.startswith("power_law_"):
        return
    try:
        exponent = float(routing.removeprefix("power_law_"))
    except ValueError:
        exponent = 0.0
    if not 0 < exponent <= _STEEPEST:
        raise refuse("routing", routing, f"is no power_law_A with A above 0 and at most {_STEEPEST:g}")
    if experts % ranks:
        raise refuse("moe_ep", ranks, f"must divide the {experts:g} experts")


def routed(routing: str, tokens: float, top_k: float, experts: float, ranks: float) -> tuple[float, float]:
    """Return how many experts of the timed rank get a token, and its rows over all of them.

    A routing that is not stated is random: E (1 - (1 - k/E)^T) experts are hit.

    >>> routed("balanced", 4, 2, 64, 2), routed("", 1, 8, 64, 8)
    ((4.0, 4.0), (1.0, 1.0))
    """
    local, rows = experts / ranks, tokens * top_k / ranks
    if routing == "balanced":
        return min(local, max(rows, 1.0)), max(rows, 1.0)
    if not routing.startswith("power_law_"):
        return local * (1 - (1 - min(top_k / experts, 1.0)) ** tokens), rows
    return _drawn(float(routing.removeprefix("power_law_")), tokens, top_k, int(experts), int(ranks))


def timed_rows(
    kernel: str, version: str, routing: str, shape: tuple[float, float, float, float]
) -> tuple[float, float, float]:
    """Return experts hit, rows that run and rows of other ranks; the shape is (tokens, top_k, experts, ranks).

    >>> timed_rows("fused", "", "balanced", (64, 2, 8, 4)), timed_rows("fused", "0.5.10", "balanced", (64, 2, 8, 4))
    ((2.0, 32.0, 96.0), (2.0, 64.0, 0.0))
    """
    tokens, top_k, _, ranks = shape
    hit, rows = routed(routing, *shape)
    every, taken = tokens * top_k, tables()["experts"]
    if ranks > 1 and kernel in taken["whole_kernels"]:
        return hit, every, 0.0
    if ranks > 1 and version in taken["handed_versions"]:
        return hit, max(rows, top_k * touching(routing, *shape)), 0.0
    return hit, rows, max(every - rows, 0.0)


def touching(routing: str, tokens: float, top_k: float, experts: float, ranks: float) -> float:
    """Return how many tokens have a choice on the timed rank.

    >>> touching("balanced", 1024, 2, 8, 4), touching("", 1024, 1, 8, 4)
    (512.0, 256.0)
    """
    if routing == "balanced":
        return max(1.0, tokens * min(1.0, experts / ranks / ceil(experts / top_k)))
    if not routing.startswith("power_law_"):
        return float(max(1.0, tokens * (1 - (1 - 1 / ranks) ** top_k)))
    return _touching(float(routing.removeprefix("power_law_")), tokens, top_k, int(experts), int(ranks))


@cache
def _touching(exponent: float, tokens: float, top_k: float, experts: int, ranks: int) -> float:
    """Return tokens with a choice on the heaviest rank: experts take places in turn, the largest first."""
    import numpy as np

    found = []
    for rows in _rows(exponent, tokens, top_k, experts, ranks)[:8]:
        order = np.argsort(-rows, kind="stable")
        owner = np.repeat(order, rows[order]) // (experts // ranks)
        heaviest = rows.reshape(ranks, -1).sum(1).argmax()
        found.append(np.unique(np.flatnonzero(owner == heaviest) % int(tokens)).size)
    return max(1.0, float(np.mean(found)))


def tiled(routing: str, shape: tuple[float, float, float, float], size: float) -> float:
    """Return the tiles of so many rows that the timed rank runs; the shape is (tokens, top_k, experts, ranks).

    >>> tiled("balanced", (64, 2, 8, 4), 16), tiled("balanced", (65, 2, 8, 4), 16)
    (2.0, 4.0)
    """
    hit, rows = routed(routing, *shape)
    if not routing.startswith("power_law_"):
        return hit * ceil(round(rows / hit / size, 6))
    return _drawn_tiles(float(routing.removeprefix("power_law_")), *shape[:2], int(shape[2]), int(shape[3]), size)


@cache
def _drawn_tiles(exponent: float, tokens: float, top_k: float, experts: int, ranks: int, size: float) -> float:
    """Return the tiles of the heaviest rank, the mean of some draws of the law."""
    return float((-(-_heaviest(exponent, tokens, top_k, experts, ranks) // size)).sum(1).mean())


@cache
def _drawn(exponent: float, tokens: float, top_k: float, experts: int, ranks: int) -> tuple[float, float]:
    """Return experts hit and rows of the heaviest rank, the mean of some draws of the law."""
    heaviest = _heaviest(exponent, tokens, top_k, experts, ranks)
    return max(float((heaviest > 0).sum(1).mean()), 1.0), max(float(heaviest.sum(1).mean()), 1.0)


def _heaviest(exponent: float, tokens: float, top_k: float, experts: int, ranks: int) -> Any:
    """Return the rows of each expert of the heaviest rank, some draws of the law."""
    import numpy as np

    by_rank = _rows(exponent, tokens, top_k, experts, ranks).reshape(DRAWS, ranks, experts // ranks)
    return by_rank[np.arange(DRAWS), by_rank.sum(2).argmax(1)]


def _rows(exponent: float, tokens: float, top_k: float, experts: int, ranks: int) -> Any:
    """Return the rows of each expert, some draws of the law."""
    import numpy as np

    low, high = (1.0, max(0.8 * tokens, 1.001)) if tokens * top_k > experts else (0.01, 2.0)
    b, drawn = 1 - exponent, np.random.default_rng(0).random((DRAWS, experts))
    weights = ((high**b - low**b) * drawn + low**b) ** (1 / b) if b else low * (high / low) ** drawn
    most = ceil(tokens)
    rounded = np.round(weights / weights.sum(1, keepdims=True) * most * top_k).astype(int)
    rows = np.minimum(rounded, most)
    missing, beyond = int(most * top_k) - rounded.sum(1), (rounded - rows).sum(1)
    rows = _dealt(rows.reshape(DRAWS, ranks, -1), beyond, most)
    rows = _dealt(rows, np.maximum(missing, 0), most)
    rows = most - _dealt(most - rows, np.maximum(-missing, 0), most)
    return rows.reshape(DRAWS, experts)


def _dealt(rows: Any, count: Any, most: int) -> Any:
    """Return rows (draw, rank, expert) with so many more in each draw: one a rank in turn, to its emptiest expert."""
    import numpy as np

    left = count.copy()
    while (left > 0).any():
        room = (most - rows).sum(2)
        ranks = np.maximum((room > 0).sum(1), 1)
        turn = np.cumsum(room > 0, axis=1) - 1
        share = (left // ranks)[:, None] + (turn < (left % ranks)[:, None])
        share = np.minimum(np.where(room > 0, share, 0), room)
        rows, left = _filled(rows, share, most), left - share.sum(1)
    return rows


def _filled(rows: Any, share: Any, most: int) -> Any:
    """Return rows where each rank has so many more, its emptiest experts first, none beyond the most."""
    import numpy as np

    low, high = rows.min(2), np.full(share.shape, most)
    while (low < high).any():
        level = (low + high + 1) // 2
        fits = np.maximum(level[..., None] - rows, 0).sum(2) <= share
        low, high = np.where(fits, level, low), np.where(fits, high, level - 1)
    filled = np.maximum(rows, low[..., None])
    rest = share - (filled - rows).sum(2)
    lowest = (filled == low[..., None]) & (filled < most)
    return filled + (lowest & (np.cumsum(lowest, axis=2) <= rest[..., None]))
