"""Models described field by field rather than by family: Megatron-Core runs, GPT- and Llama-like variants, remote code.

Such a description says `position_embedding`, `norm_type`, `gated_mlp`, `attention_bias`, `mlp_bias`, `qk_layernorm`
outright. The remote-code families (InternLM, Baichuan, Qwen, ChatGLM, DeciLM) are descriptions with those fields known.
"""

from __future__ import annotations

import re

from shardwise.models._architecture import MLP, MOST_PREDICTIONS, Architecture, Block, MoE
from shardwise.models._config import Config
from shardwise.models._mixers import Attention, LatentAttention, NormKind
from shardwise.models._recurrent import Mamba2
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.nemotron import spelled
from shardwise.records import replace

_NORMS: dict[str, NormKind] = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
_POSITIONS = ("learned", "rope", "alibi", "none")
_FREQUENCY = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")


def build(config: Config) -> Architecture:
    """Return the model that a description gives."""
    norm = _norm(config)
    number, core = config.layers(), _attention(config)
    position = config.text("position_embedding", default="rope")
    config.expect(position in _POSITIONS, "position_embedding", "is unknown", f"use {', '.join(_POSITIONS)}")
    if isinstance(core, Attention):
        core = replace(core, rotary=position == "rope")
    parallel = config.flag("parallel_residual")
    layers, mtp = _layers(config, number, core, norm)
    if parallel:
        norms = 1 if config.flag("shared_attention_norm", default=True) else 2
        layers = tuple(replace(block, parallel=True, norms=norms) for block in layers)
    model = parts.language_model(config, layers, norm=norm)
    config.accept("unpadded_vocab_size", "pipeline_layout", "decoder_first_pipeline_num_layers", "norm_bias")
    config.accept("decoder_last_pipeline_num_layers", "seq_length", "multi_latent_attention", "original_rope")
    return replace(
        model,
        positions=config.size("max_context") if position == "learned" else 0,
        embedding_norm=config.flag("embedding_layernorm"),
        head_bias=config.flag("lm_head_bias"),
        mtp=mtp,
    )


def _norm(config: Config) -> NormKind:
    word = config.text("norm_type", default="rmsnorm").lower()
    config.expect(word in _NORMS, "norm_type", "is unknown", "use LayerNorm or RMSNorm")
    return _NORMS.get(word, "rmsnorm")


def _attention(config: Config) -> Attention | LatentAttention:
    if config.flag("multi_latent_attention"):
        normed = config.flag("qk_layernorm", default=True)
        return replace(parts.latent_attention(config), latent_norm=_norm(config) if normed else "none")
    qkv, out = _biases(config)
    core = parts.attention(config, qkv_bias=qkv, out_bias=out)
    if not config.flag("qk_layernorm", "qk_norm"):
        return core
    return replace(core, qk_norm="head", qk_norm_kind=_norm(config))


def _biases(config: Config) -> tuple[bool, bool]:
    """Biases of the input projections and of the output; "qkv" means the former alone."""
    if config.raw.get("attention_bias") == "qkv" and "attention_bias" not in config.overrides:
        config.accept("attention_bias")
        return True, False
    both = config.flag("attention_bias")
    return both, both


