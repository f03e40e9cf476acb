"""Grouped-query attention that reads blocks of past tokens that an indexer picks: MiniMax-M3, Qwen3.8-Flash-Next.

Source: the model classes of transformers 5.24.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from math import isqrt

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, Indexer
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import qwen_shared
from shardwise.models.families.recurrent import qwen_mixers
from shardwise.records import replace

_PICKS = "minimax_m3_sparse"


def minimax_m3(config: Config) -> Architecture:
    """Return MiniMax-M3: norms for each head, an indexer in most layers, one shared expert of its own width."""
    number = config.layers()
    core = replace(parts.attention(config), qk_norm="head", qk_norm_kind="rmsnorm-offset")
    config.accept("use_qk_norm", "qk_norm_type", "use_gemma_norm", "use_routing_bias", "num_shared_experts")
    gated = config.flag("attention_output_gate")
    config.expect(not gated, "attention_output_gate", "is not supported for MiniMax-M3", "leave it out")
    config.accept("num_mtp_layers")
    if config.has("num_mtp_layers"):
        config.note("multi-token-prediction modules of MiniMax-M3 are not counted: its files have none")
    experts = replace(parts.moe(config, only="intermediate_size"), correction_bias=True, clamped=True, scaled_gate=True)
    config.accept("ffn", "expert_ffn")
    act = experts.activation
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=act, fused_projection=True)
    dense = MLP(ffn=config.size("dense_intermediate_size"), activation=act, fused_projection=True)
    picks, kinds = _indexed(config, core, number)
    feeds: dict[str, FeedForward] = {"sparse": replace(experts, shared=shared), "dense": dense}
    words = _feeds(config, number)
    known = set(words) <= set(feeds)
    config.expect(known, "mlp_layer_types", "must be dense or sparse for each layer", "list those")
    made = {
        (kind, word): Block(mixers=(picks if kind == _PICKS else core,), feed_forward=feeds.get(word, dense))
        for kind, word in dict.fromkeys(zip(kinds, words, strict=True))
    }
    model = parts.language_model(config, tuple(made[pair] for pair in zip(kinds, words, strict=True)))
    return parts.renormed(model, "rmsnorm-offset")


def _indexed(config: Config, core: Attention, number: int) -> tuple[Attention, list[str]]:
    """The attention with its indexer, and the kind of each layer; released files keep both in a section."""
    inner = config.section("sparse_attention_config")

    def size(key: str, inside: str) -> int:
        return inner.size(inside) if inner.has(inside) else config.size(key)

    heads, block = size("index_n_heads", "sparse_num_index_heads"), size("index_block_size", "sparse_block_size")
    rule = f"must be the {core.kv_heads} key-value heads, each of which has tokens picked for it"
    config.expect(heads == core.kv_heads, "index_n_heads", rule, "use as many")
    picked = size("index_topk_blocks", "sparse_topk_blocks") * block
    width = size("index_head_dim", "sparse_index_dim")
    config.accept("index_local_blocks")
    freq = inner.sequence("sparse_attention_freq", number, int)
    if freq and not config.has("layer_types"):
        kinds = [_PICKS if one else "full" for one in freq]
    else:
        kinds = parts.windows(config, number)
    known = set(kinds) <= {"full", _PICKS}
    config.expect(known, "layer_types", f"must be full_attention or {_PICKS} for each layer", "list those")
    return replace(core, indexer=Indexer(heads=heads, head_dim=width, top_k=picked, style="groups")), kinds


def _feeds(config: Config, number: int) -> list[str]:
    """Which layers have experts: `mlp_layer_types`, or a number for each layer in `moe_layer_freq`, or all."""
    if config.has("mlp_layer_types") or not config.has("moe_layer_freq"):
        return config.sequence("mlp_layer_types", number) or ["sparse"] * number
    return ["sparse" if one else "dense" for one in config.sequence("moe_layer_freq", number, int)] or [
        "dense"
    ] * number


def qwen4_exp(config: Config) -> Architecture:
    """Return Qwen3.8-Flash-Next: Qwen3.5's layers, whose attention picks blocks, between streams that a low rank mixes.

    Some layers add embeddings of hashed n-grams. One of the weights' norms of all streams stands in the place of that
    of a layer, the others are among its vectors. Source: transformers 5.24.0 models/qwen4_exp/modeling_qwen4_exp.py.
    """
    number, hidden = config.layers(), config.size("hidden_size")
    core, delta = qwen_mixers(config)
    rate = config.size("indexer_compress_ratio")
    indexer = Indexer(
        heads=config.size("indexer_n_heads"), head_dim=config.size("indexer_head_dim"),
        top_k=config.size("indexer_budget"), pool=rate, style="mean",
    )  # fmt: skip
    core = replace(core, indexer=indexer)
    wide, mixing = _mixing(config, hidden)
    experts = qwen_shared(config, parts.moe(config))
    period = config.period("full_attention_interval", 4)
    kinds = parts.windows(config, number, ("linear",) * (period - 1) + ("indexed",))
    known = set(kinds) <= {"linear", "indexed", "full"}
    config.expect(known, "layer_types", "must be linear_attention or indexed_attention", "list those for each layer")
    config.accept("indexer_kv_heads", "output_gate_type", "mtp", "mtp_use_dedicated_embeddings", "split_ngram_parts")
    config.accept("seed", "ngram_size", "heads_per_ngram", "ple_embed_dim", "ple_conv_kernel_size", "mlp_only_layers")
    config.accept("ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "language_model_only")
    added = sorted({i - 1 for i in config.indices("ple_layer_ids") or []})
    inside = all(0 <= i < number for i in added)
    config.expect(inside, "ple_layer_ids", f"must number layers from 1 to {number}", "list such numbers")
    embedding = config.count("ple_embed_dim", default=hidden) or hidden

    def block(kind: str, adds: bool) -> Block:
        mixer, extras, vectors = delta if kind == "linear" else core, mixing, 2 * (wide - hidden)
        if adds:
            maps = (("ngram_keys", wide), ("ngram_values", hidden))
            extras += tuple(Projection(name=n, inputs=embedding, outputs=width, linear=False) for n, width in maps)
            vectors += wide * (3 + config.size("ple_conv_kernel_size", default=4))
        return Block(mixers=(mixer,), feed_forward=experts, extras=extras, extra_vectors=vectors)

    pairs = [(kind, i in added) for i, kind in enumerate(kinds)]
    made = {pair: block(*pair) for pair in dict.fromkeys(pairs)}
    model = parts.with_state(config, parts.language_model(config, tuple(made[pair] for pair in pairs)))
    gather = tuple(replace(one, name=f"gather_{way}") for one, way in zip(mixing[:2], ("down", "up"), strict=True))
    config.note("the streams of hyper-connections are counted as projections, their extra residual traffic is not")
    rows = sum(_ngram_rows(config, at) for at in range(len(added)))
    model = replace(model, extras=gather, extra_vectors=wide - hidden, extra_embedding=rows)
    mtp = (replace(block("indexed", False), norm="rmsnorm-offset"),) * config.predictions()
    return replace(
        parts.renormed(model, "rmsnorm-offset"), mtp=tuple(replace(one, norm="rmsnorm-offset") for one in mtp)
    )


def _mixing(config: Config, hidden: int) -> tuple[int, tuple[Projection, ...]]:
    """The width of all residual streams, and what mixes them before attention and the feed-forward of a layer."""
    streams, rank = config.repeats("hc_count", default=4), config.size("hc_lowrank")
    wide = streams * hidden
    return wide, tuple(
        Projection(name=f"{at}_hyper_connection_{way}", inputs=inputs, outputs=outputs, linear=False)
        for at in ("attention", "mlp")
        for way, inputs, outputs in (("down", wide, rank), ("up", rank, wide), ("inject", wide, streams))
    )


def _ngram_rows(config: Config, at: int) -> int:
    """Elements of the table of n-grams of one layer: a prime number of rows for each head, in all a multiple."""
    heads = (config.repeats("ngram_size", default=3) - 1) * config.repeats("heads_per_ngram", default=8)
    width = config.count("ple_embed_dim", default=0) or config.size("hidden_size")
    divides = heads > 0 and width % heads == 0
    config.expect(divides, "ple_embed_dim", f"must be a multiple of the {heads} heads of n-grams", "use a multiple")
    if not divides or heads > _MOST_HEADS:
        config.expect(heads <= _MOST_HEADS, "heads_per_ngram", f"must make at most {_MOST_HEADS} heads", "use fewer")
        return 1
    rows, prime = 0, config.size("ngram_vocab_size_base", default=20_000_000) - 1
    for i in range((at + 1) * heads):
        prime = _next_prime(prime)
        rows += prime if i >= at * heads else 0
    step = config.size("make_ngram_vocab_size_divisible_by", default=128)
    return -(-rows // step) * step * (width // heads)


_MOST_HEADS = 256


def _next_prime(number: int) -> int:
    number += 1
    while number < 2 or any(number % i == 0 for i in range(2, isqrt(number) + 1)):
        number += 1
    return number


ROWS: dict[str, FamilyRow] = {
    "qwen4_exp_text": FamilyRow(qwen4_exp),
    "minimax_m3_vl_text": FamilyRow(minimax_m3, ClassFacts(normalised=True, float_weights=True, joined_rotary=True)),
}
