"""Linear attention and other recurrences.

Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear, Ling 3.0, MiniMax-Text-01, RecurrentGemma, RWKV-4, xLSTM and LFM2.

Sources: arXiv:2412.06464, arXiv:2510.26692, arXiv:2501.08313, arXiv:2402.19427, arXiv:2305.13048, arXiv:2405.04517 and
transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, MoE
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, Mixer
from shardwise.models._recurrent import GatedDelta, LightningAttention, Mlstm, RecurrentGate, Rwkv, ShortConv
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import dense_beside, qwen_shared, qwen_sparse, with_mtp
from shardwise.records import replace


def recurrent_gemma(config: Config) -> Architecture:
    """Return RecurrentGemma: two recurrent blocks to each windowed attention; the file's ffn counts both halves."""
    number, hidden = config.layers(), config.size("hidden_size")
    bias, window = config.flag("attention_bias"), config.size("window")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=True), window=window)
    gate = RecurrentGate(width=config.count("lru_width") or hidden, heads=core.heads, conv=config.size("conv1d_width"))
    pattern = config.words("block_types") or ["recurrent", "recurrent", "attention"]
    ffn = MLP(ffn=config.half("ffn"), bias=True, activation=parts.activation(config, "gelu_pytorch_tanh"))
    kinds = [pattern[i % len(pattern)] for i in range(number)]
    config.accept("layers_block_type", "layer_types")
    mixers: dict[str, Mixer] = {"attention": core, "recurrent": gate}
    layers = parts.build(kinds, lambda k: Block(mixers=(mixers.get(k, core),), feed_forward=ffn))
    return parts.renormed(parts.language_model(config, layers), "rmsnorm-offset")


def rwkv(config: Config) -> Architecture:
    """Return RWKV-4: time mixing and channel mixing, a norm behind the embedding."""
    hidden = config.size("hidden_size")
    width = config.count("attention_hidden_size") or hidden
    ffn = MLP(ffn=config.count("ffn") or 4 * hidden, gated=False, activation="relu2", style="rwkv")
    block = Block(mixers=(Rwkv(width=width),), feed_forward=ffn, norm="layernorm")
    model = parts.language_model(config, (block,) * config.layers(), norm="layernorm")
    return replace(model, embedding_norm=True)


