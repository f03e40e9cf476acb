"""Gated-delta linear attention with full attention in between: Qwen3-Next, Qwen3.5 and Kimi Linear.

Sources: arXiv:2412.06464, arXiv:2510.26692 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._model import Block, FeedForward, Model
from shardwise.models._recurrent import GatedDelta
from shardwise.models.families import _parts as parts
from shardwise.models.families.mixture import dense_beside, qwen_shared, qwen_sparse, with_mtp


def qwen3_next(c: Config) -> Model:
    """Return Qwen3-Next or Qwen3.5: three gated-delta layers to each gated full-attention layer."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), qk_norm="head", qk_norm_kind="rmsnorm-offset")
    core = replace(core, output_gate=True)
    delta = GatedDelta(
        key_heads=c.size("linear_key_heads"),
        value_heads=c.size("linear_value_heads"),
        key_dim=c.size("linear_key_head_dim"),
        value_dim=c.size("linear_value_head_dim"),
        conv=c.size("linear_conv"),
    )
    period = c.repeats("full_attention_interval", default=4) or 4
    kinds = parts.windows(c, number, ("linear",) * (period - 1) + ("full",))
    sparse, experts, dense = _feed_forwards(c, number)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(core if k == "full" else delta,), feed_forward=experts if s else dense)
        for k, s in dict.fromkeys(pairs)
    }
    c.accept("attn_output_gate", "mamba_ssm_dtype", "mamba_ssm_cache_dtype", "mlp_only_layers")
    model = parts.language_model(c, tuple(made[pair] for pair in pairs))
    return with_mtp(c, parts.renormed(model, "rmsnorm-offset"))


def _feed_forwards(c: Config, number: int) -> tuple[list[bool], FeedForward, FeedForward]:
    """Which layers are mixtures, the mixture and the dense feed-forward; Qwen3.5 is one or the other throughout."""
    if c.model_type == "qwen3_5_text":
        dense = parts.mlp(c)
        return [False] * number, dense, dense
    experts = qwen_shared(c, parts.moe(c))
    sparse = qwen_sparse(c, number) if c.model_type == "qwen3_next" else [True] * number
    return sparse, experts, dense_beside(c, experts, sparse)


def kimi_linear(c: Config) -> Model:
    """Return Kimi Linear: three delta-attention layers to each latent-attention layer, mixtures behind the first."""
    number, inner = c.layers(), c.section("linear_attn_config")
    heads = inner.count("num_heads", "linear_num_heads") or c.size("linear_key_heads")
    width = inner.count("head_dim") or c.size("linear_key_head_dim")
    delta = GatedDelta(
        key_heads=heads,
        value_heads=heads,
        key_dim=width,
        value_dim=width,
        conv=inner.count("short_conv_kernel_size") or c.size("linear_conv"),
        style="kda",
    )
    core = parts.latent_attention(c)
    experts = replace(parts.moe(c, shared_count=True), correction_bias=True)
    words, first = c.sequence("mlp_layer_types", number), c.count("first_dense_layers", default=1)
    c.accept("first_dense_layers", "moe_layer_freq")
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    dense = dense_beside(c, experts, sparse)
    pairs = list(zip(_kimi_kinds(c, inner, number), sparse, strict=True))
    made = {
        (k, s): Block(mixers=(core if k == "full" else delta,), feed_forward=experts if s else dense)
        for k, s in dict.fromkeys(pairs)
    }
    return parts.language_model(c, tuple(made[pair] for pair in pairs))


def _kimi_kinds(c: Config, inner: Config, number: int) -> list[str]:
    """The kind of each layer; a checkpoint numbers its full layers from 1."""
    full = inner.indices("full_attn_layers")
    inner.accept("kda_layers")
    if full is not None and not c.has("layer_types"):
        return ["full" if i + 1 in full else "linear" for i in range(number)]
    return parts.windows(c, number, ["full" if i and i % 4 == 0 else "linear" for i in range(number)])


ROWS: dict[str, Row] = {
    "qwen3_next": Row(qwen3_next, ClassFacts(joined_rotary=True)),
    "qwen3_5_text": Row(qwen3_next, ClassFacts(joined_rotary=True)),
    "qwen3_5_moe_text": Row(qwen3_next, ClassFacts(normalised=True, joined_rotary=True)),
    "kimi_linear": Row(kimi_linear, ClassFacts(float_weights=True, float_router=True)),
}
