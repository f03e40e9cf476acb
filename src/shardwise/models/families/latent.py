"""Latent attention (DeepSeek, Kimi-K2, GLM-5, Mistral 4, LongCat), and the compressed attention of DeepSeek-V4.

Sources: arXiv:2405.04434, arXiv:2412.19437 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, MoE, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import CompressedAttention, Indexer, LatentAttention, Mixer
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import dense_beside, with_mtp
from shardwise.models.families.recurrent import delta_attention
from shardwise.records import replace

_STREAMS = "layers that run again are counted to keep one of the residual streams of hyper-connections"
_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_NO_CORRECTION = ("deepseek_v2", "mistral4")


def deepseek(config: Config) -> Architecture:
    """Return a DeepSeek-style model: leading dense layers, then MoE layers with shared experts."""
    number, core = config.layers(), _attention(config)
    experts = parts.moe(config, shared_count=True)
    experts = replace(experts, correction_bias=config.model_type not in _NO_CORRECTION)
    sparse = _sparse(config, number)
    dense = dense_beside(config, experts, sparse)
    if config.model_type == "deepseek_v2" and config.flag("mlp_bias"):
        dense = replace(dense, bias=True) if isinstance(dense, MLP) else dense
        experts = replace(experts, shared=replace(experts.shared, bias=True) if experts.shared else None)
    pairs = list(zip(_indexed(config, number, core), sparse, strict=True))
    # A.X K1 has one more norm behind its experts.
    behind = config.model_type == "axk1"
    made = {
        (mixer, s): Block(mixers=(mixer,), feed_forward=experts if s else dense, extra_norms=int(s and behind))
        for mixer, s in dict.fromkeys(pairs)
    }
    return with_mtp(config, parts.language_model(config, tuple(made[pair] for pair in pairs)))


def dense_latent(config: Config) -> Architecture:
    """Return MiniCPM3 or Youtu-LLM: latent attention and one dense feed-forward a layer."""
    bias = config.model_type == "minicpm3" and config.flag("mlp_bias")
    config.accept("mlp_bias", "dim_model_base", "scale_emb", "scale_depth")
    block = Block(mixers=(_attention(config),), feed_forward=parts.mlp(config, bias=bias))
    return parts.language_model(config, (block,) * config.layers())


def _attention(config: Config) -> LatentAttention:
    core = parts.latent_attention(config)
    if config.model_type not in _INDEXED:
        return core
    config.accept("layer_types", "indexer_rope_interleave")
    return replace(core, indexer=_indexer(config))


def _indexer(config: Config) -> Indexer:
    return Indexer(
        heads=config.size("index_n_heads"), head_dim=config.size("index_head_dim"), top_k=config.size("index_topk")
    )


def _indexed(config: Config, number: int, core: LatentAttention) -> list[LatentAttention]:
    """The attention of each layer: some of GLM-5's take the selection of an earlier layer."""
    if core.indexer is None:
        return [core] * number
    reuses = replace(core, indexer=replace(core.indexer, shared=True))
    modes = config.sequence("indexer_types", number) or _indexer_schedule(config, number)
    return [reuses if mode == "shared" else core for mode in modes]


def _indexer_schedule(config: Config, number: int) -> list[str]:
    pattern = config.text("index_topk_pattern")
    if pattern:
        return ["shared" if letter == "S" else "full" for letter in (pattern + "F" * number)[:number]]
    every, offset = config.count("index_topk_freq", default=1) or 1, config.count("index_skip_topk_offset", default=2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(number)]


def _sparse(config: Config, number: int) -> list[bool]:
    """Which layers are MoE: `mlp_layer_types`, or all behind `first_k_dense_replace` at `moe_layer_freq`."""
    words = config.sequence("mlp_layer_types", number)
    if not words and config.model_type == "glm4_moe_lite":
        return [i >= config.count("first_dense_layers", default=1) for i in range(number)]
    first, step = config.count("first_dense_layers", default=1), config.size("moe_layer_freq", default=1)
    if words:
        return [word == "sparse" for word in words]
    return [i >= first and i % step == 0 for i in range(number)]


