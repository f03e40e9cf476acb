"""Experts on grouped-query attention: Mixtral, Qwen, OLMoE, gpt-oss, GLM, Ernie, Llama 4, Trinity, MiMo and others.

Source: the model classes of transformers 5.23.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._mixers import Attention, NormKind
from shardwise.models._model import MLP, Block, FeedForward, Model, MoE
from shardwise.models.families import _parts as parts


def _windowed(core: Attention, kind: str, window: int) -> Attention:
    return replace(core, window=window) if kind == "sliding" else core


def _uniform(c: Config, core: Attention, experts: MoE, norm: NormKind = "rmsnorm") -> Model:
    """Every layer a mixture."""
    block = Block(mixers=(core,), feed_forward=experts, norm=norm)
    return parts.language_model(c, (block,) * c.layers(), norm=norm)


def dense_beside(c: Config, experts: MoE, sparse: Sequence[bool]) -> FeedForward:
    """Return the feed-forward of the dense layers; a model without any has no use for its width."""
    if not all(sparse):
        return parts.mlp(c)
    c.accept("ffn")
    return experts


def _some_dense(c: Config, core: Attention, experts: MoE, sparse: list[bool], bias: bool = False) -> Model:
    """Mixture layers where `sparse`, dense ones elsewhere."""
    dense = dense_beside(c, experts, sparse)
    if bias and isinstance(dense, MLP):
        dense = replace(dense, bias=True)
    blocks = {s: Block(mixers=(core,), feed_forward=experts if s else dense) for s in (True, False)}
    return parts.language_model(c, tuple(blocks[s] for s in sparse))


def mixtral(c: Config) -> Model:
    """Return Mixtral: experts of `intermediate_size`."""
    window = c.count("window")
    return _uniform(c, replace(parts.attention(c), window=window), parts.moe(c, "intermediate_size"))


def minimax_m2(c: Config) -> Model:
    """Return MiniMax-M2: norms over whole projections, a correction bias in the router."""
    core = replace(parts.attention(c), qk_norm="full" if c.flag("use_qk_norm", default=True) else "none")
    experts = replace(parts.moe(c, "intermediate_size"), correction_bias=True)
    c.accept("shared_expert_ffn", "qk_norm_type", "attn_type_list", "use_mtp")
    if c.predictions():
        c.note("multi-token-prediction modules of MiniMax-M2 are not counted: their layers are not in the file")
    return _uniform(c, core, experts)


def olmoe(c: Config) -> Model:
    """Return OLMoE or FlexOlmo: norms over whole projections."""
    bias = c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), qk_norm="full")
    return _uniform(c, core, parts.moe(c, "intermediate_size"))


def phimoe(c: Config) -> Model:
    """Return Phi-3.5-MoE: LayerNorm, biases by `attention_bias` and `lm_head_bias`."""
    bias = c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), window=c.count("window"))
    model = _uniform(c, core, parts.moe(c, "intermediate_size"), norm="layernorm")
    return replace(model, head_bias=c.flag("lm_head_bias"))


def gpt_oss(c: Config) -> Model:
    """Return gpt-oss: biases everywhere, a sink for each head, every other layer windowed."""
    bias, number = c.flag("attention_bias", default=True), c.layers()
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), sinks=True)
    experts = replace(parts.moe(c, "intermediate_size"), bias=True, router_bias=True, clamped=True)
    window = c.size("window")
    kinds = parts.windows(c, number, ("sliding", "full"))
    layers = parts.build(kinds, lambda k: Block(mixers=(_windowed(core, k, window),), feed_forward=experts))
    return parts.language_model(c, layers)


def granitemoe(c: Config) -> Model:
    """Return GraniteMoe, with a shared expert where the file has one."""
    bias = c.flag("attention_bias")
    experts, shared = parts.moe(c, "intermediate_size"), 0
    if c.model_type == "granitemoeshared":
        shared = c.count("shared_expert_ffn")
    if shared:
        experts = replace(experts, shared=MLP(ffn=shared, activation=experts.activation))
    return _uniform(c, parts.attention(c, qkv_bias=bias, out_bias=bias), experts)


def qwen_sparse(c: Config, number: int) -> list[bool]:
    """Return which layers are mixtures: every `decoder_sparse_step`-th, except `mlp_only_layers`."""
    step, dense = c.size("decoder_sparse_step", default=1), c.indices("mlp_only_layers") or []
    return [i not in dense and (i + 1) % step == 0 for i in range(number)]


def qwen_shared(c: Config, experts: MoE) -> MoE:
    """Return the mixture with Qwen's gated shared expert."""
    width = c.count("shared_expert_ffn")
    shared = MLP(ffn=width, activation=experts.activation) if width else None
    return replace(experts, shared=shared, shared_gate=shared is not None)


