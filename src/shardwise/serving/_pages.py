"""Caches of mixed layers in pages of one size, as vLLM V1 hands them out; plain numbers.

Layers that keep the same things form groups of equal numbers of layers, and a block of the pool serves one group
(github.com/vllm-project/vllm vllm/v1/core/kv_cache_utils.py, 2026-01): its bytes are those of a page of every layer of
the group. Layers with fewer bytes a token have more tokens in a page; the page of recurrent layers is padded to that of
attention, whose block grows until a state fits (vllm/model_executor/models/config.py, HybridAttentionMambaModelConfig).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from shardwise.serving._cache import Cache


@dataclass(frozen=True, kw_only=True, slots=True)
class Pages:
    """A pool for mixed layers: bytes of a block, tokens of its smallest page, and the groups that take blocks."""

    block_bytes: float
    tokens: int
    groups: int

    def capacity_tokens(self, budget_bytes: float) -> int:
        """Return tokens of a pool as the engine prints them: blocks of one group, each of the smallest page.

        >>> Pages(block_bytes=10.0, tokens=16, groups=3).capacity_tokens(95.0)
        48
        """
        return int(budget_bytes // self.block_bytes) // self.groups * self.tokens


def group_layers(counts: list[int]) -> int:
    """Return layers of one group: those of the rarest kind, or of the commonest where kinds are nearly even.

    >>> group_layers([5, 25]), group_layers([13, 12])
    (5, 13)
    """
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def pages_of(held: Counter[Cache[float]], block: int) -> Pages | None:
    """Return the pool of so many layers of each cache, None where all layers keep the same kind of thing.

    >>> full, slides = (Cache(token_bytes=4.0, limit=n, constant_bytes=0.0) for n in (0, 128))
    >>> pages_of(Counter({full: 5, slides: 25}), 16)
    Pages(block_bytes=320.0, tokens=16, groups=6)
    """
    growing = [c for c in held if c.token_bytes]
    if len({(c.limit, bool(c.token_bytes)) for c in held}) < 2 or not growing:
        return None
    widest = max(c.token_bytes for c in growing)
    state = max(c.constant_bytes for c in held)
    tokens = block * max(1, math.ceil(state / widest / block))
    size = group_layers(list(held.values()))
    groups = sum(math.ceil(layers / size) for layers in held.values())
    return Pages(block_bytes=widest * tokens * size, tokens=tokens, groups=groups)