def longcat_flash(config: Config) -> Architecture:
    """Return LongCat-Flash: two attentions and two dense feed-forwards a layer, an MoE beside the first pair."""
    number, core = config.layers(), parts.latent_attention(config)
    router_bias, zero = config.flag("router_bias"), config.count("zero_expert_num")
    dense = parts.mlp(config)
    experts = replace(parts.moe(config), shared=dense, zero_experts=zero, router_bias=router_bias, correction_bias=True)
    config.accept("zero_expert_type")
    second = Block(mixers=(core,), feed_forward=dense)
    block = Block(mixers=(core,), feed_forward=experts, also=(second,))
    return with_mtp(config, parts.language_model(config, (block,) * number))


_BY_RATE = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
_RATES = {"compressed_sparse": 4, "heavily_compressed": 128}


def deepseek_v4(config: Config) -> Architecture:
    """Return DeepSeek-V4."""
    number, streams = config.layers(), config.size("hc_mult")
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True)
    mixes = streams * (2 + streams)
    hyper = _hyper_connections(config, streams, mixes)
    base = _compressed_attention(config)

    def block(kind: str) -> Block:
        mixer = _with_rate(config, base, kind)
        return Block(mixers=(mixer,), feed_forward=experts, extras=hyper, extra_vectors=2 * (mixes + 3))

    config.accept("mlp_layer_types", "num_hash_layers", "num_key_value_heads", "attention_bias")
    config.expect(not config.flag("mlp_bias"), "mlp_bias", "is not supported", "leave it out")
    layers = parts.build(_compressed_kinds(config, number), block)
    return with_mtp(config, _with_streams(config, parts.language_model(config, layers), streams))


def deepseek_v41(config: Config) -> Architecture:
    """Return DeepSeek-V4.1: layers that share the entries and picks of earlier ones, and embeddings of n-grams.

    Source: transformers' main branch of 2026-09 models/deepseek_v41/modeling_deepseek_v41.py. Layers of hashed n-grams
    look up a row of each order and head in a table of their own, from which a map makes a key for each residual stream
    and one value. The three layers that guess tokens (DSpark) have experts of their own.
    """
    number, streams, hidden = config.layers(), config.size("hc_mult"), config.size("hidden_size")
    experts = replace(parts.moe(config, shared_count=True), router_bias=True, correction_bias=True, clamped=True)
    mixes = streams * (2 + streams)
    hyper, base = _hyper_connections(config, streams, mixes), replace(_compressed_attention(config), query_norm=False)
    mixers = _sharing(config, number, base)
    added, elements, lookup = _ngrams(config, number, streams)
    config.accept(*_READ_BY_ENGINES)

    def block(mixer: Mixer, adds: bool, ffn: MoE = experts) -> Block:
        extras, vectors = (*hyper, lookup) if adds else hyper, 2 * streams * hidden if adds else 0
        # A second bias of the router is of tokens of images.
        vectors += 2 * (mixes + 3) + ffn.experts
        return Block(mixers=(mixer,), feed_forward=ffn, extras=extras, extra_vectors=vectors)

    pairs = [(mixer, i in added) for i, mixer in enumerate(mixers)]
    made = {pair: block(*pair) for pair in dict.fromkeys(pairs)}
    model = parts.language_model(config, tuple(made[pair] for pair in pairs))
    config.note(_STREAMS)
    guessing = replace(
        experts,
        experts=config.size("dspark_n_routed_experts", default=experts.experts),
        top_k=config.size("dspark_num_experts_per_tok", default=experts.top_k),
    )
    mtp = (block(base, False, guessing),) * config.predictions()
    return replace(model, extra_embedding=elements, mtp=mtp)


