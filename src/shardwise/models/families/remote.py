"""Dense families whose model code lives beside their checkpoints: InternLM, Baichuan, Qwen 1, ChatGLM, DeciLM, MiMo.

Sources: the configuration and modelling files of internlm/internlm-7b, baichuan-inc/Baichuan2-7B-Base, Qwen/Qwen-7B,
THUDM/chatglm3-6b, Deci/DeciLM-7B, nvidia/Llama-3_3-Nemotron-Super-49B-v1 and XiaomiMiMo/MiMo-7B-Base on the hub.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block
from shardwise.models._config import Config
from shardwise.models._mixers import Attention, Mixer
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import with_mtp
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


def mimo(config: Config) -> Architecture:
    """Return MiMo-7B: Qwen2's layers with prediction layers of their kind behind them."""
    core = parts.attention(config, qkv_bias=config.flag("attention_bias", default=True))
    config.accept("use_sliding_window", "window", "max_window_layers")
    return with_mtp(config, _llama_like(config, core, parts.mlp(config)))


def nemotron_nas(config: Config) -> Architecture:
    """Return a Llama that a search has pruned: attention and feed-forwards that layers lack, each of its own width.

    Source: github.com/vllm-project/vllm v0.33.0 vllm/model_executor/models/nemotron_nas.py.
    """
    number = config.layers()
    config.accept("ffn", "num_key_value_heads")
    if not config.has("block_configs"):
        config.problems.add("block_configs", None, "is missing", "list attention and ffn of each layer")
    made: dict[str, Block] = {}
    layers = []
    for inner in config.sections("block_configs", number):
        key = str(inner.raw)
        made[key] = made.get(key) or _searched(config, inner)
        layers.append(made[key])
    return parts.language_model(config, tuple(layers) or (Block(mixers=(), feed_forward=None, norms=0),) * number)


def _searched(config: Config, inner: Config) -> Block:
    """Return the layer that one entry of `block_configs` states."""
    attends, feeds = inner.section("attention"), inner.section("ffn")
    for part, name in ((attends, "attention"), (feeds, "ffn")):
        rule = f"has {name} that one linear layer replaces, which is not understood"
        config.expect(not part.flag("replace_with_linear"), "block_configs", rule, "use a model without")
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    bias = config.flag("attention_bias")
    mixers: tuple[Mixer, ...] = ()
    ffn: MLP | None = None
    if not attends.flag("no_op"):
        group = attends.size("n_heads_in_group")
        rule = f"has n_heads_in_group {group}, which must divide the {heads} heads"
        config.expect(heads % group == 0, "block_configs", rule, "use a divisor")
        mixers = (
            Attention(
                heads=heads,
                kv_heads=max(heads // group, 1),
                head_dim=parts.head_dim(config, heads),
                qkv_bias=bias,
                out_bias=bias,
                window=attends.count("window_length"),
            ),
        )
    if not feeds.flag("no_op"):
        # The width is two thirds of so many times the stream, and filled up to a multiple of 256.
        width = -(-int(2 * feeds.number("ffn_mult", default=1.0) * hidden / 3) // 256) * 256
        ffn = MLP(ffn=max(width, 256), bias=config.flag("mlp_bias"), activation=parts.activation(config))
    return Block(mixers=mixers, feed_forward=ffn, norms=len(mixers) + (ffn is not None))


ROWS: dict[str, FamilyRow] = {
    "internlm": FamilyRow(internlm),
    "baichuan": FamilyRow(baichuan),
    "qwen": FamilyRow(qwen),
    "chatglm": FamilyRow(chatglm),
    "deci": FamilyRow(deci),
    "mimo": FamilyRow(mimo),
    "nemotron-nas": FamilyRow(nemotron_nas),
}
