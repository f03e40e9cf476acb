"""Models written as a pattern of letters, one mixer or feed-forward a layer: Nemotron-H and Megatron-Core hybrids.

M is Mamba-2, * attention, - a feed-forward, E an MoE. Source: transformers 5.23.0, Megatron-LM core/ssm.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, MoE
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import NormKind
from shardwise.models._recurrent import Mamba2
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace

_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_WORDS = {"linear_attention": "mamba", "full_attention": "attention"} | {word: word for word in _LETTERS.values()}


def build(config: Config) -> Architecture:
    """Return Nemotron-H."""
    blocks = _Blocks(config, "rmsnorm")
    kinds = spelled(config, "hybrid_override_pattern") or listed(config, "layers_block_type")
    if not kinds:
        config.problems.add("layers_block_type", None, "is missing", "list the kind of each layer")
        kinds = ["mlp"]
    config.accept("num_layers", "moe_shared_expert_overlap", "mamba_proj_bias", "expand")
    config.accept(
        "ffn", "mlp_bias", "mlp_hidden_act", "head_dim", "num_attention_heads", "num_key_value_heads", "moe_latent"
    )
    config.accept("num_experts", "experts_per_token", "expert_ffn", "shared_expert_ffn")
    config.accept("attention_bias", "moe_shared_expert_overlap", "num_shared_experts", "window")
    if "num_layers" in config.overrides:
        kinds = config.cut(kinds, config.layers())
    model = parts.language_model(config, tuple(blocks(kind) for kind in kinds))
    return parts.with_state(config, replace(model, mtp=_mtp(config, blocks)))


def listed(config: Config, name: str) -> list[str]:
    """Return the kinds of layers that a list of words names."""
    words = config.words(name)
    unknown = [word for word in words if word not in _WORDS]
    config.expect(not unknown, name, f"names the unknown layer kinds {unknown}", f"use {', '.join(sorted(_WORDS))}")
    return [_WORDS.get(word, "mlp") for word in words]


def spelled(config: Config, name: str) -> list[str]:
    """Return the kinds of layers that a pattern of letters spells; "|" marks pipeline stages and says nothing here."""
    letters = config.text(name).replace("|", "")
    unknown = sorted(set(letters) - set(_LETTERS))
    config.expect(not unknown, name, f"has the unknown letters {unknown}", "use M, E, * and -")
    return [_LETTERS.get(letter, "mlp") for letter in letters]


class _Blocks:
    """The block of each kind of layer, made when a layer asks for it, so that unused sizes are not asked for."""

    def __init__(self, config: Config, norm: NormKind) -> None:
        self.c, self.norm = config, norm
        self.made: dict[str, Block] = {}

    def __call__(self, kind: str) -> Block:
        if kind not in self.made:
            self.made[kind] = self._make(kind)
        return self.made[kind]

    def _make(self, kind: str) -> Block:
        c, one = self.c, Block(mixers=(), feed_forward=None, norm=self.norm, norms=1)
        if kind == "mamba":
            return replace(one, mixers=(mamba2(c),))
        if kind == "attention":
            return replace(one, mixers=(replace(parts.attention(c), rotary=False),))
        if kind == "moe":
            return replace(one, feed_forward=_experts(c), extra_vectors=_latent_bias(c))
        return replace(one, feed_forward=parts.mlp(c, gated=False, bias=c.flag("mlp_bias"), act="relu2"))


def mamba2(config: Config) -> Mamba2:
    """Return Mamba-2 as Nemotron-H spells it."""
    return Mamba2(
        heads=config.size("ssm_heads"),
        head_dim=config.size("ssm_head_dim"),
        groups=config.size("ssm_groups"),
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        chunk=config.size("ssm_chunk", default=128),
        conv_bias=config.flag("use_conv_bias", "mamba_conv_bias", default=True),
        proj_bias=config.flag("use_bias"),
        out_bias=config.flag("use_bias"),
    )


def _experts(config: Config) -> MoE:
    experts = replace(
        parts.moe(config, gated=False, act="relu2"), latent=config.count("moe_latent"), correction_bias=True
    )
    width = config.count("shared_expert_ffn")
    bias = config.flag("mlp_bias")
    shared = MLP(ffn=width, gated=False, bias=bias, activation=experts.activation) if width else None
    return replace(experts, shared=shared)


def _latent_bias(config: Config) -> int:
    """The biases of the two latent projections."""
    return (
        config.count("moe_latent") + config.size("hidden_size")
        if config.flag("mlp_bias") and config.count("moe_latent")
        else 0
    )


def _mtp(config: Config, blocks: _Blocks) -> tuple[Block, ...]:
    """Each prediction layer is a run of blocks (attention, then an MoE) behind one projection."""
    number = config.predictions()
    if not number:
        config.accept("mtp_layers_block_type", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer")
        return ()
    kinds = (
        spelled(config, "mtp_hybrid_override_pattern")
        or listed(config, "mtp_layers_block_type")
        or ["attention", "moe"]
    )
    config.accept("mtp_layers_block_type")
    # Megatron-Bridge's key (models/nemotronh/nemotron_h_bridge.py): further ones are passes of one layer.
    passes = config.flag("mtp_use_repeated_layer")
    first, *rest = (replace(blocks(kind), shared_weights="mtp" if passes else "") for kind in kinds)
    return (replace(first, also=tuple(rest)),) * number


ROWS: dict[str, FamilyRow] = {
    "nemotron_h": FamilyRow(build, ClassFacts(float_router=True, norm="rmsnorm-float")),
}