def xlstm(config: Config) -> Architecture:
    """Return xLSTM: a matrix LSTM and a gated feed-forward a layer."""
    hidden, heads, bias = config.size("hidden_size", "embedding_dim"), config.size("num_heads"), config.flag("use_bias")
    widths = [int(config.scaled(key, hidden, default=d)) for key, d in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))]
    for key, width in zip(("qk_dim_factor", "v_dim_factor"), widths, strict=True):
        config.expect(width % heads == 0, key, f"gives {width}, not a multiple of {heads} heads", "use another factor")
    step = config.size("ffn_round_up_to_multiple_of", default=64)
    wide = int((config.scaled("ffn_proj_factor", hidden, default=2.667) + step - 1) // step * step)
    cell = Mlstm(heads=heads, qk_dim=max(widths[0] // heads, 1), v_dim=max(widths[1] // heads, 1), bias=bias)
    block = Block(mixers=(cell,), feed_forward=MLP(ffn=wide, bias=bias), norm="layernorm" if bias else "rmsnorm")
    config.accept("add_out_norm", "ssm_chunk")
    return parts.language_model(config, (block,) * config.layers())


def lfm2(config: Config) -> Architecture:
    """Return LFM2 or LFM2-MoE: gated short convolutions with attention in between."""
    number = config.layers()
    core = replace(parts.attention(config), qk_norm="head")
    conv = ShortConv(width=config.size("hidden_size"), conv=config.size("conv_L_cache"), bias=config.flag("conv_bias"))
    kinds, widths = _lfm2_kinds(config, number), _lfm2_feed_forwards(config, number)
    pairs = list(zip(kinds, widths, strict=True))
    made = {
        (kind, ffn): Block(mixers=(conv if kind == "conv" else core,), feed_forward=ffn)
        for kind, ffn in dict.fromkeys(pairs)
    }
    return replace(
        parts.language_model(config, tuple(made[pair] for pair in pairs)), tied=config.flag("tied", "tie_embedding")
    )


def lfm3(config: Config) -> Architecture:
    """Return LFM3: LFM2 with windows between the full layers, a gate for each head, and norms behind both halves.

    Source: transformers 5.24.0 models/lfm3/modeling_lfm3.py.
    """
    number, bias = config.layers(), config.flag("attention_bias")
    gate = config.flag("use_attention_gate", default=True)
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head", head_gate=gate)
    conv = ShortConv(width=config.size("hidden_size"), conv=config.size("conv_L_cache"), bias=config.flag("conv_bias"))
    mixers = {"conv": conv, "full": core, "sliding": replace(core, window=config.count("window"))}
    pattern = ["full" if i % 4 == 2 else "conv" if i % 4 or not i else "sliding" for i in range(number)]
    kinds = parts.windows(config, number, pattern)
    known = set(kinds) <= set(mixers)
    config.expect(known, "layer_types", "must be conv, full_attention or sliding_attention", "list those")
    ffn, norms = MLP(ffn=config.size("ffn")), 4 if config.flag("use_sandwich_norm", default=True) else 2
    layers = parts.build(kinds, lambda kind: Block(mixers=(mixers.get(kind, core),), feed_forward=ffn, norms=norms))
    return parts.language_model(config, layers)


def _lfm2_kinds(config: Config, number: int) -> list[str]:
    listed = config.indices("full_attn_idxs")
    if config.has("layer_types") or config.model_type == "lfm2_moe":
        config.expect(
            config.has("layer_types"), "layer_types", "is missing", "list full_attention or conv for each layer"
        )
        return parts.windows(config, number, ("full",))
    return ["full" if listed is None or i in listed else "conv" for i in range(number)]


def _lfm2_feed_forwards(config: Config, number: int) -> list[FeedForward]:
    if config.model_type == "lfm2":
        return [MLP(ffn=_lfm2_width(config))] * number
    first = config.count("first_dense_layers")
    experts = replace(parts.moe(config), correction_bias=config.flag("use_expert_bias", default=True))
    dense: FeedForward = parts.mlp(config) if first else experts
    return [dense if i < first else experts for i in range(number)]


def _lfm2_width(config: Config) -> int:
    """LFM2 takes two thirds of the stated width, times a factor, rounded up to a multiple."""
    width = config.size("ffn", "block_ff_dim")
    multiple = config.size("block_multiple_of", default=256)
    config.accept("block_ffn_dim_multiplier")
    if not config.flag("block_auto_adjust_ff_dim", default=True):
        return width
    wide = config.scaled("block_ffn_dim_multiplier", max(int(2 * width / 3), 1), default=1.0)
    return multiple * -(-int(wide) // multiple)


def qwen3_next(config: Config) -> Architecture:
    """Return Qwen3-Next or Qwen3.5: three gated-delta layers to each gated full-attention layer."""
    number, (core, delta) = config.layers(), qwen_mixers(config)
    period = config.period("full_attention_interval", 4)
    kinds = parts.windows(config, number, ("linear",) * (period - 1) + ("full",))
    sparse, experts, dense = _feed_forwards(config, number)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(core if k == "full" else delta,), feed_forward=experts if s else dense)
        for k, s in dict.fromkeys(pairs)
    }
    config.accept("attn_output_gate", "mlp_only_layers")
    model = parts.with_state(config, parts.language_model(config, tuple(made[pair] for pair in pairs)))
    return with_mtp(config, parts.renormed(model, "rmsnorm-offset"))


def qwen_mixers(config: Config) -> tuple[Attention, GatedDelta]:
    """Return Qwen's gated attention with a norm for each head, and its gated delta rule."""
    bias = config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head", qk_norm_kind="rmsnorm-offset")
    delta = GatedDelta(
        key_heads=config.size("linear_key_heads"),
        value_heads=config.size("linear_value_heads"),
        key_dim=config.size("linear_key_head_dim"),
        value_dim=config.size("linear_value_head_dim"),
        conv=config.size("linear_conv"),
        projections=_delta_projections(config),
    )
    config.accept("attn_output_gate")
    return replace(core, output_gate=True), delta


def _delta_projections(config: Config) -> tuple[str, ...]:
    """Qwen3-Next joins its linear layers in two, Qwen3.5 has four."""
    return () if config.model_type == "qwen3_next" else ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


def _feed_forwards(config: Config, number: int) -> tuple[list[bool], FeedForward, FeedForward]:
    """Which layers are MoE, the MoE and the dense feed-forward; Qwen3.5 is one or the other throughout."""
    if config.model_type == "qwen3_5_text":
        dense = parts.mlp(config)
        return [False] * number, dense, dense
    experts = qwen_shared(config, parts.moe(config))
    sparse = qwen_sparse(config, number) if config.model_type == "qwen3_next" else [True] * number
    return sparse, experts, dense_beside(config, experts, sparse)


def olmo_hybrid(config: Config) -> Architecture:
    """Return OLMo Hybrid: three pre-normed gated-delta layers to each post-normed attention layer, all dense."""
    number, bias, hidden = config.layers(), config.flag("attention_bias"), config.size("hidden_size")
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    core = replace(core, qk_norm="full", qk_norm_kind="rmsnorm-float", rotary=_rotates(config))
    keys = config.count("linear_key_heads", default=0) or core.heads
    width = config.count("linear_key_head_dim", default=0) or max(3 * hidden // (4 * keys), 1)
    delta = GatedDelta(
        key_heads=keys,
        value_heads=config.count("linear_value_heads", default=0) or core.heads,
        key_dim=width,
        value_dim=config.count("linear_value_head_dim", default=0) or 2 * width,
        conv=config.size("linear_conv"),
        projections=("q", "k", "v", "a", "b", "g"),
    )
    kinds = parts.windows(config, number, ("linear", "linear", "linear", "full"))
    if "full" not in kinds:
        kinds[-1] = "full"
    ffn = parts.mlp(config)
    layers = parts.build(
        kinds, lambda k: Block(mixers=(core if k == "full" else delta,), feed_forward=ffn, norm="rmsnorm-float")
    )
    return parts.language_model(config, layers, norm="rmsnorm-float")


def _rotates(config: Config) -> bool:
    """Whether positions rotate queries and keys: the released models set the base of the rotation to null."""
    rope = config.raw.get("rope_parameters")
    return not isinstance(rope, Mapping) or rope.get("rope_theta", 0) is not None


def minimax(config: Config) -> Architecture:
    """Return MiniMax-Text-01: lightning attention, softmax attention every so many layers, experts throughout."""
    number, experts = config.layers(), parts.moe(config, "intermediate_size")
    core = replace(parts.attention(config), window=config.count("window", default=0))
    linear = LightningAttention(heads=core.heads, head_dim=core.head_dim, block=config.size("block_size", default=256))
    softmax = config.sequence("attn_type_list", number, int)
    kinds = ["full" if one else "linear" for one in softmax] or parts.windows(config, number, ("full", "linear"))
    layers = parts.build(kinds, lambda k: Block(mixers=(core if k == "full" else linear,), feed_forward=experts))
    return parts.language_model(config, layers)


def bailing_hybrid(config: Config) -> Architecture:
    """Return Ling 3.0: five delta-attention layers to each gated latent-attention layer, experts behind the first."""
    number, period = config.layers(), config.period("layer_group_size", 6)
    core = replace(parts.latent_attention(config), head_gate=True)
    # The class keeps the width of a linear head apart once it has read it from head_dim.
    own = config.has("linear_key_head_dim") or not config.has("head_dim")
    width = config.size("linear_key_head_dim") if own else config.size("head_dim")
    heads, conv = config.count("linear_key_heads", default=0) or core.heads, config.size("short_conv_kernel_size")
    config.accept("linear_conv", "linear_key_head_dim")
    delta = GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv=conv, style="kda-full-rank"
    )
    kinds = parts.windows(config, number, ("linear",) * (period - 1) + ("full",))
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    words, first = config.sequence("mlp_layer_types", number), config.count("first_dense_layers")
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    return with_mtp(config, _mixed(config, {"full": core, "linear": delta}, kinds, sparse, experts))


def _mixed(
    config: Config, mixers: dict[str, Mixer], kinds: list[str], sparse: list[bool], experts: MoE
) -> Architecture:
    """The model whose layers take their mixer by kind and experts where they are sparse."""
    dense = dense_beside(config, experts, sparse)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(mixers.get(k, mixers["linear"]),), feed_forward=experts if s else dense)
        for k, s in dict.fromkeys(pairs)
    }
    return parts.language_model(config, tuple(made[pair] for pair in pairs))