def qwen2_moe(c: Config) -> Model:
    """Return Qwen2-MoE: QKV bias, a gated shared expert, windows above `max_window_layers` when switched on."""
    core = parts.attention(c, qkv_bias=c.flag("qkv_bias", default=True))
    experts = qwen_shared(c, parts.moe(c))
    return _qwen(c, core, experts)


def qwen3_moe(c: Config) -> Model:
    """Return Qwen3-MoE: a norm for each head, no shared expert."""
    bias = c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), qk_norm="head")
    none = c.count("shared_expert_ffn") == 0
    c.expect(none, "shared_expert_ffn", "must be 0: the family has no shared expert", "leave it out")
    c.accept("use_qk_norm")
    return _qwen(c, core, parts.moe(c))


def _qwen(c: Config, core: Attention, experts: MoE) -> Model:
    number = c.layers()
    sparse = qwen_sparse(c, number)
    kinds = parts.windows(c, number, ("full",))
    on = c.flag("use_sliding_window")
    window = c.count("window") if on else 0
    if not on:
        c.accept("window", "max_window_layers")
    if window and not c.has("layer_types"):
        first = c.count("max_window_layers")
        kinds = ["sliding" if i >= first else "full" for i in range(number)]
    dense = dense_beside(c, experts, sparse)
    made = {
        (s, k): Block(mixers=(_windowed(core, k, window),), feed_forward=experts if s else dense)
        for s, k in dict.fromkeys(zip(sparse, kinds, strict=True))
    }
    return parts.language_model(c, tuple(made[pair] for pair in zip(sparse, kinds, strict=True)))


def glm4_moe(c: Config) -> Model:
    """Return GLM-4.5 or dots1: shared experts, leading dense layers, a correction bias, multi-token layers."""
    bias, number = c.flag("attention_bias"), c.layers()
    dots = c.model_type == "dots1"
    core = parts.attention(c, qkv_bias=bias, out_bias=bias and dots)
    if dots or c.flag("use_qk_norm"):
        core = replace(core, qk_norm="head")
    experts = replace(parts.moe(c, shared_count=True), correction_bias=True)
    first = c.count("first_dense_layers")
    model = _some_dense(c, core, experts, [i >= first for i in range(number)])
    return with_mtp(c, model)


def solar_open(c: Config) -> Model:
    """Return Solar-Open: every layer a mixture with a shared expert."""
    bias = c.flag("attention_bias")
    experts = replace(parts.moe(c, shared_count=True), correction_bias=True)
    return _uniform(c, parts.attention(c, qkv_bias=bias), experts)


def with_mtp(c: Config, model: Model) -> Model:
    """Return the model with as many multi-token-prediction layers of its last kind as the file names."""
    number = c.predictions()
    return replace(model, mtp=(model.layers[-1],) * number)


def ernie4_5_moe(c: Config) -> Model:
    """Return Ernie 4.5: mixtures from one layer to another, router biases that are parameters."""
    bias, number = c.flag("use_bias"), c.layers()
    core = parts.attention(c, qkv_bias=bias, out_bias=bias)
    experts = replace(parts.moe(c, shared_count=True), router_bias=True)
    if experts.shared is not None:
        experts = replace(experts, shared=replace(experts.shared, bias=bias))
    first = c.count("moe_layer_start_index")
    to_the_end = c.raw.get("moe_layer_end_index", -1) == -1
    last = number - 1 if to_the_end else c.count("moe_layer_end_index")
    step = c.size("moe_layer_interval", default=1)
    sparse = [(i + 1) % step == 0 and first <= i <= last for i in range(number)]
    return replace(_some_dense(c, core, experts, sparse, bias), head_bias=bias)


