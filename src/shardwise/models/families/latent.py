"""Latent attention (DeepSeek, Kimi-K2, GLM-5, Mistral 4, LongCat), and the compressed attention of DeepSeek-V4.

Sources: arXiv:2405.04434, arXiv:2412.19437 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._mixers import CompressedAttention, Indexer, LatentAttention
from shardwise.models._model import MLP, Block, Model, Projection
from shardwise.models.families import _parts as parts
from shardwise.models.families.mixture import dense_beside, with_mtp

_INDEXED = ("deepseek_v32", "glm_moe_dsa")
_NO_CORRECTION = ("deepseek_v2", "mistral4")


def deepseek(c: Config) -> Model:
    """Return a DeepSeek-style model: leading dense layers, then mixtures with shared experts."""
    number, core = c.layers(), _attention(c)
    experts = parts.moe(c, shared_count=True)
    experts = replace(experts, correction_bias=c.model_type not in _NO_CORRECTION)
    sparse = _sparse(c, number)
    dense = dense_beside(c, experts, sparse)
    if c.model_type == "deepseek_v2" and c.flag("mlp_bias"):
        dense = replace(dense, bias=True) if isinstance(dense, MLP) else dense
        experts = replace(experts, shared=replace(experts.shared, bias=True) if experts.shared else None)
    pairs = list(zip(_indexed(c, number, core), sparse, strict=True))
    made = {
        (mixer, s): Block(mixers=(mixer,), feed_forward=experts if s else dense) for mixer, s in dict.fromkeys(pairs)
    }
    return with_mtp(c, parts.language_model(c, tuple(made[pair] for pair in pairs)))


def _attention(c: Config) -> LatentAttention:
    core = parts.latent_attention(c)
    if c.model_type not in _INDEXED:
        return core
    c.accept("layer_types", "indexer_rope_interleave")
    indexer = Indexer(heads=c.size("index_n_heads"), head_dim=c.size("index_head_dim"), top_k=c.size("index_topk"))
    return replace(core, indexer=indexer)


def _indexed(c: Config, number: int, core: LatentAttention) -> list[LatentAttention]:
    """The attention of each layer: some of GLM-5's take the selection of an earlier layer."""
    if core.indexer is None:
        return [core] * number
    reuses = replace(core, indexer=replace(core.indexer, shared=True))
    modes = c.sequence("indexer_types", number) or _indexer_schedule(c, number)
    return [reuses if mode == "shared" else core for mode in modes]


def _indexer_schedule(c: Config, number: int) -> list[str]:
    pattern = c.text("index_topk_pattern")
    if pattern:
        return ["shared" if letter == "S" else "full" for letter in (pattern + "F" * number)[:number]]
    every, offset = c.count("index_topk_freq", default=1) or 1, c.count("index_skip_topk_offset", default=2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(number)]


def _sparse(c: Config, number: int) -> list[bool]:
    """Which layers are mixtures: `mlp_layer_types`, or all behind `first_k_dense_replace` at `moe_layer_freq`."""
    words = c.sequence("mlp_layer_types", number)
    if not words and c.model_type == "glm4_moe_lite":
        return [i >= c.count("first_dense_layers", default=1) for i in range(number)]
    first, step = c.count("first_dense_layers"), c.size("moe_layer_freq", default=1)
    if words:
        return [word == "sparse" for word in words]
    return [i >= first and i % step == 0 for i in range(number)]


def longcat_flash(c: Config) -> Model:
    """Return LongCat-Flash: two attentions and two dense feed-forwards a layer, a mixture beside the first pair."""
    number, core = c.layers(), parts.latent_attention(c)
    router_bias, zero = c.flag("router_bias"), c.count("zero_expert_num")
    dense = parts.mlp(c)
    experts = replace(parts.moe(c), shared=dense, zero_experts=zero, router_bias=router_bias, correction_bias=True)
    c.accept("zero_expert_type")
    second = Block(mixers=(core,), feed_forward=dense)
    block = Block(mixers=(core,), feed_forward=experts, also=(second,))
    return with_mtp(c, parts.language_model(c, (block,) * number))


