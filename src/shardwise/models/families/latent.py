"""Multi-head latent attention with mixtures: DeepSeek V2, V3, V3.2, Kimi-K2, GLM-5, GLM-4.7-Flash, Mistral 4, LongCat.

Sources: arXiv:2405.04434, arXiv:2412.19437 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwise.models._config import Config
from shardwise.models._model import MLP, Block, Indexer, LatentAttention, Model
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
    if isinstance(dense, MLP):
        dense = replace(dense, bias=c.model_type == "deepseek_v2" and c.flag("mlp_bias"))
    blocks = {s: Block(mixers=(core,), feed_forward=experts if s else dense) for s in (True, False)}
    return with_mtp(c, parts.language_model(c, tuple(blocks[s] for s in sparse)))


def _attention(c: Config) -> LatentAttention:
    core = parts.latent_attention(c)
    if c.model_type not in _INDEXED:
        return core
    indexer = Indexer(heads=c.size("index_n_heads"), head_dim=c.size("index_head_dim"), top_k=c.size("index_topk"))
    return replace(core, indexer=indexer)


def _sparse(c: Config, number: int) -> list[bool]:
    """Which layers are mixtures: `mlp_layer_types`, or all behind `first_k_dense_replace` at `moe_layer_freq`."""
    words = c.sequence("mlp_layer_types", number)
    first, step = c.count("first_dense_layers"), c.size("moe_layer_freq", default=1)
    if words:
        return [word == "sparse" for word in words]
    return [i >= first and i % step == 0 for i in range(number)]


BUILDERS: dict[str, Callable[[Config], Model]] = {
    "deepseek_v2": deepseek,
    "deepseek_v3": deepseek,
    "deepseek_v32": deepseek,
    "glm_moe_dsa": deepseek,
    "glm4_moe_lite": deepseek,
    "mistral4": deepseek,
}


def build(c: Config) -> Model:
    """Return the model of a latent-attention family."""
    return BUILDERS[c.model_type](c)