def hunyuan_v1_moe(c: Config) -> Model:
    """Return Hunyuan-A13B: a norm for each head, one shared expert of the expert width."""
    bias = c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=bias), qk_norm="head")
    experts = parts.moe(c, only="intermediate_size")
    c.accept("expert_ffn")
    return _uniform(c, core, replace(experts, shared=MLP(ffn=experts.ffn, activation=experts.activation)))


def llama4(c: Config) -> Model:
    """Return Llama 4: chunked attention on three layers of four, mixtures every `interleave_moe_layer_step` layers."""
    bias, number = c.flag("attention_bias"), c.layers()
    core = parts.attention(c, qkv_bias=bias, out_bias=bias)
    if c.flag("use_qk_norm", default=True):
        core = replace(core, qk_norm="head", qk_norm_kind="rmsnorm-no-weight")
    experts = parts.moe(c, "intermediate_size")
    experts = replace(experts, shared=MLP(ffn=experts.ffn, activation=experts.activation))
    listed, step = c.indices("moe_layers"), c.size("interleave_moe_layer_step", default=1)
    sparse = [i in listed if listed is not None else (i + 1) % step == 0 for i in range(number)]
    dense: FeedForward = experts
    if not all(sparse):
        dense = MLP(ffn=c.size_of("ffn", "intermediate_size_mlp"), activation=experts.activation)
    c.accept("intermediate_size_mlp")
    chunk = c.count("attention_chunk")
    kinds = parts.windows(c, number, ("chunked", "chunked", "chunked", "full"))
    pairs = list(zip(sparse, kinds, strict=True))
    made = {
        (s, k): Block(
            mixers=(replace(core, chunk=chunk) if k == "chunked" else core,), feed_forward=experts if s else dense
        )
        for s, k in dict.fromkeys(pairs)
    }
    return parts.language_model(c, tuple(made[pair] for pair in pairs))


def aria_text(c: Config) -> Model:
    """Return Aria's language model: Llama with shared experts beside routed ones, all of `intermediate_size`."""
    bias = c.flag("attention_bias")
    core = parts.attention(c, qkv_bias=bias, out_bias=bias)
    return _uniform(c, core, parts.moe(c, "intermediate_size", shared_count=True))


def dbrx(c: Config) -> Model:
    """Return DBRX: bias-free LayerNorm, sizes in `attn_config` and `ffn_config`."""
    attention, ffn = c.section("attn_config"), c.section("ffn_config")
    heads = c.size("num_attention_heads")
    core = Attention(
        heads=heads,
        kv_heads=attention.size("num_key_value_heads", default=heads),
        head_dim=parts.head_dim(c, heads),
        fused_projection=c.facts.fused_qkv,
    )
    experts = MoE(
        experts=ffn.size("num_experts"),
        top_k=ffn.size("experts_per_token"),
        ffn=ffn.size("expert_ffn", "ffn_hidden_size"),
    )
    return _uniform(c, core, experts, norm="layernorm-no-bias")


def _assemble(
    c: Config, kinds: list[str], sparse: list[bool], cores: dict[str, Attention], experts: MoE, norms: int = 2
) -> Model:
    """Return the model whose layers take their attention by kind and their feed-forward by whether they are sparse."""
    dense: FeedForward = experts if all(sparse) else parts.mlp(c)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(cores.get(k, cores["full"]),), feed_forward=experts if s else dense, norms=norms)
        for k, s in dict.fromkeys(pairs)
    }
    return parts.language_model(c, tuple(made[pair] for pair in pairs))


def afmoe(c: Config) -> Model:
    """Return AFMoE: a gate on every attention output, four norms, router biases that are parameters."""
    number, window = c.layers(), c.size("window")
    c.expect(not c.flag("attention_bias"), "attention_bias", "is not supported for afmoe", "leave it out")
    core = replace(parts.attention(c), qk_norm="head", output_gate=True)
    period = c.repeats("global_attn_every_n_layers", default=4) or 1
    kinds = parts.windows(c, number, ("sliding",) * (period - 1) + ("full",))
    experts = replace(parts.moe(c, shared_count=True), router_bias=True)
    first = c.count("first_dense_layers")
    sparse = [i >= first for i in range(number)]
    return _assemble(c, kinds, sparse, {"full": core, "sliding": replace(core, window=window)}, experts, norms=4)


