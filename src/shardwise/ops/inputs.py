"""What the ledger of a block is made from: sizes of the axes, the tokens that flow through, and options of a layout."""

from __future__ import annotations

from typing import Generic, Literal

from shardwise.ledger.number import X
from shardwise.plans import ContextKind, LayoutKind, Stack, Tuning
from shardwise.records import dataclass

WIDEST_GROUP = 256
"""The widest head of a group that a fused kernel of PyTorch takes (sdp_utils.cpp, check_head_dim_size_flash)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes(Generic[X]):
    """The sizes of the axes that a block sees; `tp2` is SUMMA's second axis."""

    tp: X
    tp2: X
    cp: X
    ep: X
    etp: X
    panels: X


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch(Generic[X]):
    """What flows through a block: `B` sequences of `S` new tokens after `context` cached ones; bytes of elements.

    `coverage` "full" counts the whole attention square, "masked" what the mask leaves. `weight_bytes` and
    `activation_bytes` are per element in compute, `gradient_bytes` of the accumulated gradient, `cache_bytes` of the
    KV cache, `state_bytes` of a recurrence between steps. `packs_latents` is whether sparse latents of 8 bits have
    scales. Of `copies` tokens that are alike all go to the same experts, and a `routed_share` of all tokens to any. The
    most popular expert of a layer is chosen `popularity` times as often as the least. A step that is served is that of
    the busiest rank of experts, unless it is of the `mean_rank`. Experts drop rows beyond a capacity factor, and are
    filled up to it where they are padded (0: neither). Heads of up to `widest_group` values that share keys have a
    fused kernel of PyTorch's.
    """

    B: X
    S: X
    context: X
    phase: Literal["train", "prefill", "decode"] = "train"
    coverage: Literal["full", "masked"] = "masked"
    activation_bytes: int = 2
    weight_bytes: float = 2
    gradient_bytes: float = 4
    cache_bytes: float = 2
    state_bytes: float = 4
    packs_latents: bool = False
    dtype: str = "bf16"
    dropout: bool = False
    softmax_dropout: bool | None = None
    attention_dropout: bool | None = None
    hidden_dropout: bool | None = None
    density: float = 1.0
    imbalance: float = 1.0
    capacity_factor: float = 0.0
    pad_to_capacity: bool = False
    copies: X | float = 1.0
    routed_share: X | float = 1.0
    popularity: float = 1.0
    mean_rank: bool = False
    widest_group: int = WIDEST_GROUP


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutOptions:
    """What changes the shape of the ledger rather than a size in it."""

    stack: Stack
    layout: LayoutKind = "1d"
    sequence_parallel: bool = False
    cp_kind: ContextKind = "ring"
    tuning: Tuning | None = None
    autocast: bool = False
    """Weights are in fp32 and GEMMs take 16-bit copies of them and of fp32 inputs, which autograd keeps."""
    stops_early: bool = True
    """Recompute of a unit ends at its last saved tensor, where the framework's can."""
