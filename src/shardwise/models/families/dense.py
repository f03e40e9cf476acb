"""Decoders of one attention and one dense feed-forward a layer: each family is a row saying how it differs from Llama.

Source of the rows: the model classes of transformers 5.23.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.models._architecture import MLP, Architecture, Block
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, NormKind
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace

StyleFlag = bool | str


class Style(NamedTuple):
    """How a family differs from Llama; a flag is a fact, or the configuration key that decides it."""

    norm: NormKind = "rmsnorm"
    norms: int = 2
    gated: bool = True
    act: str = "silu"
    qkv_bias: StyleFlag = "attention_bias"
    out_bias: StyleFlag = "attention_bias"
    mlp_bias: StyleFlag = "mlp_bias"
    qk_norm: Literal["none", "head", "heads", "full"] = "none"
    qk_norm_kind: NormKind = "rmsnorm"
    qk_norm_flag: StyleFlag = True
    parallel: StyleFlag = False
    parallel_norms: int = 2
    head_bias: StyleFlag = False
    windows: Literal["", "all", "types", "switched", "upper"] = ""
    pattern: tuple[str, ...] = ("full",)
    fused_qkv: bool = False
    joined_rotary: bool = False
    fused_gate: bool = False
    sinks: bool = False
    post_norms: StyleFlag = False


_MLP_FREE = Style(mlp_bias=False)
_BARE = Style(qkv_bias=False, out_bias=False, mlp_bias=False)
_QK_HEAD = _MLP_FREE._replace(qk_norm="head")
_GEMMA = _MLP_FREE._replace(norm="rmsnorm-offset", qk_norm_kind="rmsnorm-offset", act="gelu_pytorch_tanh")
_OLMO2 = _MLP_FREE._replace(norm="rmsnorm-float", qk_norm="full", qk_norm_kind="rmsnorm-float")
_SWA_BEHIND = ("full", "sliding", "sliding", "sliding")
_CLASSIC = Style(norm="layernorm", gated=False, act="gelu", qkv_bias=True, out_bias=True, mlp_bias=True)

STYLES: dict[str, Style] = {
    "llama": Style(),
    "cwm": Style(qkv_bias=False, out_bias=False, windows="types", pattern=_SWA_BEHIND),
    "granite": Style(),
    "granite_swa": Style(sinks=True, windows="types", pattern=_SWA_BEHIND),
    "hyperclovax": Style(post_norms="use_post_norm"),
    "mistral": _BARE._replace(windows="all"),
    "ministral": _BARE._replace(windows="types", pattern=("sliding",)),
    "ministral3": _BARE._replace(windows="all"),
    "phi3": _BARE._replace(windows="all", fused_qkv=True, joined_rotary=True, fused_gate=True),
    "qwen2": _BARE._replace(qkv_bias=True, windows="upper"),
    "qwen3": _QK_HEAD._replace(windows="upper"),
    "smollm3": Style(windows="switched"),
    "gemma": _GEMMA,
    "gemma2": _GEMMA._replace(norms=4, windows="types", pattern=("sliding", "full")),
    "vaultgemma": _GEMMA._replace(windows="types", pattern=("sliding", "full")),
    "gemma3_text": _GEMMA._replace(norms=4, qk_norm="head", windows="types", pattern=("sliding",) * 5 + ("full",)),
    "seed_oss": Style(out_bias="attention_out_bias"),
    "glm": _MLP_FREE._replace(out_bias=False, joined_rotary=True, fused_gate=True),
    "glm4": _MLP_FREE._replace(out_bias=False, norms=4, joined_rotary=True, fused_gate=True),
    "glm4v_text": _BARE._replace(qkv_bias=True, norms=4, joined_rotary=True, fused_gate=True),
    "glm_ocr_text": _BARE._replace(norms=4, joined_rotary=True, fused_gate=True),
    "mllama_text_model": _BARE,
    "helium": Style(norm="rmsnorm-float", out_bias=False),
    "olmo": _MLP_FREE._replace(norm="layernorm-wide-no-weight"),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2._replace(windows="types", pattern=parts.THREE_OF_FOUR),
    "exaone4": _BARE._replace(qk_norm="head", windows="types", pattern=parts.THREE_OF_FOUR),
    "apertus": _QK_HEAD._replace(gated=False, act="xielu"),
    "arcee": Style(gated=False, act="relu2"),
    "nemotron": Style(norm="layernorm", gated=False, act="relu2", joined_rotary=True),
    "jais2": Style(norm="layernorm", gated=False, act="relu2"),
    "hunyuan_v1_dense": _QK_HEAD,
    "ernie4_5": Style(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias"),
    "nanochat": _MLP_FREE._replace(
        norm="rmsnorm-no-weight", gated=False, act="relu2", qk_norm="head", qk_norm_kind="rmsnorm-no-weight"
    ),
    "bitnet": _MLP_FREE._replace(act="relu2"),
    "stablelm": _BARE._replace(
        norm="layernorm",
        qkv_bias="use_qkv_bias",
        qk_norm="heads",
        qk_norm_kind="layernorm-no-bias",
        qk_norm_flag="qk_layernorm",
        parallel="use_parallel_residual",
        parallel_norms=1,
        joined_rotary=True,
    ),
    "cohere": _MLP_FREE._replace(
        norm="layernorm-float",
        parallel=True,
        parallel_norms=1,
        qk_norm="heads",
        qk_norm_kind="layernorm-float",
        qk_norm_flag="use_qk_norm",
    ),
    "cohere2": _MLP_FREE._replace(
        norm="layernorm-float", parallel=True, parallel_norms=1, windows="types", pattern=parts.THREE_OF_FOUR
    ),
    "starcoder2": _CLASSIC._replace(qkv_bias="use_bias", out_bias="use_bias", mlp_bias="use_bias", windows="all"),
    "phi": _CLASSIC._replace(
        parallel=True,
        parallel_norms=1,
        qk_norm="head",
        qk_norm_kind="layernorm",
        qk_norm_flag="qk_layernorm",
        head_bias=True,
        joined_rotary=True,
    ),
    "persimmon": _CLASSIC._replace(
        act="relu2",
        qk_norm="head",
        qk_norm_kind="layernorm",
        qk_norm_flag="qk_layernorm",
        fused_qkv=True,
        joined_rotary=True,
    ),
    "gpt_neox": _CLASSIC._replace(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        parallel="use_parallel_residual",
        fused_qkv=True,
        joined_rotary=True,
    ),
    "gptj": _CLASSIC._replace(qkv_bias=False, out_bias=False, parallel=True, parallel_norms=1, head_bias=True),
    "codegen": _CLASSIC._replace(
        qkv_bias=False, out_bias=False, parallel=True, parallel_norms=1, head_bias=True, fused_qkv=True
    ),
}


def build(config: Config) -> Architecture:
    """Return the model of a dense family."""
    style = STYLES[config.model_type]
    block = _block(config, style)
    layers = parts.build(_kinds(config, style), lambda kind: _with_window(config, block, kind))
    model = parts.language_model(config, layers, norm=style.norm)
    if config.model_type == "mllama_text_model":
        return _with_cross_attention(config, model)
    return replace(model, head_bias=_is(config, style.head_bias))


def _with_cross_attention(config: Config, model: Architecture) -> Architecture:
    """Llama 3.2 Vision: layers that attend to image tokens, with norms of queries and keys and two gates, no rotary.

    They do not run where there is no image. Eight rows of the embedding are for image tokens.
    Source: transformers 5.23.0 models/mllama/modeling_mllama.py, MllamaCrossAttentionDecoderLayer.
    """
    crossing = config.indices("cross_attention_layers")
    config.expect(crossing is not None, "cross_attention_layers", "is missing", "list the layers that attend to images")
    self_layer = model.layers[0]
    core = parts.attention(config)
    mixer = replace(core, qk_norm="head", rotary=False)
    cross = replace(self_layer, mixers=(mixer,), extra_vectors=2)
    cross_block = Block(mixers=(), feed_forward=None, norms=0, idle=(cross,))
    if crossing:
        config.note(
            "layers with cross-attention are held and do not run: the language model alone has no image to attend to"
        )
    layers = tuple(cross_block if i in (crossing or ()) else block for i, block in enumerate(model.layers))
    return replace(model, layers=layers, extra_embedding=8 * model.hidden)


def _block(config: Config, style: Style) -> Block:
    parallel = _is(config, style.parallel)
    norms = style.norms + 2 * _is(config, style.post_norms)
    return Block(
        mixers=(_attention(config, style),),
        feed_forward=_feed_forward(config, style),
        norm=style.norm,
        norms=style.parallel_norms if parallel else norms,
        parallel=parallel,
        extra_vectors=_further(config),
    )


def _attention(config: Config, style: Style) -> Attention:
    core = parts.attention(config, qkv_bias=_is(config, style.qkv_bias), out_bias=_is(config, style.out_bias))
    core = replace(core, sinks=style.sinks)
    if parts.capped(config, "attn_logit_softcapping"):
        core = replace(core, softcap=True)
    if style.qk_norm == "none" or not _is(config, style.qk_norm_flag):
        return core
    return replace(core, qk_norm=style.qk_norm, qk_norm_kind=style.qk_norm_kind)


def _feed_forward(config: Config, style: Style) -> MLP:
    if config.model_type in ("gptj", "codegen") and not config.has("ffn"):
        config.accept("ffn")
        width = 4 * config.size("hidden_size")
        return MLP(
            ffn=width, gated=False, bias=_is(config, style.mlp_bias), activation=parts.activation(config, style.act)
        )
    ffn = parts.mlp(config, gated=style.gated, bias=_is(config, style.mlp_bias), act=style.act)
    return replace(ffn, fused_projection=style.fused_gate)


def _further(config: Config) -> int:
    """Learned values outside the standard operators: xIELU's two scalars, BitNet's inner norms."""
    if config.model_type == "apertus":
        return 2
    return config.size("hidden_size") + config.size("ffn") if config.model_type == "bitnet" else 0


def _is(config: Config, flag: StyleFlag) -> bool:
    return config.flag(flag) if isinstance(flag, str) else flag


def _kinds(config: Config, style: Style) -> list[str]:
    number = config.layers()
    if style.windows == "":
        return ["full"] * number
    if style.windows == "all":
        return ["sliding" if config.count("window") else "full"] * number
    if style.windows in ("switched", "upper"):
        return _switched(config, number, style.windows == "upper")
    return parts.windows(config, number, parts.window_pattern(config, style.pattern))


def _switched(config: Config, number: int, upper: bool) -> list[str]:
    """Windows that `use_sliding_window` switches on, in Qwen from layer `max_window_layers` up."""
    on = config.flag("use_sliding_window") and config.count("window") > 0
    kinds = parts.windows(config, number, ["full"])
    if not on:
        config.accept("max_window_layers", "window")
        return ["full"] * number
    first = config.count("max_window_layers") if upper else 0
    return kinds if config.has("layer_types") else ["sliding" if i >= first else "full" for i in range(number)]


def _with_window(config: Config, block: Block, kind: str) -> Block:
    if kind == "full":
        return block
    core = block.mixers[0]
    if not isinstance(core, Attention) or kind not in ("sliding", "chunked"):
        remedy = "use full_attention or sliding_attention"
        config.problems.add("layer_types", kind, f"is not a layer of {config.model_type}", remedy)
        return block
    window = config.size("window")
    return replace(block, mixers=(replace(core, window=window),))


ROWS: dict[str, FamilyRow] = {
    name: FamilyRow(build, ClassFacts(fused_qkv=style.fused_qkv, joined_rotary=style.joined_rotary))
    for name, style in STYLES.items()
}
