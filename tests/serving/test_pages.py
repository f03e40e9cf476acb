"""Pages of one size for layers that keep different things."""

from __future__ import annotations

from collections import Counter

import pytest

from shardwise.serving._cache import SequenceCache
from shardwise.serving._capacity import pages_of


def cache(token_bytes: float = 0.0, limit: int = 0, state: float = 0.0) -> SequenceCache[float]:
    """Return what a layer keeps."""
    return SequenceCache(token_bytes=token_bytes, limit=limit, constant_bytes=state)


@pytest.mark.parametrize(
    ("held", "gib", "printed"),
    [
        # Start-up logs of vLLM 0.19 and 0.20 on GB10: memory of the cache and the tokens printed for it.
        (
            {cache(8192.0, 1024): 25, cache(4096.0): 5},
            40.61,
            177_440,
        ),  # Gemma 4 26B-A4B: full layers have half the bytes
        ({cache(state=2146304.0): 30, cache(2048.0): 10}, 47.55, 623_040),  # Qwen3.6 35B-A3B: blocks of 1,056 tokens
    ],
)
def test_tokens_of_mixed_layers(held: dict[SequenceCache[float], int], gib: float, printed: int) -> None:
    """Tokens are blocks shared out over the groups, times the tokens of the smallest page: what vLLM prints."""
    pages = pages_of(Counter(held), 16)
    assert pages is not None
    assert pages.capacity_tokens(gib * 2**30) == pytest.approx(printed, rel=0.002)


def test_layers_that_are_alike_need_no_groups() -> None:
    """Layers that all grow with every token share one pool, whatever their width."""
    assert pages_of(Counter({cache(8192.0): 5, cache(4096.0): 5}), 16) is None
    assert pages_of(Counter({cache(state=100.0): 5}), 16) is None
