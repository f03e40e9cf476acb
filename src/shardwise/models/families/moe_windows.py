"""Experts behind attention whose windows alternate.

Trinity, MiMo, Step, K-EXAONE, Command A+, Granite 4.1, Laguna, Flint, Kolibri and Inkling.

Source: the model classes of transformers 5.24.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, MoE, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, NormKind
from shardwise.models._recurrent import StreamConvs
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import with_mtp
from shardwise.records import replace


def assemble(
    config: Config, kinds: list[str], sparse: list[bool], cores: dict[str, Attention], experts: MoE, norms: int = 2
) -> Architecture:
    """Return the model whose layers take their attention by kind and their feed-forward by whether they are sparse."""
    dense: FeedForward = experts if all(sparse) else parts.mlp(config)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(cores.get(k, cores["full"]),), feed_forward=experts if s else dense, norms=norms)
        for k, s in dict.fromkeys(pairs)
    }
    return parts.language_model(config, tuple(made[pair] for pair in pairs))


def afmoe(config: Config) -> Architecture:
    """Return AFMoE: a gate on every attention output, four norms, router biases that are parameters."""
    number, window = config.layers(), config.size("window")
    config.expect(not config.flag("attention_bias"), "attention_bias", "is not supported for afmoe", "leave it out")
    core = replace(parts.attention(config), qk_norm="head", output_gate=True, gate_apart=True)
    period = config.period("global_attn_every_n_layers", 4)
    kinds = parts.windows(config, number, ("sliding",) * (period - 1) + ("full",))
    experts = replace(parts.moe(config, shared_count=True), router_bias=True)
    first = config.count("first_dense_layers")
    sparse = [i >= first for i in range(number)]
    return assemble(config, kinds, sparse, {"full": core, "sliding": replace(core, window=window)}, experts, norms=4)


def mimo_v2_flash(config: Config) -> Architecture:
    """Return MiMo-V2-Flash: windowed layers have twice the key-value heads, and sinks."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias), v_head_dim=config.size("v_head_dim"))
    kv = config.size("swa_num_key_value_heads", default=2 * core.kv_heads)
    config.expect(core.heads % kv == 0, "num_key_value_heads", f"doubled must divide {core.heads} heads", "use fewer")
    local = replace(core, kv_heads=kv, sinks=True, window=config.count("sliding_window_size") or config.size("window"))
    given = config.sequence("hybrid_layer_pattern", number, int)
    kinds = ["sliding" if swa else "full" for swa in given]
    kinds = kinds or parts.windows(config, number, _mimo_pattern(number))
    experts = replace(parts.moe(config), correction_bias=True)
    config.accept("window", "num_shared_experts", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
    return assemble(config, kinds, _mimo_sparse(config, number), {"full": core, "sliding": local}, experts)


def _mimo_pattern(number: int) -> tuple[str, ...]:
    return tuple("full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(number))


def _mimo_sparse(config: Config, number: int) -> list[bool]:
    words, numbers = config.sequence("mlp_layer_types", number), config.sequence("moe_layer_freq", number, int)
    if words:
        return [word == "sparse" for word in words]
    return [bool(n) for n in numbers] or [i > 0 for i in range(number)]


def step3p5(config: Config) -> Architecture:
    """Return Step-3.5: a gate for each head, more heads in windowed layers, a shared expert."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(
        parts.attention(config, qkv_bias=bias, out_bias=bias),
        qk_norm="head",
        qk_norm_kind="rmsnorm-offset",
        head_gate=config.flag("gating", default=True),
    )
    heads = config.count("num_sliding_attention_heads") or core.heads
    local = replace(core, heads=heads, window=config.count("window"))
    kinds = parts.windows(config, number, ("full",))
    words = config.sequence("mlp_layer_types", number)
    sparse = [word == "sparse" for word in words] or [i >= 3 for i in range(number)]
    mlp_bias = config.flag("mlp_bias")
    config.expect(not mlp_bias, "mlp_bias", "is not supported for step3p5", "leave it out")
    experts = replace(parts.moe(config), correction_bias=True)
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=experts.activation)
    model = assemble(config, kinds, sparse, {"full": core, "sliding": local}, replace(experts, shared=shared))
    config.accept("per_layer_config", "mtp_layer_types", "mtp_mlp_layer_types")
    return with_mtp(config, parts.renormed(model, "rmsnorm-offset"))


def exaone_moe(config: Config) -> Architecture:
    """Return K-EXAONE: a norm for each head, a shared expert, a leading dense layer, three windows of four layers."""
    number = config.layers()
    core = replace(parts.attention(config), qk_norm="head")
    local = replace(core, window=config.count("window"))
    kinds = parts.windows(config, number, parts.window_pattern(config, parts.THREE_OF_FOUR))
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    sparse = _sparse(config, number, config.count("first_dense_layers", default=1))
    return with_mtp(config, assemble(config, kinds, sparse, {"full": core, "sliding": local}, experts))


def mellum(config: Config) -> Architecture:
    """Return Mellum 2: Qwen3-MoE whose layers list their attention and their feed-forward."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    cores = {"full": core, "sliding": replace(core, window=config.count("window"))}
    config.accept("mtp_layer_types", "mtp_mlp_layer_types")
    model = assemble(config, parts.windows(config, number), _sparse(config, number, 0), cores, parts.moe(config))
    return with_mtp(config, model)


def granitemoe_swa(config: Config) -> Architecture:
    """Return Granite's mixture with windows: a sink for each head, every fourth layer full, from the first on."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), sinks=True)
    experts, width = parts.moe(config, "intermediate_size"), config.count("shared_expert_ffn")
    if width:
        experts = replace(experts, shared=MLP(ffn=width, activation=experts.activation, fused_projection=True))
    kinds = parts.windows(config, number, ("full", "sliding", "sliding", "sliding"))
    config.accept("layer_rope_theta")
    cores = {"full": core, "sliding": replace(core, window=config.count("window"))}
    return assemble(config, kinds, [True] * number, cores, experts)


def cohere2_moe(config: Config) -> Architecture:
    """Return Cohere's mixture: one norm before attention and experts side by side, dense layers in front.

    The dense ones have a width and a pattern of windows of their own. Experts that a softmax chooses have weights that
    sum to one as they are.
    """
    number, bias, first = config.layers(), config.flag("attention_bias"), config.count("first_dense_layers", default=0)
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    local = replace(core, window=config.count("window"))
    ahead, period = config.period("prefix_dense_sliding_window_pattern", 1), config.period("sliding_window_pattern", 4)
    pattern = ["full" if (i + 1) % ahead == 0 else "sliding" for i in range(first)]
    pattern += ["full" if (i + 1) % period == 0 else "sliding" for i in range(max(number - first, 0))]
    kinds = parts.windows(config, number, pattern)
    experts = parts.moe(config, "intermediate_size", shared_count=True)
    experts = replace(experts, normalised=experts.normalised and config.text("expert_selection_fn") == "sigmoid")
    config.accept("shared_expert_combination_strategy")
    sparse = _sparse(config, number, first)
    width = config.count("prefix_dense_intermediate_size", default=0) or experts.ffn
    dense = MLP(ffn=width, activation=experts.activation)
    norm: NormKind = "rmsnorm" if config.has("rms_norm_eps") else "layernorm-float"
    made = {
        (k, s): Block(
            mixers=(local if k == "sliding" else core,),
            feed_forward=experts if s else dense,
            norm=norm,
            norms=1,
            parallel=True,
        )
        for k, s in dict.fromkeys(zip(kinds, sparse, strict=True))
    }
    layers = tuple(made[pair] for pair in zip(kinds, sparse, strict=True))
    return parts.language_model(config, layers, norm=norm)


def laguna(config: Config) -> Architecture:
    """Return Laguna: a gate for each head or each element, heads that differ by layer, a shared expert."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head")
    word = config.text("gating") if isinstance(config.raw.get("gating"), str) else ""
    each_head = word == "per-head" or (not word and config.flag("gating", default=True))
    core = replace(core, head_gate=each_head, output_gate=not each_head, gate_apart=not each_head)
    heads = config.sequence("num_attention_heads_per_layer", number, int) or [core.heads] * number
    fair = all(one > 0 and one % core.kv_heads == 0 for one in heads)
    rule = f"must be multiples of the {core.kv_heads} key-value heads"
    config.expect(fair, "num_attention_heads_per_layer", rule, "list such numbers")
    experts = replace(parts.moe(config), router_bias=True)
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=experts.activation)
    experts, window = replace(experts, shared=shared), config.count("window")
    sparse, dense = _sparse(config, number, 1), parts.mlp(config)

    def block(kind: str, is_sparse: bool, number_of_heads: int) -> Block:
        mixer = replace(core, heads=number_of_heads, window=window if kind == "sliding" else 0)
        return Block(mixers=(mixer,), feed_forward=experts if is_sparse else dense)

    layers = list(zip(parts.windows(config, number), sparse, heads, strict=True))
    made = {layer: block(*layer) for layer in dict.fromkeys(layers)}
    return parts.language_model(config, tuple(made[layer] for layer in layers))