def mimo_v2_flash(c: Config) -> Model:
    """Return MiMo-V2-Flash: windowed layers have twice the key-value heads, and sinks."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias), v_head_dim=c.size("v_head_dim"))
    kv = c.size("swa_num_key_value_heads", default=2 * core.kv_heads)
    c.expect(core.heads % kv == 0, "num_key_value_heads", f"doubled must divide {core.heads} heads", "use fewer")
    local = replace(core, kv_heads=kv, sinks=True, window=c.count("sliding_window_size") or c.size("window"))
    given = c.sequence("hybrid_layer_pattern", number, int)
    kinds = ["sliding" if swa else "full" for swa in given]
    kinds = kinds or parts.windows(c, number, _mimo_pattern(number))
    experts = replace(parts.moe(c), correction_bias=True)
    c.accept("window", "num_shared_experts", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
    return _assemble(c, kinds, _mimo_sparse(c, number), {"full": core, "sliding": local}, experts)


def _mimo_pattern(number: int) -> tuple[str, ...]:
    return tuple("full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(number))


def _mimo_sparse(c: Config, number: int) -> list[bool]:
    words, numbers = c.sequence("mlp_layer_types", number), c.sequence("moe_layer_freq", number, int)
    if words:
        return [word == "sparse" for word in words]
    return [bool(n) for n in numbers] or [i > 0 for i in range(number)]


def step3p5(c: Config) -> Model:
    """Return Step-3.5: a gate for each head, more heads in windowed layers, a shared expert."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(
        parts.attention(c, qkv_bias=bias, out_bias=bias),
        qk_norm="head",
        qk_norm_kind="rmsnorm-offset",
        head_gate=c.flag("gating", default=True),
    )
    heads = c.count("num_sliding_attention_heads") or core.heads
    local = replace(core, heads=heads, window=c.count("window"))
    kinds = parts.windows(c, number, ("full",))
    words = c.sequence("mlp_layer_types", number)
    sparse = [word == "sparse" for word in words] or [i >= 3 for i in range(number)]
    mlp_bias = c.flag("mlp_bias")
    c.expect(not mlp_bias, "mlp_bias", "is not supported for step3p5", "leave it out")
    experts = replace(parts.moe(c), correction_bias=True)
    shared = MLP(ffn=c.size("shared_expert_ffn"), activation=experts.activation)
    model = _assemble(c, kinds, sparse, {"full": core, "sliding": local}, replace(experts, shared=shared))
    c.accept("per_layer_config", "mtp_layer_types", "mtp_mlp_layer_types")
    return with_mtp(c, parts.renormed(model, "rmsnorm-offset"))


ROWS: dict[str, Row] = {
    "mixtral": Row(mixtral, ClassFacts(normalised=True, float_weights=True)),
    "minimax_m2": Row(minimax_m2, ClassFacts(normalised=True, float_weights=True, joined_rotary=True)),
    "olmoe": Row(olmoe),
    "flex_olmo": Row(olmoe),
    "phimoe": Row(phimoe, ClassFacts(normalised=False)),
    "gpt_oss": Row(gpt_oss, ClassFacts(normalised=False)),
    "granitemoe": Row(granitemoe, ClassFacts(normalised=False)),
    "granitemoeshared": Row(granitemoe, ClassFacts(normalised=False)),
    "qwen2_moe": Row(qwen2_moe),
    "qwen3_moe": Row(qwen3_moe),
    "glm4_moe": Row(glm4_moe, ClassFacts(float_weights=True, float_router=True, joined_rotary=True)),
    "dots1": Row(glm4_moe, ClassFacts(float_weights=True, float_router=True)),
    "solar_open": Row(solar_open, ClassFacts(float_weights=True, float_router=True)),
    "ernie4_5_moe": Row(ernie4_5_moe, ClassFacts(normalised=True, float_router=True)),
    "hunyuan_v1_moe": Row(hunyuan_v1_moe, ClassFacts(normalised=True)),
    "llama4_text": Row(llama4, ClassFacts(normalised=False)),
    "dbrx": Row(dbrx, ClassFacts(normalised=True, fused_qkv=True)),
    "aria_text": Row(aria_text, ClassFacts(normalised=False)),
    "afmoe": Row(afmoe, ClassFacts(normalised=True)),
    "mimo_v2_flash": Row(mimo_v2_flash, ClassFacts(float_router=True, joined_rotary=True)),
    "step3p5": Row(step3p5, ClassFacts(normalised=True, joined_rotary=True)),
}
