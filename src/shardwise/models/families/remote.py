"""Families whose model code lives beside their checkpoints: InternLM, Baichuan, Qwen 1, ChatGLM and DeciLM.

Sources: the configuration and modelling files of internlm/internlm-7b, baichuan-inc/Baichuan2-7B-Base, Qwen/Qwen-7B,
THUDM/chatglm3-6b and Deci/DeciLM-7B on the hub.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block
from shardwise.models._config import Config
from shardwise.models._mixers import Attention
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace


def _llama_like(config: Config, core: Attention, ffn: MLP) -> Architecture:
    return parts.language_model(config, (Block(mixers=(core,), feed_forward=ffn),) * config.layers())


def internlm(config: Config) -> Architecture:
    """Return InternLM: Llama with biases in attention."""
    bias = config.flag("bias", default=True)
    return _llama_like(config, parts.attention(config, qkv_bias=bias, out_bias=bias), parts.mlp(config))


def baichuan(config: Config) -> Architecture:
    """Return Baichuan: Llama's layers with one W_pack; the 13B model has ALiBi in place of rotary positions."""
    core = replace(parts.attention(config), fused_projection=True, rotary=config.size("hidden_size") < 5120)
    return _llama_like(config, core, parts.mlp(config))


def qwen(config: Config) -> Architecture:
    """Return Qwen 1: one c_attn with biases; its own files state twice the width of a projection."""
    twice = (config.has("kv_channels") or config.has("no_bias")) and "ffn" not in config.overrides
    if twice:
        config.note("the intermediate_size of Qwen 1 files is twice the width of each projection")
    config.accept("attention_bias", "no_bias", "kv_channels")
    core = replace(parts.attention(config, qkv_bias=True), fused_projection=True)
    return _llama_like(
        config, core, MLP(ffn=config.half("ffn") if twice else config.size("ffn"), activation=parts.activation(config))
    )


def chatglm(config: Config) -> Architecture:
    """Return ChatGLM 2, 3 or GLM-4-9B: grouped attention of one query_key_value, one dense_h_to_4h."""
    heads, bias = config.size("num_attention_heads"), config.flag("add_bias_linear")
    grouped = config.flag("multi_query_attention", default=True)
    core = Attention(
        heads=heads,
        kv_heads=parts.kv_heads(config, heads) if grouped else heads,
        head_dim=config.count("head_dim", "kv_channels") or config.size("hidden_size") // heads,
        qkv_bias=bias or config.flag("add_qkv_bias", default=True),
        out_bias=bias,
        fused_projection=True,
        joined_rotary=True,
    )
    config.accept("num_key_value_heads", "rmsnorm", "post_layer_norm", "apply_residual_connection_post_layernorm")
    return _llama_like(config, core, MLP(ffn=config.size("ffn"), bias=bias, fused_projection=True))


def deci(config: Config) -> Architecture:
    """Return DeciLM: Llama whose layers differ in key-value heads."""
    number, heads, ffn = config.layers(), config.size("num_attention_heads"), parts.mlp(config)
    given = config.sequence("num_key_value_heads_per_layer", number, int)
    if not given:
        return _llama_like(config, parts.attention(config), ffn)
    divides = all(k > 0 and heads % k == 0 for k in given)
    config.expect(divides, "num_key_value_heads_per_layer", f"must divide the {heads} query heads", "use divisors")
    base = Attention(heads=heads, kv_heads=heads, head_dim=parts.head_dim(config, heads))
    made = {k: Block(mixers=(replace(base, kv_heads=max(k, 1)),), feed_forward=ffn) for k in dict.fromkeys(given)}
    return parts.language_model(config, tuple(made[k] for k in given))


ROWS: dict[str, FamilyRow] = {
    "internlm": FamilyRow(internlm),
    "baichuan": FamilyRow(baichuan),
    "qwen": FamilyRow(qwen),
    "chatglm": FamilyRow(chatglm),
    "deci": FamilyRow(deci),
}