def flint(config: Config) -> Architecture:
    """Return Flint: sinks, rotary positions in windowed layers alone, one shared expert without a gate."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head", sinks=True)
    cores = {"full": replace(core, rotary=False), "sliding": replace(core, window=config.size("window"))}
    last = number - 1
    kinds = parts.windows(
        config, number, ["full" if i in (0, last) or i % 4 == 1 else "sliding" for i in range(number)]
    )
    experts = parts.moe(config)
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=experts.activation)
    dense = config.indices("mlp_only_layers")
    step, dense = config.size("decoder_sparse_step", default=1), [0, 1] if dense is None else dense
    sparse = [i not in dense and (i + 1) % step == 0 for i in range(number)]
    return assemble(config, kinds, sparse, cores, replace(experts, shared=shared))


def kolibri1(config: Config) -> Architecture:
    """Return Kolibri 1: four norms a layer, rotary positions in windowed layers alone, experts throughout."""
    number = config.layers()
    core = replace(parts.attention(config), qk_norm="head")
    cores = {"full": replace(core, rotary=False), "sliding": replace(core, window=config.size("window"))}
    kinds = parts.windows(config, number, ("sliding",) * 4 + ("full",))
    experts = replace(parts.moe(config), correction_bias=True)
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=experts.activation)
    config.accept("ffn")
    return assemble(config, kinds, [True] * number, cores, replace(experts, shared=shared), norms=4)


def inkling(config: Config) -> Architecture:
    """Return Inkling: biases of relative positions, short convolutions around attention, shared experts in the router.

    A row of `d_rel` values of each head weighs profiles of bias over distance, which are among a layer's vectors, as
    the router's rows of shared experts and the scales of feed-forwards are. Released files call the experts' width
    `intermediate_size`, where they have one of dense layers.
    """
    number, hidden, rel = config.layers(), config.size("hidden_size"), config.size("d_rel")
    core = replace(parts.attention(config), qk_norm="head", rotary=False)
    width, window = config.size("sconv_kernel_size", "conv_kernel_size"), config.size("sliding_window_size", "window")
    local = replace(
        core, heads=config.size("swa_num_attention_heads"), kv_heads=config.size("swa_num_key_value_heads"),
        head_dim=config.size("swa_head_dim"), window=window,
    )  # fmt: skip
    released = config.has("dense_intermediate_size")
    experts = replace(
        parts.moe(config, shared_count=True, only="intermediate_size" if released else "moe_intermediate_size"),
        correction_bias=True,
    )
    dense = MLP(ffn=config.size("dense_intermediate_size" if released else "intermediate_size"))
    first = config.count("dense_mlp_idx", default=0)
    kinds, sparse = _inkling_kinds(config, number), _sparse(config, number, first)
    ranked, extent = config.count("num_shared_experts") * hidden, config.size("rel_extent")
    config.accept("shared_expert_sink", "ffn", "expert_ffn", "unpadded_vocab_size", *_INKLING)

    def block(kind: str, is_sparse: bool) -> Block:
        mixer = local if kind == "sliding" else core
        convs = StreamConvs(kv_heads=mixer.kv_heads, head_dim=mixer.head_dim, width=hidden, conv=width)
        biases = Projection(name="relative", inputs=hidden, outputs=mixer.heads * rel)
        vectors = rel * (mixer.window or extent) + 1 + (ranked if is_sparse else 0)
        ffn = experts if is_sparse else dense
        return Block(mixers=(mixer, convs), feed_forward=ffn, extras=(biases,), extra_vectors=vectors)

    pairs = list(zip(kinds, sparse, strict=True))
    made = {pair: block(*pair) for pair in dict.fromkeys(pairs)}
    return replace(parts.language_model(config, tuple(made[pair] for pair in pairs)), embedding_norm=True)


_INKLING = (
    *(
        "log_scaling_n_floor",
        "log_scaling_alpha",
        "logits_mup_width_multiplier",
        "rms_norm_eps_moe_gate",
        "route_scale",
    ),
    *(
        "use_sconv",
        "use_embed_norm",
        "use_gate_bias",
        "use_global_scale",
        "norm_after_topk",
        "gate_activation",
        "q_bias",
    ),
    *("o_bias", "final_logit_softcapping", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
    *("num_mtp_layers", "number_of_conv_states", "window"),
)


def _inkling_kinds(config: Config, number: int) -> list[str]:
    """Which layers have windows: by the words of the class, the numbers of released files, or five of six."""
    words, numbers = config.sequence("layer_types", number), config.indices("local_layer_ids")
    if words:
        known = set(words) <= {"hybrid", "hybrid_sliding"}
        config.expect(known, "layer_types", "must be hybrid or hybrid_sliding for each layer", "list those")
        return ["sliding" if word == "hybrid_sliding" else "full" for word in words]
    numbers = [i for i in range(number) if (i + 1) % 6] if numbers is None else numbers
    return ["sliding" if i in numbers else "full" for i in range(number)]


def _sparse(config: Config, number: int, first: int) -> list[bool]:
    """Which layers are MoE: those that `mlp_layer_types` calls so, or all from the `first` on."""
    words = config.sequence("mlp_layer_types", number)
    return [word == "sparse" for word in words] or [i >= first for i in range(number)]


ROWS: dict[str, FamilyRow] = {
    "afmoe": FamilyRow(afmoe, ClassFacts(normalised=True, float_weights=True, norm="rmsnorm-float")),
    "mimo_v2_flash": FamilyRow(mimo_v2_flash, ClassFacts(float_router=True, joined_rotary=True)),
    "step3p5": FamilyRow(step3p5, ClassFacts(normalised=True, joined_rotary=True)),
    "exaone_moe": FamilyRow(exaone_moe, ClassFacts(float_weights=True, float_router=True)),
    "mellum": FamilyRow(mellum),
    "granitemoe_swa": FamilyRow(granitemoe_swa, ClassFacts(normalised=False)),
    "cohere2_moe": FamilyRow(cohere2_moe),
    "flint": FamilyRow(flint, ClassFacts(float_weights=True, float_router=True, norm="rmsnorm-float")),
    "kolibri1": FamilyRow(kolibri1, ClassFacts(float_weights=True, float_router=True)),
    "inkling_text": FamilyRow(inkling, ClassFacts(normalised=True)),
    "laguna": FamilyRow(laguna, ClassFacts(normalised=True, joined_rotary=True)),
}
