"""What each mixer keeps for the tokens to come: keys and values, latents, windows, recurrent states.

Letters: K key-value heads on the rank, H head dim, t tensor-parallel ranks. Sources: arXiv:2309.06180 for keys
and values, arXiv:2405.04434 section 2.1 for latents, arXiv:2312.00752 and arXiv:2405.21060 for states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, divide, minimum, total
from shardwise.models import Block, Mixer, TokenCache
from shardwise.ops.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Cache(Generic[X]):
    """Bytes of one sequence in one layer on a rank: `token_bytes` for up to `limit` tokens (0: all), and a constant."""

    token_bytes: X
    limit: int
    constant_bytes: X

    def sequence_bytes(self, tokens: X) -> X:
        """Return bytes of a sequence of so many tokens: a window stops growing at its limit."""
        held = minimum(tokens, self.limit) if self.limit else tokens
        return self.constant_bytes + self.token_bytes * held


def mixer_caches(y: Layout[X], m: Mixer) -> tuple[Cache[X], ...]:
    """Return what one mixer keeps of one sequence: caches of tokens, and a state that tensor parallelism splits."""
    found = [_token_cache(y, cache) for cache in m.caches()]
    kept, zero = m.recurrent_state(), 0 * y.degrees.tp
    if kept.wide or kept.narrow:
        state: X = divide(zero + 4 * kept.wide + y.a * kept.narrow, y.degrees.tp)
        found.append(Cache(token_bytes=zero, limit=0, constant_bytes=state))
    return tuple(found)


def _token_cache(y: Layout[X], c: TokenCache) -> Cache[X]:
    """Return the bytes of a cache on a rank; its heads are never below one a rank."""
    zero = 0 * y.degrees.tp
    heads = y.kv_heads(c.heads) if c.heads else zero + 1
    size = heads * (y.work.cache_bytes * c.elements + c.bytes8)
    return Cache(token_bytes=size / c.rate if c.rate > 1 else size, limit=c.limit, constant_bytes=zero)


def block_caches(y: Layout[X], block: Block) -> tuple[Cache[X], ...]:
    """Return what one layer keeps of one sequence, blocks inside it included."""
    own = tuple(c for m in block.mixers for c in mixer_caches(y, m))
    return (*own, *(c for inner in block.also for c in block_caches(y, inner)))


def keeps_tokens(block: Block) -> bool:
    """Return whether a layer keeps something of every new token, if only for a while."""
    mixers = any(m.attends and m.looks_back for m in block.mixers)
    return mixers or any(map(keeps_tokens, block.also))


def sequence_bytes(caches: Iterable[Cache[X]], tokens: X) -> X:
    """Return bytes of one sequence of so many tokens in one layer."""
    return total((c.sequence_bytes(tokens) for c in caches), 0 * tokens)


def breakpoints(blocks: Iterable[Block]) -> set[int]:
    """Return the context lengths at which the cost of a decode step changes its slope: windows, chunks, selections.

    >>> from shardwise.models import Attention
    >>> breakpoints([Block(mixers=(Attention(heads=8, kv_heads=8, head_dim=64, window=128),), feed_forward=None)])
    {128}
    """
    found: set[int] = set()
    for block in blocks:
        found |= {length for m in block.mixers for length in m.bends()}
        found |= breakpoints(block.also)
    return found - {0}
