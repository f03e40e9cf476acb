"""Experts on grouped-query attention: Mixtral, Qwen, OLMoE, gpt-oss, GLM, Ernie, Llama 4, Trinity, MiMo and others.

Source: the model classes of transformers 5.23.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, MoE
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, NormKind
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace


def _windowed(core: Attention, kind: str, window: int) -> Attention:
    return replace(core, window=window) if kind == "sliding" else core


def _uniform(config: Config, core: Attention, experts: MoE, norm: NormKind = "rmsnorm") -> Architecture:
    """Every layer MoE."""
    block = Block(mixers=(core,), feed_forward=experts, norm=norm)
    return parts.language_model(config, (block,) * config.layers(), norm=norm)


def dense_beside(config: Config, experts: MoE, sparse: Sequence[bool]) -> FeedForward:
    """Return the feed-forward of the dense layers; a model without any has no use for its width."""
    if not all(sparse):
        return parts.mlp(config)
    config.accept("ffn")
    return experts


def _some_dense(config: Config, core: Attention, experts: MoE, sparse: list[bool], bias: bool = False) -> Architecture:
    """MoE layers where `sparse`, dense ones elsewhere."""
    dense = dense_beside(config, experts, sparse)
    if bias and isinstance(dense, MLP):
        dense = replace(dense, bias=True)
    blocks = {s: Block(mixers=(core,), feed_forward=experts if s else dense) for s in (True, False)}
    return parts.language_model(config, tuple(blocks[s] for s in sparse))


def mixtral(config: Config) -> Architecture:
    """Return Mixtral: experts of `intermediate_size`."""
    window = config.count("window")
    return _uniform(config, replace(parts.attention(config), window=window), parts.moe(config, "intermediate_size"))


def minimax_m2(config: Config) -> Architecture:
    """Return MiniMax-M2: norms over whole projections, a correction bias in the router."""
    core = replace(parts.attention(config), qk_norm="full" if config.flag("use_qk_norm", default=True) else "none")
    experts = replace(parts.moe(config, "intermediate_size"), correction_bias=True)
    config.accept("shared_expert_ffn", "qk_norm_type", "attn_type_list", "use_mtp")
    if config.predictions():
        config.note("multi-token-prediction modules of MiniMax-M2 are not counted: their layers are not in the file")
    return _uniform(config, core, experts)


def olmoe(config: Config) -> Architecture:
    """Return OLMoE or FlexOlmo: norms over whole projections."""
    bias = config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="full")
    return _uniform(config, core, parts.moe(config, "intermediate_size"))


def phimoe(config: Config) -> Architecture:
    """Return Phi-3.5-MoE: LayerNorm, biases by `attention_bias` and `lm_head_bias`."""
    bias = config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), window=config.count("window"))
    model = _uniform(config, core, parts.moe(config, "intermediate_size"), norm="layernorm")
    return replace(model, head_bias=config.flag("lm_head_bias"))


def gpt_oss(config: Config) -> Architecture:
    """Return gpt-oss: biases everywhere, a sink for each head, every other layer windowed."""
    bias, number = config.flag("attention_bias", default=True), config.layers()
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), sinks=True)
    experts = replace(
        parts.moe(config, "intermediate_size"), bias=True, router_bias=True, clamped=True, scaled_gate=True
    )
    window = config.size("window")
    kinds = parts.windows(config, number, ("sliding", "full"))
    layers = parts.build(kinds, lambda k: Block(mixers=(_windowed(core, k, window),), feed_forward=experts))
    return parts.language_model(config, layers)


def granitemoe(config: Config) -> Architecture:
    """Return GraniteMoe, with a shared expert where the file has one."""
    bias = config.flag("attention_bias")
    experts, shared = parts.moe(config, "intermediate_size"), 0
    if config.model_type == "granitemoeshared":
        shared = config.count("shared_expert_ffn")
    if shared:
        experts = replace(experts, shared=MLP(ffn=shared, activation=experts.activation, fused_projection=True))
    return _uniform(config, parts.attention(config, qkv_bias=bias, out_bias=bias), experts)


def qwen_sparse(config: Config, number: int) -> list[bool]:
    """Return which layers are MoE: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, dense = config.size("decoder_sparse_step", default=1), config.indices("mlp_only_layers") or []
    return [i not in dense and (i + 1) % step == 0 for i in range(number)]


def qwen_shared(config: Config, experts: MoE) -> MoE:
    """Return the MoE with Qwen's gated shared expert."""
    width = config.count("shared_expert_ffn")
    shared = MLP(ffn=width, activation=experts.activation) if width else None
    return replace(experts, shared=shared, shared_gate=shared is not None)


def qwen2_moe(config: Config) -> Architecture:
    """Return Qwen2-MoE: QKV bias, a gated shared expert, windows above `max_window_layers` when switched on."""
    core = parts.attention(config, qkv_bias=config.flag("qkv_bias", default=True))
    experts = qwen_shared(config, parts.moe(config))
    return _qwen(config, core, experts)


