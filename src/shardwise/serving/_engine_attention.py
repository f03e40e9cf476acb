"""What is known of the attention kernels of an engine beside what the ledger charges."""

from __future__ import annotations

from typing import Literal

from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineAttention:
    """The attention kernels of prompts and over the cache."""

    ignores_windows: bool = False
    """Windows of a model are not used: every layer keeps and reads all tokens."""
    prompt: Literal["flash", "scores"] = "flash"
    score_bytes: float = 4.0
    """Bytes that a score moves beside its GEMMs where attention is not fused."""
    includes: tuple[str, ...] = ()
    """Operators whose seconds the measured kernels of attention hold."""
    mla_kernels: str = ""
    """The engine whose kernels over latent caches stand for its own."""
    decode_kernels_of: tuple[tuple[str, str], ...] = ()
    """The older family of devices whose kernels over a cache it runs, by family."""
    narrow_as_wide: tuple[tuple[str, int], ...] = ()
    """Heads of a group from which on 8-bit caches are read no faster than those of 16 bits, by family."""
    narrow_query_seconds: tuple[tuple[str, float], ...] = ()
    """Seconds of a layer in which kernels of their own quantise queries for an 8-bit cache, by family."""
    shared_query_heads: int = 1
    """Only groups of so many query heads share what they read of the cache (1: all groups do)."""
    unshared_with_narrow_cache: bool = False
    """No heads share what they read of caches of fewer than 16 bits."""
    unshared_with_window: bool = False
    """No heads share what they read in models with windows."""
    never_splits_kv: bool = False
    """Where heads do not share no kernel is cut along the context."""
    narrow_prompts: str = ""
    """Formats of weights beside which prompts over 8-bit caches run in 8 bits, queries and all."""
    cached_starts: int = 0
    """Small kernels that attention over a cache starts as, where these are measured (0: as the measured kernels do)."""
    bytes_per_second_per_core: float = 0.0
    """Bytes of the cache a second that a core reads there (0: as measured for the device)."""
    picked: tuple[tuple[str, str, str], ...] = ()
    """Kernels of latents that an indexer picks: families of devices, "wide" or "narrow" caches, [picked_latents]."""
    picked_prompts_above: int = -1
    """Keys of a prompt beyond which it runs in them too (below 0: prompts run in others)."""
    indexer_kernels: int = 0
    """Small kernels of an indexer beside those of the ledger: rotations, copies, quantisation, the choice itself."""
    pick_key_seconds: float = 0.0
    """Seconds in which one core chooses among the scores of a token, a key (0: all cores choose)."""
    unified: str = ""
    """Families of devices (a pattern) on which heads of several sizes all run in [unified_attention]."""
    unified_sinks: str = ""
    """Those on which models with sinks do."""
    segmented_tokens: int = 1
    """Tokens of a sequence in a step up to which it cuts the context."""
    beside_prompts: tuple[str, ...] = ()
    """Families of devices on which every sequence of a step with prompts runs the kernel of prompts."""
    matrix_heads: tuple[tuple[str, int, int], ...] = ()
    """Widest head and least query heads of a group that matrix units take, by family of devices (a pattern)."""
    vector_share: float = 0.0
    """Share of the vector units' rate at which attention of other heads runs there."""
    heads_apart: bool = False
    """The step has longer prompts too, so that each head of a sequence with one token fills a tile of its own."""

    def decode_family(self, family: str) -> str:
        """Return the family whose kernels over a cache run on devices of a family."""
        return dict(self.decode_kernels_of).get(family, family)
