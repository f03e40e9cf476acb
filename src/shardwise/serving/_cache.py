"""What each mixer keeps for the tokens to come: keys and values, latents, windows, recurrent states.

Letters: K key-value heads on the rank, H head dim, t tensor-parallel ranks. Sources: arXiv:2309.06180 for keys
and values, arXiv:2405.04434 section 2.1 for latents, arXiv:2312.00752 and arXiv:2405.21060 for states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic

from shardwise.ledger.number import X, divide, minimum, total
from shardwise.models import (
    Attention,
    Block,
    CompressedAttention,
    GatedDelta,
    LatentAttention,
    Mamba1,
    Mamba2,
    Mixer,
    Mlstm,
    RecurrentGate,
    Rwkv,
    ShortConv,
)
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


def _keys_values(y: Layout[X], m: Attention) -> Iterator[Cache[X]]:
    """K * (H + Hv) elements a token, K never below one head a rank; one of the two where keys are values.

    Attention both ways keeps nothing: no token follows that could use it.
    """
    if m.kv_from_earlier or not m.causal:
        return
    heads = y.kv_heads(m.kv_heads)
    dims = m.head_dim if m.shared_key_value else m.head_dim + m.value_dim
    yield Cache(token_bytes=y.work.cache_bytes * heads * dims, limit=m.window or m.chunk, constant_bytes=0 * heads)


def _latent(y: Layout[X], m: LatentAttention) -> Iterator[Cache[X]]:
    """Kv + r elements a token for all heads, the same on every rank; sparse selection keeps its keys in 8 bits."""
    zero = 0 * y.degrees.tp
    element = y.work.cache_bytes
    yield Cache(token_bytes=zero + element * (m.kv_lora_rank + m.qk_rope_head_dim), limit=0, constant_bytes=zero)
    if m.indexer is not None and not m.indexer.shared:
        yield Cache(token_bytes=zero + m.indexer.head_dim + 4, limit=0, constant_bytes=zero)


def _compressed(y: Layout[X], m: CompressedAttention) -> Iterator[Cache[X]]:
    """One key-value head: a window of tokens and one entry for every `rate` of them."""
    zero = 0 * y.degrees.tp
    yield Cache(token_bytes=zero + y.work.cache_bytes * m.head_dim, limit=m.window, constant_bytes=zero)
    if m.rate:
        entry = y.work.cache_bytes * m.head_dim + (m.indexer.head_dim if m.indexer and not m.indexer.shared else 0)
        yield Cache(token_bytes=zero + entry / m.rate, limit=0, constant_bytes=zero)


def _state_bytes(y: Layout[X], m: Mixer) -> float:
    """Return bytes of a recurrent state over all ranks: the recurrence in fp32, convolution inputs as activations."""
    a = y.a
    if isinstance(m, Mamba1):
        return 4 * m.inner * m.state + a * (m.conv - 1) * m.inner
    if isinstance(m, Mamba2):
        return 4 * m.inner * m.state + a * (m.conv - 1) * (m.inner + 2 * m.groups * m.state)
    if isinstance(m, GatedDelta):
        keys, values = m.key_heads * m.key_dim, m.value_heads * m.value_dim
        return 4 * m.value_heads * m.key_dim * m.value_dim + a * (m.conv - 1) * (2 * keys + values)
    if isinstance(m, ShortConv):
        return a * (m.conv - 1) * m.width
    if isinstance(m, RecurrentGate):
        return 4 * m.width + a * (m.conv - 1) * m.width
    if isinstance(m, Rwkv):
        # Two shifted inputs, and numerator, denominator and maximum of the recurrence in fp32 (arXiv:2305.13048).
        return (2 * a + 3 * 4) * m.width
    if isinstance(m, Mlstm):
        return 4 * m.heads * (m.qk_dim * m.v_dim + m.qk_dim + 1)
    return 0.0


def mixer_caches(y: Layout[X], m: Mixer) -> tuple[Cache[X], ...]:
    """Return what one mixer keeps of one sequence."""
    if isinstance(m, Attention):
        return tuple(_keys_values(y, m))
    if isinstance(m, LatentAttention):
        return tuple(_latent(y, m))
    if isinstance(m, CompressedAttention):
        return tuple(_compressed(y, m))
    zero = 0 * y.degrees.tp
    state: X = divide(zero + _state_bytes(y, m), y.degrees.tp)
    return (Cache(token_bytes=zero, limit=0, constant_bytes=state),)


def block_caches(y: Layout[X], block: Block) -> tuple[Cache[X], ...]:
    """Return what one layer keeps of one sequence, blocks inside it included."""
    own = tuple(c for m in block.mixers for c in mixer_caches(y, m))
    return (*own, *(c for inner in block.also for c in block_caches(y, inner)))


def keeps_tokens(block: Block) -> bool:
    """Return whether a layer keeps something of every new token, if only for a while."""
    kinds = (Attention, LatentAttention, CompressedAttention)
    mixers = any(isinstance(m, kinds) and getattr(m, "causal", True) for m in block.mixers)
    return mixers or any(map(keeps_tokens, block.also))


def sequence_bytes(caches: Iterable[Cache[X]], tokens: X) -> X:
    """Return bytes of one sequence of so many tokens in one layer."""
    return total((c.sequence_bytes(tokens) for c in caches), 0 * tokens)


def breakpoints(blocks: Iterable[Block]) -> set[int]:
    """Return the context lengths at which the cost of a decode step changes its slope: windows, chunks, selections.

    >>> breakpoints([Block(mixers=(Attention(heads=8, kv_heads=8, head_dim=64, window=128),), feed_forward=None)])
    {128}
    """
    found: set[int] = set()
    for block in blocks:
        for m in block.mixers:
            if isinstance(m, Attention):
                found |= {m.window, m.chunk}
            elif isinstance(m, LatentAttention) and m.indexer:
                found.add(m.indexer.top_k)
            elif isinstance(m, CompressedAttention):
                found |= {m.window, m.indexer.top_k * m.rate if m.indexer else 0}
        found |= breakpoints(block.also)
    return found - {0}