def qwen3_moe(config: Config) -> Architecture:
    """Return Qwen3-MoE: a norm for each head, no shared expert."""
    bias = config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    none = config.count("shared_expert_ffn") == 0
    config.expect(none, "shared_expert_ffn", "must be 0: the family has no shared expert", "leave it out")
    config.accept("use_qk_norm")
    return _qwen(config, core, parts.moe(config))


def _qwen(config: Config, core: Attention, experts: MoE) -> Architecture:
    number = config.layers()
    sparse = qwen_sparse(config, number)
    kinds = parts.windows(config, number, ("full",))
    on = config.flag("use_sliding_window")
    window = config.count("window") if on else 0
    if not on:
        config.accept("window", "max_window_layers")
    if window and not config.has("layer_types"):
        first = config.count("max_window_layers")
        kinds = ["sliding" if i >= first else "full" for i in range(number)]
    dense = dense_beside(config, experts, sparse)
    made = {
        (s, k): Block(mixers=(_windowed(core, k, window),), feed_forward=experts if s else dense)
        for s, k in dict.fromkeys(zip(sparse, kinds, strict=True))
    }
    return parts.language_model(config, tuple(made[pair] for pair in zip(sparse, kinds, strict=True)))


def glm4_moe(config: Config) -> Architecture:
    """Return GLM-4.5 or dots1: shared experts, leading dense layers, a correction bias, multi-token layers."""
    bias, number = config.flag("attention_bias"), config.layers()
    dots = config.model_type == "dots1"
    core = parts.attention(config, qkv_bias=bias, out_bias=bias and dots)
    if dots or config.flag("use_qk_norm"):
        core = replace(core, qk_norm="head")
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    first = config.count("first_dense_layers")
    model = _some_dense(config, core, experts, [i >= first for i in range(number)])
    return with_mtp(config, model)


def solar_open(config: Config) -> Architecture:
    """Return Solar-Open: every layer MoE with a shared expert."""
    bias = config.flag("attention_bias")
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    return _uniform(config, parts.attention(config, qkv_bias=bias), experts)


def hy_v3(config: Config) -> Architecture:
    """Return Hy3: shared experts, a correction bias, a leading dense layer."""
    bias, mlp_bias, number = config.flag("attention_bias"), config.flag("mlp_bias"), config.layers()
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    if experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, bias=mlp_bias))
    first, words = config.count("first_dense_layers", default=1), config.sequence("mlp_layer_types", number)
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    return with_mtp(config, _some_dense(config, core, experts, sparse, mlp_bias))


def with_mtp(config: Config, model: Architecture) -> Architecture:
    """Return the model with as many multi-token-prediction layers of its last kind as the file names."""
    number = config.predictions()
    return replace(model, mtp=(model.layers[-1],) * number)


def ernie4_5_moe(config: Config) -> Architecture:
    """Return Ernie 4.5: MoE layers from one layer to another, router biases that are parameters."""
    bias, number = config.flag("use_bias"), config.layers()
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    experts = replace(parts.moe(config, shared_count=True), router_bias=True)
    if experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, bias=bias))
    first = config.count("moe_layer_start_index")
    to_the_end = config.raw.get("moe_layer_end_index", -1) == -1
    last = number - 1 if to_the_end else config.count("moe_layer_end_index")
    step = config.size("moe_layer_interval", default=1)
    sparse = [(i + 1) % step == 0 and first <= i <= last for i in range(number)]
    return replace(_some_dense(config, core, experts, sparse, bias), head_bias=bias)


def ernie4_5_vl_moe(config: Config) -> Architecture:
    """Return Ernie 4.5 VL's language model: experts of text, and experts of images that no token of text visits.

    Source: transformers 5.23.0 models/ernie4_5_vl_moe, Ernie4_5_VLMoeMoeBlock.
    """
    bias, number = config.flag("use_bias"), config.layers()
    widths = config.indices("moe_intermediate_size") or []
    two = len(widths) == 2 and min(widths) > 0
    rule = "must list two widths, of the experts of text and of images"
    config.expect(two, "moe_intermediate_size", rule, "write such as [1536, 512]")
    text, image = widths if two else (1, 1)
    act = parts.activation(config)
    shared = MLP(ffn=text * config.count("num_shared_experts"), bias=bias, activation=act)
    experts = MoE(
        experts=config.size("num_experts"),
        top_k=config.size("experts_per_token"),
        ffn=text,
        activation=act,
        router_bias=True,
        normalised=bool(config.facts.normalised),
        float_router=config.facts.float_router,
        shared=shared if shared.ffn else None,
    )
    of_images = Block(mixers=(), feed_forward=replace(experts, ffn=image, shared=None), norms=0)
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    words = config.sequence("mlp_layer_types", number) or ["dense", *["sparse"] * (number - 1)]
    dense = parts.mlp(config, bias=bias) if "dense" in words else experts
    config.note("experts of images are held and do not run: the language model alone has no image to route")
    made = {
        "dense": Block(mixers=(core,), feed_forward=dense),
        "sparse": Block(mixers=(core,), feed_forward=experts, idle=(of_images,)),
    }
    config.expect(set(words) <= set(made), "mlp_layer_types", "must be dense or sparse for each layer", "list those")
    config.accept("ffn", "mlp_bias")
    return parts.language_model(config, tuple(made.get(word, made["dense"]) for word in words))


