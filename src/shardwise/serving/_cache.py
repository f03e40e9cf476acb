"""What each mixer keeps for the tokens to come: keys and values, latents, windows, recurrent states.

Letters: K key-value heads on the rank, H head dim, t tensor-parallel ranks. Sources: arXiv:2309.06180 for keys
and values, arXiv:2405.04434 section 2.1 for latents, arXiv:2312.00752 and arXiv:2405.21060 for states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic

from shardwise.ledger.number import X, divide, minimum, total
from shardwise.models import Block, Mixer, State, TokenCache
from shardwise.ops.layout import Layout
from shardwise.ops.ssm import state_bytes
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceCache(Generic[X]):
    """Bytes of one sequence in one layer on a rank: `token_bytes` for up to `limit` tokens (0: all), and a constant.

    The constant is that of one recurrent state, of which `states` are kept. A `ring` has its limit in every engine.
    """

    token_bytes: X
    limit: int
    constant_bytes: X
    states: int = 1
    ring: bool = False

    def sequence_bytes(self, tokens: X) -> X:
        """Return bytes of a sequence of so many tokens: a window stops growing at its limit."""
        cached = minimum(tokens, self.limit) if self.limit else tokens
        return self.states * self.constant_bytes + self.token_bytes * cached


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheRules:
    """How an engine keeps what mixers say they keep; the defaults are what most do.

    `shared_layers` is whether layers that read an earlier layer's cache have one allocated, `wide_index_keys` whether
    keys of indexers are in the type of the cache, `input_bytes` those of an element of the inputs that a convolution
    keeps (0: as wide as activations).
    """

    shared_layers: bool = False
    wide_index_keys: bool = False
    input_bytes: float = 0.0


def mixer_caches(layout: Layout[X], mixer: Mixer, rules: CacheRules) -> tuple[SequenceCache[X], ...]:
    """Return what one mixer keeps of one sequence: caches of tokens, and a state that tensor parallelism splits."""
    own = mixer.allocated() if rules.shared_layers else mixer.caches()
    caches = [_token_cache(layout, cache, rules) for cache in own]
    kept, zero = mixer.recurrent_state(), 0 * layout.degrees.tp
    if kept.wide or kept.narrow:
        wide, each = state_bytes(layout, mixer.float_state) * kept.wide, rules.input_bytes or layout.a
        state: X = divide(zero + wide + each * kept.narrow, layout.degrees.tp)
        state = state + each * kept.of_group * layout.kv_heads(kept.groups) if kept.groups else state
        caches.append(SequenceCache(token_bytes=zero, limit=0, constant_bytes=state))
    return tuple(caches)


def _token_cache(layout: Layout[X], cache: TokenCache, rules: CacheRules) -> SequenceCache[X]:
    """Return the bytes of a cache on a rank; its heads are never below one a rank."""
    zero = 0 * layout.degrees.tp
    heads = layout.kv_heads(cache.heads) if cache.heads else zero + 1
    bytes8: float = cache.bytes8 + layout.work.packs_latents * cache.packed8
    if cache.keys and rules.wide_index_keys:
        bytes8 = layout.work.cache_bytes * cache.keys
    size = heads * (layout.work.cache_bytes * cache.elements + bytes8)
    return SequenceCache(
        token_bytes=size / cache.rate if cache.rate > 1 else size, limit=cache.limit, constant_bytes=zero,
        ring=cache.ring,
    )  # fmt: skip


def block_caches(layout: Layout[X], block: Block, rules: CacheRules) -> tuple[SequenceCache[X], ...]:
    """Return what one layer keeps of one sequence, blocks inside it included."""
    own = tuple(cache for mixer in block.mixers for cache in mixer_caches(layout, mixer, rules))
    return (*own, *(cache for inner in block.also for cache in block_caches(layout, inner, rules)))


def keeps_tokens(block: Block) -> bool:
    """Return whether a layer keeps something of every new token, if only for a while."""
    mixers = any(mixer.attends and mixer.is_causal for mixer in block.mixers)
    return mixers or any(map(keeps_tokens, block.also))


def keeps_states(blocks: Iterable[Block]) -> bool:
    """Return whether some layer keeps a recurrent state."""
    return any(
        any(mixer.recurrent_state() != State() for mixer in block.mixers) or keeps_states(block.also)
        for block in blocks
    )


def sequence_bytes(caches: Iterable[SequenceCache[X]], tokens: X) -> X:
    """Return bytes of one sequence of so many tokens in one layer."""
    return total((cache.sequence_bytes(tokens) for cache in caches), 0 * tokens)


def breakpoints(blocks: Iterable[Block]) -> set[int]:
    """Return the context lengths at which the cost of a decode step changes its slope: windows, chunks, selections.

    >>> from shardwise.models import Attention
    >>> breakpoints([Block(mixers=(Attention(heads=8, kv_heads=8, head_dim=64, window=128),), feed_forward=None)])
    {128}
    """
    points: set[int] = set()
    for block in blocks:
        points |= {length for mixer in block.mixers for length in mixer.cost_breakpoints()}
        points |= breakpoints(block.also)
    return points - {0}
