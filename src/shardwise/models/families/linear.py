"""Gated-delta linear attention with full attention in between: Qwen3-Next, Qwen3.5 and Kimi Linear.

Sources: arXiv:2412.06464, arXiv:2510.26692 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.models._config import Config
from shardwise.models._model import Block, FeedForward, GatedDelta, Model
from shardwise.models.families import _parts as parts
from shardwise.models.families.mixture import dense_beside, qwen_shared, qwen_sparse


def qwen3_next(c: Config) -> Model:
    """Return Qwen3-Next or Qwen3.5: three gated-delta layers to each gated full-attention layer."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), qk_norm="head", output_gate=True)
    delta = GatedDelta(
        key_heads=c.size("linear_key_heads"),
        value_heads=c.size("linear_value_heads"),
        key_dim=c.size("linear_key_head_dim"),
        value_dim=c.size("linear_value_head_dim"),
        conv=c.size("linear_conv"),
    )
    period = c.count("full_attention_interval", default=4) or 4
    kinds = parts.windows(c, number, ("linear",) * (period - 1) + ("full",))
    sparse, experts, dense = _feed_forwards(c, number)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(core if k == "full" else delta,), feed_forward=experts if s else dense)
        for k, s in dict.fromkeys(pairs)
    }
    c.accept("attn_output_gate", "mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return parts.language_model(c, tuple(made[pair] for pair in pairs))


def _feed_forwards(c: Config, number: int) -> tuple[list[bool], FeedForward, FeedForward]:
    """Which layers are mixtures, the mixture and the dense feed-forward; Qwen3.5 is one or the other throughout."""
    if c.model_type == "qwen3_5_text":
        dense = parts.mlp(c)
        return [False] * number, dense, dense
    experts = qwen_shared(c, parts.moe(c))
    sparse = qwen_sparse(c, number) if c.model_type == "qwen3_next" else [True] * number
    return sparse, experts, dense_beside(c, experts, sparse)


BUILDERS: dict[str, Callable[[Config], Model]] = {
    "qwen3_next": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
}


def build(c: Config) -> Model:
    """Return the model of a linear-attention family."""
    return BUILDERS[c.model_type](c)