def _ngrams(config: Config, number: int, streams: int) -> tuple[list[int], int, Projection]:
    """The layers that look up n-grams, the elements of their tables, and what maps the rows that a token finds."""
    added, tables = config.indices("engram_layer_ids") or [], config.indices("engram_num_embeddings") or []
    right = len(added) == len(tables) and all(i < number for i in added)
    config.expect(right, "engram_layer_ids", f"must be layers of 0 to {number - 1} with a table each", "list them")
    width, hidden = config.size("engram_head_dim"), config.size("hidden_size")
    rows = config.size("engram_n_heads") * (max(config.size("engram_max_ngram_size"), 2) - 1)
    maps = Projection(name="engram", inputs=rows * width, outputs=hidden * (streams + 1), streams=streams)
    return added, sum(tables) * width, maps


_READ_BY_ENGINES = (
    *("engram_vocab_size", "engram_compressed_vocab_size", "engram_pad_token_id", "candidate_source_layer_id"),
    *("candidate_topk_blocks", "candidate_block_size", "dspark_block_size", "dspark_target_layer_ids", "layer_types"),
    *("dspark_markov_rank", "dspark_noise_token_id", "num_key_value_heads", "attention_bias", "gate_temp"),
)


def _sharing(config: Config, number: int, base: CompressedAttention) -> list[CompressedAttention]:
    """The attention of each layer: windows, sources of entries, layers that pick anew, and those that take both."""
    rates = [*(config.indices("compress_ratios") or []), *[0] * number][:number]
    sources = config.indices("kv_source_layer_ids") or []
    picks = {*(config.indices("index_source_layer_ids") or []), *sources}
    first = next((i for i, rate in enumerate(rates) if rate), number)
    rule = "must begin with the first layer that compresses"
    config.expect(first == number or first in sources, "kv_source_layer_ids", rule, f"begin with {first}")
    own = _indexer(config)
    shared = replace(own, shared=True)
    return [
        replace(base, rate=rate, entries="source" if i in sources else "earlier", indexer=own if i in picks else shared)
        if rate
        else base
        for i, rate in enumerate(rates)
    ]


def _hyper_connections(config: Config, streams: int, mixes: int) -> tuple[Projection, ...]:
    """What mixes the residual streams before and behind attention and the feed-forward of a layer."""
    inputs = streams * config.size("hidden_size")
    return tuple(
        Projection(name=f"hyper_connection_{i}", inputs=inputs, outputs=mixes, linear=False, streams=streams)
        for i in ("attention", "mlp")
    )


def _with_streams(config: Config, model: Architecture, streams: int) -> Architecture:
    """Return the model with the mixer that makes one of all residual streams behind the last layer."""
    gather = Projection(name="hyper_head", inputs=streams * model.hidden, outputs=streams, linear=False)
    config.note(_STREAMS)
    return replace(model, extras=(gather,), extra_vectors=streams + 1)


def hy_v4(config: Config) -> Architecture:
    """Return Hy4: latent attention with an indexer, sinks and a gate on the output, and hyper-connections.

    Source: transformers 5.24.0 models/hy_v4/modeling_hy_v4.py; sinks are among the block's vectors.
    """
    number, streams = config.layers(), config.size("hc_mult")
    core = replace(parts.latent_attention(config), indexer=_indexer(config), output_gate=True)
    clamped = config.number("swiglu_limit", default=0) > 0
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True, clamped=clamped)
    sparse = _sparse(config, number)
    dense = dense_beside(config, experts, sparse)
    shared = replace(core, indexer=replace(_indexer(config), shared=True))
    modes = config.sequence("indexer_types", number) or ["full" if i % 4 == 1 or not i else "" for i in range(number)]
    hyper, vectors = _hyper_connections(config, streams, 2 * streams), core.heads + 2 * (2 * streams + 2)
    config.accept("layer_types", "learnable_sink_init", "hc_magnitude")

    def block(mode: str, is_sparse: bool) -> Block:
        mixer, ffn = core if mode == "full" else shared, experts if is_sparse else dense
        return Block(mixers=(mixer,), feed_forward=ffn, extras=hyper, extra_vectors=vectors)

    pairs = list(zip(modes, sparse, strict=True))
    made = {pair: block(*pair) for pair in dict.fromkeys(pairs)}
    return _with_streams(config, parts.language_model(config, tuple(made[pair] for pair in pairs)), streams)