def hunyuan_v1_moe(config: Config) -> Architecture:
    """Return Hunyuan-A13B: a norm for each head, one shared expert of the expert width."""
    bias = config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    experts = parts.moe(config, only="intermediate_size")
    config.accept("expert_ffn")
    return _uniform(config, core, replace(experts, shared=MLP(ffn=experts.ffn, activation=experts.activation)))


def llama4(config: Config) -> Architecture:
    """Return Llama 4: chunked attention on three layers of four, MoE every `interleave_moe_layer_step` layers."""
    bias, number = config.flag("attention_bias"), config.layers()
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    if config.flag("use_qk_norm", default=True):
        core = replace(core, qk_norm="head", qk_norm_kind="rmsnorm-no-weight")
    experts = parts.moe(config, "intermediate_size")
    experts = replace(experts, shared=MLP(ffn=experts.ffn, activation=experts.activation), all_tokens=True)
    listed, step = config.indices("moe_layers"), config.size("interleave_moe_layer_step", default=1)
    sparse = [i in listed if listed is not None else (i + 1) % step == 0 for i in range(number)]
    dense: FeedForward = experts
    if not all(sparse):
        dense = MLP(ffn=config.size_of("ffn", "intermediate_size_mlp"), activation=experts.activation)
    config.accept("intermediate_size_mlp")
    chunk = config.count("attention_chunk")
    kinds = parts.windows(config, number, ("chunked", "chunked", "chunked", "full"))
    pairs = list(zip(sparse, kinds, strict=True))
    made = {
        (s, k): Block(
            mixers=(replace(core, chunk=chunk) if k == "chunked" else core,), feed_forward=experts if s else dense
        )
        for s, k in dict.fromkeys(pairs)
    }
    return parts.language_model(config, tuple(made[pair] for pair in pairs))


def aria_text(config: Config) -> Architecture:
    """Return Aria's language model: Llama with shared experts beside routed ones, all of `intermediate_size`."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    experts = parts.moe(config, "intermediate_size", shared_count=True)
    if experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, bias=mlp_bias))
    return _uniform(config, core, experts)


def dbrx(config: Config) -> Architecture:
    """Return DBRX: bias-free LayerNorm, sizes in `attn_config` and `ffn_config`."""
    attention, ffn = config.section("attn_config"), config.section("ffn_config")
    heads = config.size("num_attention_heads")
    core = Attention(
        heads=heads,
        kv_heads=attention.size("num_key_value_heads", default=heads),
        head_dim=parts.head_dim(config, heads),
        fused_projection=config.facts.fused_qkv,
    )
    experts = MoE(
        experts=ffn.size("num_experts"),
        top_k=ffn.size("experts_per_token"),
        ffn=ffn.size("expert_ffn", "ffn_hidden_size"),
    )
    return _uniform(config, core, experts, norm="layernorm-no-bias")


ROWS: dict[str, FamilyRow] = {
    "mixtral": FamilyRow(mixtral, ClassFacts(normalised=True, float_weights=True)),
    "minimax_m2": FamilyRow(minimax_m2, ClassFacts(normalised=True, float_weights=True, joined_rotary=True)),
    "olmoe": FamilyRow(olmoe),
    "flex_olmo": FamilyRow(olmoe, ClassFacts(norm="rmsnorm-float")),
    "phimoe": FamilyRow(phimoe, ClassFacts(normalised=False)),
    "gpt_oss": FamilyRow(gpt_oss, ClassFacts(normalised=False, chosen_softmax=True, norm="rmsnorm-float")),
    "granitemoe": FamilyRow(granitemoe, ClassFacts(normalised=False, chosen_softmax=True)),
    "granitemoeshared": FamilyRow(granitemoe, ClassFacts(normalised=False, chosen_softmax=True)),
    "qwen2_moe": FamilyRow(qwen2_moe),
    "qwen3_moe": FamilyRow(qwen3_moe),
    "glm4_moe": FamilyRow(glm4_moe, ClassFacts(float_weights=True, float_router=True, joined_rotary=True)),
    "dots1": FamilyRow(glm4_moe, ClassFacts(float_weights=True, float_router=True)),
    "hy_v3": FamilyRow(hy_v3, ClassFacts(normalised=True, float_weights=True, float_router=True)),
    "solar_open": FamilyRow(solar_open, ClassFacts(float_weights=True, float_router=True)),
    "ernie4_5_moe": FamilyRow(ernie4_5_moe, ClassFacts(normalised=True, float_router=True)),
    "hunyuan_v1_moe": FamilyRow(hunyuan_v1_moe, ClassFacts(normalised=True, float_weights=True, float_router=True)),
    "llama4_text": FamilyRow(llama4, ClassFacts(normalised=False)),
    "dbrx": FamilyRow(dbrx, ClassFacts(normalised=True, fused_qkv=True)),
    "ernie4_5_vl_moe_text": FamilyRow(ernie4_5_vl_moe, ClassFacts(normalised=True, float_router=True)),
    "aria_text": FamilyRow(aria_text, ClassFacts(normalised=False)),
}
