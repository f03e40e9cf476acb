"""Grouped-query attention that reads blocks of past tokens that an indexer picks: MiniMax-M3.

Source: the model classes of transformers 5.24.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, Indexer
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
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
    experts = replace(parts.moe(config, only="intermediate_size"), correction_bias=True, clamped=True)
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
    return replace(core, indexer=Indexer(heads=heads, head_dim=width, top_k=picked, of_groups=True)), kinds


def _feeds(config: Config, number: int) -> list[str]:
    """Which layers have experts: `mlp_layer_types`, or a number for each layer in `moe_layer_freq`, or all."""
    if config.has("mlp_layer_types") or not config.has("moe_layer_freq"):
        return config.sequence("mlp_layer_types", number) or ["sparse"] * number
    return ["sparse" if one else "dense" for one in config.sequence("moe_layer_freq", number, int)] or [
        "dense"
    ] * number


ROWS: dict[str, FamilyRow] = {
    "minimax_m3_vl_text": FamilyRow(minimax_m3, ClassFacts(normalised=True, float_weights=True, joined_rotary=True)),
}
