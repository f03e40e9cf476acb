"""GPT-2, GPT-BigCode, GPT-Neo, OPT, BLOOM, MPT and Falcon: LayerNorm decoders, each with its own names."""

from __future__ import annotations

from typing import Any

from shardwise.models._architecture import MLP, Architecture, Block, Projection
from shardwise.models._config import Config
from shardwise.models._mixers import Attention, NormKind
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace


def gpt2(config: Config) -> Architecture:
    """Return GPT-2 or GPT-BigCode: biases everywhere, learned positions."""
    heads = config.size("num_attention_heads")
    shared = config.model_type == "gpt_bigcode" and config.flag("multi_query")
    core = Attention(
        heads=heads,
        kv_heads=1 if shared else parts.kv_heads(config, heads),
        head_dim=parts.head_dim(config, heads),
        qkv_bias=True,
        out_bias=True,
        rotary=False,
        fused_projection=True,
    )
    config.accept("num_key_value_heads")
    block = Block(mixers=(core,), feed_forward=_plain(config, "gelu_new"), norm="layernorm")
    model = parts.language_model(config, (block,) * config.layers(), norm="layernorm")
    return replace(model, positions=config.size("max_context"))


def gpt_neo(config: Config) -> Architecture:
    """Return GPT-Neo: bias on the output projection only, every other layer local."""
    heads, number = config.size("num_attention_heads", "num_heads"), config.layers()
    core = Attention(heads=heads, kv_heads=heads, head_dim=parts.head_dim(config, heads), out_bias=True, rotary=False)
    kinds = config.sequence("attention_layers", number) or _neo_pattern(config, number)
    window = config.size("window")

    def block(kind: str) -> Block:
        mixer = replace(core, window=window) if kind == "local" else core
        return Block(mixers=(mixer,), feed_forward=_plain(config, "gelu_new"), norm="layernorm")

    model = parts.language_model(config, parts.build(kinds, block), norm="layernorm")
    return replace(model, positions=config.size("max_context"))


def _neo_pattern(config: Config, number: int) -> list[str]:
    """`attention_types` is a list of (pattern, times); the class default alternates global and local."""
    given = config.raw.get("attention_types")
    config.accept("attention_types")
    spelled = [word for run in given for word in _run(run, number)] if isinstance(given, list) else []
    if given is None or len(spelled) == number:
        return spelled or [("global", "local")[i % 2] for i in range(number)]
    rule = f"must be runs of [[kinds], times] that make {number} layers of global and local"
    config.problems.add("attention_types", given, rule, 'write such as [[["global", "local"], 6]]')
    return ["global"] * number


def _run(run: Any, most: int) -> list[str]:
    """The layers of one (pattern, times), none where it is no such pair or makes more than there are."""
    match run:
        case [list(kinds), int(times)] if (
            set(map(str, kinds)) <= {"global", "local"} and 0 < len(kinds) * times <= most
        ):
            return kinds * times
    return []


def opt(config: Config) -> Architecture:
    """Return OPT: learned positions with two spare rows, embedding optionally narrower than the model."""
    bias, hidden = config.flag("enable_bias"), config.size("hidden_size")
    norm: NormKind = "layernorm" if config.flag("layer_norm_elementwise_affine") else "layernorm-no-weight"
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), rotary=False)
    ffn = MLP(ffn=config.size("ffn"), gated=False, bias=bias, activation=parts.activation(config, "relu"))
    model = parts.language_model(
        config, (Block(mixers=(core,), feed_forward=ffn, norm=norm),) * config.layers(), norm=norm
    )
    width = config.size("word_embed_proj_dim", default=hidden)
    adapters = (
        Projection(name="project_in", inputs=width, outputs=hidden),
        Projection(name="project_out", inputs=hidden, outputs=width),
    )
    return replace(
        model,
        positions=config.size("max_context") + 2,
        final_norm=config.flag("do_layer_norm_before") and not config.flag("_remove_final_layer_norm"),
        embedding_width=0 if width == hidden else width,
        extras=() if width == hidden else adapters,
    )


def bloom(config: Config) -> Architecture:
    """Return BLOOM: ALiBi, biases everywhere, a norm behind the embedding."""
    core = replace(parts.attention(config, qkv_bias=True, out_bias=True), rotary=False, fused_projection=True)
    block = Block(mixers=(core,), feed_forward=_plain(config, "gelu_pytorch_tanh"), norm="layernorm")
    return replace(parts.language_model(config, (block,) * config.layers(), norm="layernorm"), embedding_norm=True)


def mpt(config: Config) -> Architecture:
    """Return MPT: ALiBi or learned positions, usually without biases.

    MosaicML's class (llm-foundry models/mpt) heeds what the file says of biases, widths and positions. Transformers'
    own has none of them: no biases, four times the width, ALiBi, a key-value head each (5.23.0 models/mpt).
    """
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    own = any(name.startswith("Mpt") for name in config.words("architectures"))
    core, bias, width, learned = _transformers_mpt(config, heads, hidden) if own else _mosaic_mpt(config, heads, hidden)
    gated = not own and _is_gated(config)
    ffn = MLP(ffn=width, gated=gated, bias=bias, activation=parts.activation(config, "gelu"))
    norm: NormKind = "layernorm" if bias else "layernorm-no-bias"
    model = parts.language_model(
        config, (Block(mixers=(core,), feed_forward=ffn, norm=norm),) * config.layers(), norm=norm
    )
    return replace(model, positions=config.size("max_context") if learned else 0)