def delta_attention(config: Config) -> GatedDelta:
    """Return Kimi's delta attention; its sizes stand in a section of released files."""
    inner = config.section("linear_attn_config")
    heads = inner.count("num_heads", "linear_num_heads") or config.size("linear_key_heads")
    width = inner.count("head_dim") or config.size("linear_key_head_dim")
    conv = inner.count("short_conv_kernel_size") or config.size("linear_conv")
    # Kimi-K3 projects the output gate at once, and the decay through the low rank as before.
    own = ("q", "k", "v", "b", "g") if inner.flag("use_full_rank_gate") else ()
    return GatedDelta(
        key_heads=heads, value_heads=heads, key_dim=width, value_dim=width, conv=conv, style="kda", projections=own
    )


def kimi_linear(config: Config) -> Architecture:
    """Return Kimi Linear or Kimi-K3: three delta-attention layers to each latent-attention layer, MoE behind the first.

    Kimi-K3 has a gate of every element on both, experts in a latent, and residuals that each layer mixes from those
    before (mlx_lm 0.32.2 models/kimi_k3.py; moonshotai/Kimi-K3 config.json).
    """
    number, inner, delta = config.layers(), config.section("linear_attn_config"), delta_attention(config)
    core = replace(parts.latent_attention(config), output_gate=config.flag("mla_use_output_gate"))
    latent = config.count("moe_latent", "routed_expert_hidden_size", default=0)
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True, latent=latent)
    words, first = config.sequence("mlp_layer_types", number), config.count("first_dense_layers", default=1)
    config.accept("first_dense_layers", "moe_layer_freq")
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    model = _mixed(config, {"full": core, "linear": delta}, _kimi_kinds(config, inner, number), sparse, experts)
    return _with_residuals(config, model, latent if config.flag("latent_moe_use_norm") else 0)