_BY_RATE = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
_RATES = {"compressed_sparse": 4, "heavily_compressed": 128}


def deepseek_v4(c: Config) -> Model:
    """Return DeepSeek-V4."""
    number, hidden, streams = c.layers(), c.size("hidden_size"), c.size("hc_mult")
    experts = replace(parts.moe(c, shared_count=True), correction_bias=True)
    mixes = streams * (2 + streams)
    hyper = tuple(
        Projection(name=f"hyper_connection_{i}", inputs=streams * hidden, outputs=mixes) for i in ("attention", "mlp")
    )
    base = _compressed_attention(c)

    def block(kind: str) -> Block:
        mixer = _with_rate(c, base, kind)
        return Block(mixers=(mixer,), feed_forward=experts, extras=hyper, extra_vectors=2 * (mixes + 3))

    c.accept("mlp_layer_types", "num_hash_layers", "num_key_value_heads", "qk_rope_head_dim", "attention_bias")
    c.expect(not c.flag("mlp_bias"), "mlp_bias", "is not supported", "leave it out")
    layers = parts.build(_compressed_kinds(c, number), block)
    gather = Projection(name="hyper_head", inputs=streams * hidden, outputs=streams)
    model = replace(parts.language_model(c, layers), extras=(gather,), extra_vectors=streams + 1)
    c.note("the streams of hyper-connections are counted as projections, their extra residual traffic is not")
    return with_mtp(c, model)


def _compressed_attention(c: Config) -> CompressedAttention:
    heads, groups, width = c.size("num_attention_heads"), c.size("o_groups"), c.size("head_dim")
    c.expect(
        heads * width % groups == 0, "o_groups", f"must divide heads * head_dim = {heads * width}", "use a divisor"
    )
    return CompressedAttention(
        heads=heads,
        head_dim=width,
        q_lora_rank=c.size("q_lora_rank"),
        out_groups=groups,
        out_lora_rank=c.size("o_lora_rank"),
        window=c.size("window"),
    )


def _compressed_kinds(c: Config, number: int) -> list[str]:
    """The kind of each layer: `layer_types`, or `compress_ratios`, or the class pattern."""
    if c.has("compress_ratios") and not c.has("layer_types"):
        ratios = c.indices("compress_ratios") or []
        return [_BY_RATE.get(rate, "unknown") for rate in (*ratios, *[0] * number)][:number]
    pattern = ["heavily_compressed", "heavily_compressed"]
    pattern += ["compressed_sparse" if i % 2 else "heavily_compressed" for i in range(max(number - 2, 0))]
    return parts.windows(c, number, pattern[:number])


def _with_rate(c: Config, base: CompressedAttention, kind: str) -> CompressedAttention:
    if kind == "sliding":
        return base
    if kind not in _RATES:
        rule, remedy = "is not a layer of deepseek_v4", f"use sliding, {' or '.join(_RATES)} attention"
        c.problems.add("layer_types", kind, rule, remedy)
        return base
    rate = c.section("compress_rates").size(f"{kind}_attention", default=_RATES[kind])
    if kind == "heavily_compressed":
        return replace(base, rate=rate)
    indexer = Indexer(heads=c.size("index_n_heads"), head_dim=c.size("index_head_dim"), top_k=c.size("index_topk"))
    return replace(base, rate=rate, indexer=indexer)


ROWS: dict[str, Row] = {
    "deepseek_v2": Row(deepseek, ClassFacts(normalised=False, float_router=True)),
    "deepseek_v3": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "deepseek_v32": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "glm_moe_dsa": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "glm4_moe_lite": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "mistral4": Row(deepseek),
    "longcat_flash": Row(longcat_flash, ClassFacts(normalised=False, float_router=True)),
    "deepseek_v4": Row(deepseek_v4, ClassFacts(normalised=True)),
}