def glm5_next(config: Config) -> Architecture:
    """Return GLM-5.3: three delta-attention layers to each latent one, whose indexer pools keys, hyper-connections.

    Source: transformers 5.24.0 models/glm5_next/modeling_glm5_next.py; the streams are averaged behind the last layer.
    """
    number, streams = config.layers(), config.size("hc_mult")
    core = parts.latent_attention(config)
    core = replace(core, indexer=replace(_indexer(config), pool=config.size("index_kpool")))
    delta = delta_attention(config)
    experts = replace(parts.moe(config, shared_count=True), correction_bias=True, clamped=True)
    words, first = config.sequence("mlp_layer_types", number), config.count("first_dense_layers", default=3)
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    dense = dense_beside(config, experts, sparse)
    mixes = streams * (2 + streams)
    hyper = _hyper_connections(config, streams, mixes)
    kinds = parts.windows(config, number, ("linear", "linear", "linear", "indexed"))
    known = set(kinds) <= {"linear", "indexed", "full", "deepseek_sparse"}
    config.expect(known, "layer_types", "must be linear_attention or indexed_attention", "list those for each layer")
    picks = _indexed(config, number, core)
    mixers = [delta if kind == "linear" else pick for kind, pick in zip(kinds, picks, strict=True)]
    config.accept("first_dense_layers", "mhc", "mla_use_nope", "index_kpool_compress", "index_kpool_always_select_tail")
    config.accept("index_share_for_mtp_iteration", "linear_lower_bound", "index_topk_freq", "index_skip_topk_offset")

    def block(mixer: Mixer, is_sparse: bool) -> Block:
        ffn, vectors = experts if is_sparse else dense, 2 * (mixes + 3)
        return Block(mixers=(mixer,), feed_forward=ffn, extras=hyper, extra_vectors=vectors)

    pairs = list(zip(mixers, sparse, strict=True))
    made = {pair: block(*pair) for pair in dict.fromkeys(pairs)}
    config.note(_STREAMS)
    model = parts.language_model(config, tuple(made[pair] for pair in pairs))
    # The layer that predicts has an indexer of its own.
    return replace(model, mtp=(block(core, True),) * config.predictions())