def _with_residuals(config: Config, model: Architecture, latent_norm: int) -> Architecture:
    """Return Kimi's model with what mixes residuals of earlier layers, a norm and a map to one value a branch."""
    config.accept("activation_situ_beta", "activation_situ_linear_beta", "mla_use_nope", "use_grouped_topk")
    mixes = config.count("attn_res_block_size", default=0) > 0
    if not mixes and not latent_norm:
        return model
    if mixes:
        config.note("residuals of earlier layers are counted as weights, what mixing them moves is not")
    own = 4 * model.hidden if mixes else 0
    made = {
        block: replace(block, extra_vectors=own + (latent_norm if block.experts is not None else 0))
        for block in dict.fromkeys(model.layers)
    }
    return replace(model, layers=tuple(made[block] for block in model.layers), extra_vectors=own // 2)


def _kimi_kinds(config: Config, inner: Config, number: int) -> list[str]:
    """The kind of each layer; a checkpoint numbers its full layers from 1."""
    full = inner.indices("full_attn_layers")
    inner.accept("kda_layers")
    if full is not None and not config.has("layer_types"):
        return ["full" if i + 1 in full else "linear" for i in range(number)]
    return parts.windows(config, number, ["full" if i and i % 4 == 0 else "linear" for i in range(number)])


ROWS: dict[str, FamilyRow] = {
    "recurrent_gemma": FamilyRow(recurrent_gemma, ClassFacts(joined_rotary=True)),
    "rwkv": FamilyRow(rwkv),
    "xlstm": FamilyRow(xlstm),
    "lfm2": FamilyRow(lfm2),
    "lfm2_moe": FamilyRow(lfm2),
    "lfm3": FamilyRow(lfm3),
    "qwen3_next": FamilyRow(qwen3_next, ClassFacts(joined_rotary=True)),
    "qwen3_5_text": FamilyRow(qwen3_next, ClassFacts(joined_rotary=True)),
    "qwen3_5_moe_text": FamilyRow(qwen3_next, ClassFacts(normalised=True, joined_rotary=True)),
    "olmo_hybrid": FamilyRow(olmo_hybrid),
    "minimax": FamilyRow(minimax, ClassFacts(normalised=True, float_weights=True)),
    "bailing_hybrid": FamilyRow(bailing_hybrid, ClassFacts(float_weights=True, float_router=True)),
    "kimi_linear": FamilyRow(kimi_linear, ClassFacts(float_weights=True, float_router=True)),
}
