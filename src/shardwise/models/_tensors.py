"""The tensors that a joint matrix of a layer is written as in files that quantise them one by one (GGUF)."""

from __future__ import annotations

from shardwise.models._architecture import Architecture, Block
from shardwise.models._mixers import Attention, KeyHeads, LatentAttention
from shardwise.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorShare:
    """A tensor of a file: "q", "k", "v", "up", "down", "out" or "other", its share of a matrix, and a row's length."""

    part: str
    share: float
    inner: int


def tensor_shares(block: Block | None, role: str, outer: float, inner: int) -> tuple[TensorShare, ...]:
    """Return the tensors that a matrix of a layer stands for, by what multiplies by it and its sides.

    One matrix for queries, keys and values is as values are; those of latents are up-projections of keys, whose rows
    are a head's, and of values.

    >>> block = Block(mixers=(Attention(heads=32, kv_heads=8, head_dim=128),), feed_forward=None)
    >>> [(one.part, round(one.share, 2), one.inner) for one in tensor_shares(block, "qkv", 6144, 4096)]
    [('q', 0.67, 4096), ('k', 0.17, 4096), ('v', 0.17, 4096)]
    """
    mixers = block.mixers if block else ()
    core = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    latent = next((mixer for mixer in mixers if isinstance(mixer, LatentAttention)), None)
    if role == "kv_up" and latent:
        keys, values = latent.qk_nope_head_dim, latent.v_head_dim
        sides = ((keys, keys), (values, latent.kv_lora_rank))
        return tuple(TensorShare(part="other", share=n / (keys + values), inner=row) for n, row in sides)
    if role != "qkv" or core is None:
        return (TensorShare(part=role if role in ("up", "down", "out") else "other", share=1.0, inner=inner),)
    if core.fused_projection:
        return (TensorShare(part="v", share=1.0, inner=inner),)
    own = {} if core.kv_from_earlier else {"k": core.kv_heads * core.head_dim, "v": core.kv_heads * core.value_dim}
    if core.shared_key_value:
        own.pop("v", None)
    widths = {"q": max(outer - sum(own.values()), 0), **own}
    return tuple(TensorShare(part=part, share=width / outer, inner=inner) for part, width in widths.items())


def attending_heads(model: Architecture) -> tuple[KeyHeads, ...]:
    """Return the heads of each layer of plain attention, in order.

    >>> from shardwise.models import load_model
    >>> heads = attending_heads(load_model("llama-3.1-8b"))
    >>> len(heads), heads[0].query_heads, heads[0].heads
    (32, 32, 8)
    """
    cores = (m for block in model.layers for m in block.mixers if isinstance(m, Attention))
    return tuple(heads for heads in (core.cached_heads() for core in cores) if heads)
