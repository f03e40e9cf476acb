"""Multi-head latent attention with mixtures: DeepSeek V2, V3, V3.2, Kimi-K2, GLM-5, GLM-4.7-Flash, Mistral 4, LongCat.

Sources: arXiv:2405.04434, arXiv:2412.19437 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._mixers import Indexer, LatentAttention
from shardwise.models._model import MLP, Block, Model
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


ROWS: dict[str, Row] = {
    "deepseek_v2": Row(deepseek, ClassFacts(normalised=False, float_router=True)),
    "deepseek_v3": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "deepseek_v32": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "glm_moe_dsa": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "glm4_moe_lite": Row(deepseek, ClassFacts(float_weights=True, float_router=True)),
    "mistral4": Row(deepseek),
    "longcat_flash": Row(longcat_flash, ClassFacts(normalised=False, float_router=True)),
}