def _transformers_mpt(config: Config, heads: int, hidden: int) -> tuple[Attention, bool, int, bool]:
    """The attention, whether there are biases, the width of the feed-forward, and whether positions are learned."""
    config.accept("no_bias", "expansion_ratio", "learned_pos_emb", "attn_config", "ffn")
    size = parts.head_dim(config, heads)
    core = Attention(heads=heads, kv_heads=heads, head_dim=size, rotary=False, fused_projection=True)
    return core, False, 4 * hidden, False


def _mosaic_mpt(config: Config, heads: int, hidden: int) -> tuple[Attention, bool, int, bool]:
    """The same, as the file says; where it names the class, what it leaves out is as in that class.

    Source: github.com/mosaicml/llm-foundry llmfoundry/models/mpt/configuration_mpt.py and models/layers/attention.py
    attn_config_defaults: biases, no ALiBi, and learned positions without ALiBi and rotation.
    """
    inner = config.section("attn_config")
    named = bool(config.words("architectures")) or "auto_map" in config.raw
    bias = named if named and not config.has("no_bias") else not config.flag("no_bias", default=True)
    alibi, rotary = inner.flag("alibi", default=not named), inner.flag("rope")
    learned = config.flag("learned_pos_emb", default=True) and not alibi and not rotary
    shared = inner.text("attn_type") == "multiquery_attention"
    core = Attention(
        heads=heads,
        kv_heads=inner.size("kv_n_heads", default=1 if shared else heads),
        head_dim=parts.head_dim(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="full" if inner.flag("qk_ln") else "none",
        qk_norm_kind="layernorm" if bias else "layernorm-no-bias",
        rotary=rotary,
        fused_projection=True,  # Wqkv, all that releases before 2024 have and later ones unless told
    )
    config.expect(heads % core.kv_heads == 0, "kv_n_heads", f"must divide the {heads} heads", "use a divisor")
    width = config.section("ffn_config").count("ffn") or config.count("ffn")
    width = width or round(config.scaled("expansion_ratio", hidden, default=4))
    if bias and not named:
        config.note("read as MosaicML's MPT, which has biases; MptForCausalLM of transformers never has any")
    return core, bias, width, learned


def _is_gated(config: Config) -> bool:
    """Return whether MosaicML's feed-forward has a gate (llmfoundry/models/layers/ffn.py MPTMLP, MPTGLU)."""
    kind = config.section("ffn_config").text("ffn_type", default="mptmlp")
    config.expect(kind in ("mptmlp", "mptglu"), "ffn_config", f"{kind} is not read", "use mptmlp or mptglu")
    return kind == "mptglu"


def falcon(config: Config) -> Architecture:
    """Return Falcon: parallel blocks, multi-query (7B) or grouped (40B, 180B) attention.

    Its class hands one head of keys to all as a view, and always makes a mask (transformers 5.24.0
    models/falcon/modeling_falcon.py); that of ALiBi is of numbers, which all layers share.
    """
    heads, bias, new = config.size("num_attention_heads"), config.flag("bias"), config.flag("new_decoder_architecture")
    multi_query, parallel = config.flag("multi_query"), config.flag("parallel_attn")
    given = parts.kv_heads(config, heads)
    core = Attention(
        heads=heads,
        kv_heads=given if new else 1 if multi_query else heads,
        head_dim=parts.head_dim(config, heads),
        qkv_bias=bias,
        out_bias=bias,
        rotary=not config.flag("alibi"),
        fused_projection=True,
        viewed_keys=multi_query and not new,
        masked=not config.flag("alibi"),
        narrow_softmax=True,
    )
    two = config.count("num_ln_in_parallel_attn") or (2 if new else 1)
    norms = two if parallel else 2
    ffn = _plain(config, "gelu", bias=bias)
    block = Block(mixers=(core,), feed_forward=ffn, norm="layernorm", norms=norms, parallel=parallel)
    return parts.language_model(config, (block,) * config.layers(), norm="layernorm")


def _plain(config: Config, act: str, *, bias: bool = True) -> MLP:
    """The feed-forward of four times the hidden size unless the file says otherwise."""
    width = config.count("ffn") or 4 * config.size("hidden_size")
    return MLP(ffn=width, gated=False, bias=bias, activation=parts.activation(config, act))


ROWS: dict[str, FamilyRow] = {
    "gpt2": FamilyRow(gpt2),
    "gpt_bigcode": FamilyRow(gpt2),
    "gpt_neo": FamilyRow(gpt_neo),
    "opt": FamilyRow(opt),
    "bloom": FamilyRow(bloom),
    "mpt": FamilyRow(mpt),
    "falcon": FamilyRow(falcon),
}