def _layers(
    config: Config, number: int, core: Attention | LatentAttention, norm: NormKind
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """The layers, and those that predict further tokens."""
    if config.has("hybrid_layer_pattern"):
        return _hybrid(config, number, core, norm)
    if not config.count("num_experts"):
        block = Block(mixers=(core,), feed_forward=_mlp(config), norm=norm)
        return (block,) * number, (block,) * config.predictions()
    experts = _experts(config)
    sparse = _frequency(config, number)
    dense = experts if all(sparse) else _mlp(config)
    config.accept("ffn", "mlp_bias")
    blocks = {s: Block(mixers=(core,), feed_forward=experts if s else dense, norm=norm) for s in (True, False)}
    layers = tuple(blocks[s] for s in sparse)
    return layers, (layers[-1],) * config.predictions()


def _mlp(config: Config) -> MLP:
    act, gated = parts.activation(config, "gelu"), config.flag("gated_mlp", default=True)
    width = config.count("ffn") or 4 * config.size("hidden_size")
    return MLP(ffn=width, gated=gated, bias=config.flag("mlp_bias"), activation=act)


def _experts(config: Config) -> MoE:
    gated = config.flag("gated_mlp", default=True)
    keys = () if config.has("expert_ffn") else ("intermediate_size",)
    experts = parts.moe(config, *keys, gated=gated, act="gelu")
    width = config.count("shared_expert_ffn")
    shared = MLP(ffn=width, gated=gated, activation=experts.activation) if width else None
    return replace(experts, shared=shared, latent=config.count("moe_latent"))


def _frequency(config: Config, number: int) -> list[bool]:
    """Which layers are MoE: every n-th, or a list, or Megatron's "([0]*3+[1]*11)"."""
    given = config.raw.get("moe_layer_freq", 1)
    config.accept("moe_layer_freq")
    if isinstance(given, str) and given.isdigit():
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return [i % given == 0 for i in range(number)]
    if isinstance(given, str):
        given = _expand(given)
    if isinstance(given, list) and len(given) == number:
        return [bool(one) for one in given]
    rule = f"must be a whole number or a pattern of {number} layers"
    config.problems.add("moe_layer_freq", config.raw.get("moe_layer_freq"), rule, 'write 1, or "([0]*3+[1]*11)"')
    return [True] * number


def _expand(text: str) -> list[int]:
    """Spell out Megatron's sum of repeated lists; anything else is empty."""
    text = text.strip().replace(" ", "")
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    layers: list[int] = []
    for term in text.split("+"):
        match = _FREQUENCY.fullmatch(term)
        if match is None:
            return []
        layers += [int(digit) for digit in match[1].split(",")] * int(match[2] or 1)
    return layers


def _hybrid(
    config: Config, number: int, core: Attention | LatentAttention, norm: NormKind
) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
    """Layers by letters; behind "/" stand the runs that predict further tokens."""
    made: dict[str, Block] = {}

    def block(kind: str) -> Block:
        if kind not in made:
            one = Block(mixers=(), feed_forward=None, norm=norm, norms=1)
            made[kind] = {
                "mamba": lambda: replace(one, mixers=(_mamba(config),)),
                "attention": lambda: replace(one, mixers=(core,)),
                "moe": lambda: replace(one, feed_forward=_experts(config)),
                "mlp": lambda: replace(one, feed_forward=_mlp(config)),
            }[kind]()
        return made[kind]

    main, *runs = config.text("hybrid_layer_pattern").split("/")
    kinds = spelled(config.with_text("hybrid_layer_pattern", main), "hybrid_layer_pattern")
    if "num_layers" in config.overrides:
        kinds = config.cut(kinds, number)
    elif len(kinds) != number:
        config.note(f"hybrid_layer_pattern has {len(kinds)} layers, and wins over num_hidden_layers = {number}")
    config.accept(
        "ffn", "mlp_bias", "num_mtp_layers", "moe_layer_freq", "num_experts", "experts_per_token", "expert_ffn"
    )
    config.accept("shared_expert_ffn", "moe_latent", "ssm_heads", "ssm_head_dim", "ssm_state", "ssm_groups")
    rule = f"has {len(runs)} runs that predict further tokens, at most {MOST_PREDICTIONS}"
    config.expect(len(runs) <= MOST_PREDICTIONS, "hybrid_layer_pattern", rule, "write fewer behind /")
    mtp = []
    for run in runs[:MOST_PREDICTIONS]:
        first, *rest = (block(kind) for kind in spelled(config.with_text("mtp", run), "mtp"))
        mtp.append(replace(first, also=tuple(rest)))
    return tuple(block(kind) for kind in kinds), tuple(mtp)


def _mamba(config: Config) -> Mamba2:
    """Megatron-Core's mixer: twice the hidden size in heads of 64 unless said, state 128, 8 groups, convolution 4."""
    width = config.size("ssm_head_dim", default=64)
    return Mamba2(
        heads=config.size("ssm_heads", default=2 * config.size("hidden_size") // width),
        head_dim=width,
        groups=config.size("ssm_groups", default=8),
        state=config.size("ssm_state", default=128),
        conv=config.size("ssm_conv", default=4),
        chunk=config.size("ssm_chunk", default=128),
    )


ROWS: dict[str, FamilyRow] = {
    "gpt2-like": FamilyRow(build),
    "llama-like": FamilyRow(build),
    "mcore_gpt": FamilyRow(build),
    "mcore_moe": FamilyRow(build),
    "mcore_hybrid": FamilyRow(build),
}
