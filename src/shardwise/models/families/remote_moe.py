"""Families of experts whose model code lives beside their checkpoints: the first DeepSeek-MoE, Ling and Ring to 2.0.

Sources: the configuration and modelling files of deepseek-ai/deepseek-moe-16b-base, inclusionAI/Ling-lite,
inclusionAI/Ling-flash-2.0 and inclusionAI/Ring-mini-linear-2.0 on the hub; copies of those of Ling 2.0 in
github.com/NVIDIA-NeMo/Megatron-Bridge 067f987 src/megatron/bridge/models/bailing, and mlx_lm 0.32.2
models/bailing_moe_linear.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.models._architecture import Architecture, Block, MoE
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, Mixer
from shardwise.models._recurrent import LightningAttention
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import dense_beside, with_mtp
from shardwise.records import replace


def _behind(config: Config, mixers: Sequence[Mixer], experts: MoE, linear_norms: int = 0) -> Architecture:
    """Return the model of these mixers, dense before `first_dense_layers`; linear ones have so many values of norms."""
    first = config.count("first_dense_layers", default=0)
    pairs = [(mixer, i >= first) for i, mixer in enumerate(mixers)]
    dense = dense_beside(config, experts, [sparse for _, sparse in pairs])
    made = {
        (mixer, sparse): Block(
            mixers=(mixer,),
            feed_forward=experts if sparse else dense,
            extra_vectors=linear_norms if isinstance(mixer, LightningAttention) else 0,
        )
        for mixer, sparse in dict.fromkeys(pairs)
    }
    return parts.language_model(config, tuple(made[pair] for pair in pairs))


def deepseek(config: Config) -> Architecture:
    """Return DeepSeek-MoE 16B: Llama's attention, shared experts, leading dense layers."""
    bias = config.flag("attention_bias")
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    step = config.size("moe_layer_freq", default=1)
    config.expect(step == 1, "moe_layer_freq", "must be 1", "leave it out")
    return _behind(config, [core] * config.layers(), parts.moe(config, shared_count=True))


def bailing(config: Config) -> Architecture:
    """Return Ling or Ring: experts on grouped-query attention; from 2.0 with norms of queries and keys and a bias."""
    core, experts = _attention(config), _experts(config)
    return with_mtp(config, _behind(config, [core] * config.layers(), experts))


def bailing_linear(config: Config) -> Architecture:
    """Return Ring-linear 2.0: lightning attention, grouped-query attention at the end of each group of layers.

    Layers behind the last whole group have grouped-query attention too. A linear layer has as many keys as queries.
    """
    number, period = config.layers(), config.period("layer_group_size", 1)
    core, experts = _attention(config), _experts(config)
    width = config.size("hidden_size") // core.heads
    config.expect(width > 0, "hidden_size", f"must be at least the {core.heads} heads", "write the width of the stream")
    linear = LightningAttention(heads=core.heads, head_dim=max(width, 1), block=64)
    config.accept("group_norm_size", "linear_silu", "use_rmsnorm", "use_linear_silu")
    whole = number // period * period
    full = [(i + 1) % period == 0 or i >= whole for i in range(number)]
    # A linear layer has norms of queries and keys as the others have them.
    norms = 2 * max(width, 1) if core.qk_norm != "none" else 0
    return with_mtp(config, _behind(config, [core if one else linear for one in full], experts, norms))


def _attention(config: Config) -> Attention:
    newer = config.model_type != "bailing_moe"
    bias = config.flag("use_bias")
    own = config.flag("attention_bias")
    core = parts.attention(config, qkv_bias=own or (bias and not newer), out_bias=bias)
    normed = config.flag("use_qk_norm", default=newer)
    return replace(core, qk_norm="head" if normed else "none", fused_projection=True)


def _experts(config: Config) -> MoE:
    newer = config.model_type != "bailing_moe"
    experts = parts.moe(config, shared_count=True)
    config.accept("shared_expert_ffn", "moe_router_enable_shared_expert", "moe_router_enable_routed_scaling")
    config.accept("norm_head", "norm_softmax", "max_window_layers", "window", "use_sliding_window", "multi_gate")
    biased = config.flag("moe_router_enable_expert_bias", default=newer)
    config.accept("norm_topk_prob", "mtp_loss_scaling_factor")
    return replace(experts, correction_bias=biased, normalised=newer or experts.normalised)


_FACTS = ClassFacts(float_router=True, float_weights=True, fused_qkv=True)

ROWS: dict[str, FamilyRow] = {
    "deepseek": FamilyRow(deepseek),
    "bailing_moe": FamilyRow(bailing, ClassFacts(fused_qkv=True)),
    "bailing_moe_v2": FamilyRow(bailing, _FACTS),
    "bailing_moe_linear": FamilyRow(bailing_linear, _FACTS),
}