def mistral_large4(config: Config) -> Architecture:
    """Return Mistral Large 4: latent attention with an indexer, every fourth layer without rotary positions.

    Heads and the indexer's heads scale their scores by two learned values each, the indexer's queries come of a norm of
    their own, and positions have learned frequencies.
    Source: transformers 5.24.0 models/mistral_large4/modeling_mistral_large4.py.
    """
    number, hidden, indexer = config.layers(), config.size("hidden_size"), _indexer(config)
    core = replace(parts.latent_attention(config), indexer=indexer)
    without = replace(core, qk_nope_head_dim=core.qk_head_dim, qk_rope_head_dim=0)
    period = config.period("no_rope_layer_interval", 4)
    rotates = config.sequence("no_rope_layers", number, int) or [int((i + 1) % period != 0) for i in range(number)]
    own = config.sequence("kv_source_layers", number, int) or list(range(number))
    rule = "shares the latents of another layer, which is not understood"
    config.expect(own == list(range(number)), "kv_source_layers", rule, "describe a model without it")
    experts, sparse = parts.moe(config, shared_count=True), _sparse(config, number)
    dense = dense_beside(config, experts, sparse)
    modes = config.sequence("indexer_types", number) or _indexer_schedule(config, number)
    config.accept("layer_types")

    def block(mode: str, rotated: int, is_sparse: bool) -> Block:
        mixer = core if rotated else without
        if mode == "shared":
            mixer, vectors = replace(mixer, indexer=replace(indexer, shared=True)), 2 * core.heads
        else:
            vectors = 2 * core.heads + 2 * indexer.heads + hidden
        ffn, norms = experts if is_sparse else dense, int(mode != "shared")
        return Block(mixers=(mixer,), feed_forward=ffn, extra_norms=norms, extra_vectors=vectors)

    kinds = list(zip(modes, rotates, sparse, strict=True))
    made = {kind: block(*kind) for kind in dict.fromkeys(kinds)}
    model = parts.language_model(config, tuple(made[kind] for kind in kinds))
    return replace(model, extra_vectors=core.qk_rope_head_dim // 2)


def _compressed_attention(config: Config) -> CompressedAttention:
    heads, groups, width = config.size("num_attention_heads"), config.size("o_groups"), config.size("head_dim")
    config.expect(
        heads * width % groups == 0, "o_groups", f"must divide heads * head_dim = {heads * width}", "use a divisor"
    )
    return CompressedAttention(
        heads=heads,
        head_dim=width,
        q_lora_rank=config.size("q_lora_rank"),
        out_groups=groups,
        out_lora_rank=config.size("o_lora_rank"),
        window=config.size("window"),
        rope_head_dim=config.size("qk_rope_head_dim"),
    )


def _compressed_kinds(config: Config, number: int) -> list[str]:
    """The kind of each layer: `layer_types`, or `compress_ratios`, or the class pattern."""
    if config.has("compress_ratios") and not config.has("layer_types"):
        ratios = config.indices("compress_ratios") or []
        return [_BY_RATE.get(rate, "unknown") for rate in (*ratios, *[0] * number)][:number]
    pattern = ["heavily_compressed", "heavily_compressed"]
    pattern += ["compressed_sparse" if i % 2 else "heavily_compressed" for i in range(max(number - 2, 0))]
    return parts.windows(config, number, pattern[:number])


def _with_rate(config: Config, base: CompressedAttention, kind: str) -> CompressedAttention:
    if kind == "sliding":
        return base
    if kind not in _RATES:
        rule, remedy = "is not a layer of deepseek_v4", f"use sliding, {' or '.join(_RATES)} attention"
        config.problems.add("layer_types", kind, rule, remedy)
        return base
    rate = config.section("compress_rates").size(f"{kind}_attention", default=_RATES[kind])
    if kind == "heavily_compressed":
        return replace(base, rate=rate)
    return replace(base, rate=rate, indexer=_indexer(config))


ROWS: dict[str, FamilyRow] = {
    "deepseek_v2": FamilyRow(deepseek, ClassFacts(normalised=False, float_weights=True, float_router=True)),
    "deepseek_v3": FamilyRow(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "deepseek_v32": FamilyRow(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "glm_moe_dsa": FamilyRow(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "axk1": FamilyRow(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "youtu": FamilyRow(dense_latent),
    "minicpm3": FamilyRow(dense_latent),
    "glm4_moe_lite": FamilyRow(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "mistral4": FamilyRow(deepseek),
    "longcat_flash": FamilyRow(longcat_flash, ClassFacts(normalised=False, float_router=True)),
    "deepseek_v4": FamilyRow(deepseek_v4, ClassFacts(normalised=True, norm="rmsnorm-float")),
    "deepseek_v41_text": FamilyRow(deepseek_v41, ClassFacts(normalised=True, norm="rmsnorm-float")),
    "hy_v4": FamilyRow(hy_v4, ClassFacts(float_weights=True, float_router=True)),
    "glm5_next_text": FamilyRow(glm5_next, ClassFacts(float_weights=True, float_router=True)),
    "mistral_large4_text": FamilyRow(
        mistral_large4, ClassFacts(normalised=True, float_weights=True, float_router=True, joined_rotary=True)
    ),
}
