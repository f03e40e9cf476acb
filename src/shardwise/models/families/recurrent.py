"""Recurrent and convolutional models: RecurrentGemma, RWKV-4, xLSTM, LFM2.

Sources: arXiv:2402.19427, arXiv:2305.13048, arXiv:2405.04517 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._model import MLP, Block, FeedForward, Model
from shardwise.models._recurrent import Mixer, Mlstm, RecurrentGate, Rwkv, ShortConv
from shardwise.models.families import _parts as parts


def recurrent_gemma(c: Config) -> Model:
    """Return RecurrentGemma: two recurrent blocks to each windowed attention; the file's ffn counts both halves."""
    number, hidden = c.layers(), c.size("hidden_size")
    bias, window = c.flag("attention_bias"), c.size("window")
    core = replace(parts.attention(c, qkv_bias=bias, out_bias=True), window=window)
    gate = RecurrentGate(width=c.count("lru_width") or hidden, heads=core.heads, conv=c.size("conv1d_width"))
    pattern = c.words("block_types") or ["recurrent", "recurrent", "attention"]
    ffn = MLP(ffn=c.size("ffn") // 2, bias=True, activation=parts.activation(c, "gelu_pytorch_tanh"))
    kinds = [pattern[i % len(pattern)] for i in range(number)]
    c.accept("layers_block_type", "layer_types")
    mixers: dict[str, Mixer] = {"attention": core, "recurrent": gate}
    layers = parts.build(kinds, lambda k: Block(mixers=(mixers.get(k, core),), feed_forward=ffn))
    return parts.renormed(parts.language_model(c, layers), "rmsnorm-offset")


def rwkv(c: Config) -> Model:
    """Return RWKV-4: time mixing and channel mixing, a norm behind the embedding."""
    hidden = c.size("hidden_size")
    width = c.count("attention_hidden_size") or hidden
    ffn = MLP(ffn=c.count("ffn") or 4 * hidden, gated=False, activation="relu2", style="rwkv")
    block = Block(mixers=(Rwkv(width=width),), feed_forward=ffn, norm="layernorm")
    model = parts.language_model(c, (block,) * c.layers(), norm="layernorm")
    return replace(model, embedding_norm=True)


def xlstm(c: Config) -> Model:
    """Return xLSTM: a matrix LSTM and a gated feed-forward a layer."""
    hidden, heads, bias = c.size("hidden_size", "embedding_dim"), c.size("num_heads"), c.flag("use_bias")
    widths = [int(c.scaled(key, hidden, default=d)) for key, d in (("qk_dim_factor", 0.5), ("v_dim_factor", 1.0))]
    for key, width in zip(("qk_dim_factor", "v_dim_factor"), widths, strict=True):
        c.expect(width % heads == 0, key, f"gives {width}, not a multiple of {heads} heads", "use another factor")
    step = c.size("ffn_round_up_to_multiple_of", default=64)
    wide = int((c.scaled("ffn_proj_factor", hidden, default=2.667) + step - 1) // step * step)
    cell = Mlstm(heads=heads, qk_dim=max(widths[0] // heads, 1), v_dim=max(widths[1] // heads, 1), bias=bias)
    block = Block(mixers=(cell,), feed_forward=MLP(ffn=wide, bias=bias), norm="layernorm" if bias else "rmsnorm")
    c.accept("add_out_norm", "ssm_chunk")
    return parts.language_model(c, (block,) * c.layers())


def lfm2(c: Config) -> Model:
    """Return LFM2 or LFM2-MoE: gated short convolutions with attention in between."""
    number = c.layers()
    core = replace(parts.attention(c), qk_norm="head")
    conv = ShortConv(width=c.size("hidden_size"), conv=c.size("conv_L_cache"), bias=c.flag("conv_bias"))
    kinds, widths = _lfm2_kinds(c, number), _lfm2_feed_forwards(c, number)
    pairs = list(zip(kinds, widths, strict=True))
    made = {
        (kind, ffn): Block(mixers=(conv if kind == "conv" else core,), feed_forward=ffn)
        for kind, ffn in dict.fromkeys(pairs)
    }
    return replace(parts.language_model(c, tuple(made[pair] for pair in pairs)), tied=c.flag("tied", "tie_embedding"))


def _lfm2_kinds(c: Config, number: int) -> list[str]:
    listed = c.indices("full_attn_idxs")
    if c.has("layer_types") or c.model_type == "lfm2_moe":
        c.expect(c.has("layer_types"), "layer_types", "is missing", "list full_attention or conv for each layer")
        return parts.windows(c, number, ("full",))
    return ["full" if listed is None or i in listed else "conv" for i in range(number)]


def _lfm2_feed_forwards(c: Config, number: int) -> list[FeedForward]:
    if c.model_type == "lfm2":
        return [MLP(ffn=_lfm2_width(c))] * number
    first = c.count("first_dense_layers")
    experts = replace(parts.moe(c), correction_bias=c.flag("use_expert_bias", default=True))
    dense: FeedForward = parts.mlp(c) if first else experts
    return [dense if i < first else experts for i in range(number)]


def _lfm2_width(c: Config) -> int:
    """LFM2 takes two thirds of the stated width, times a factor, rounded up to a multiple."""
    width = c.size("ffn", "block_ff_dim")
    multiple = c.size("block_multiple_of", default=256)
    c.accept("block_ffn_dim_multiplier")
    if not c.flag("block_auto_adjust_ff_dim", default=True):
        return width
    wide = c.scaled("block_ffn_dim_multiplier", max(int(2 * width / 3), 1), default=1.0)
    return multiple * -(-int(wide) // multiple)


ROWS: dict[str, Row] = {
    "recurrent_gemma": Row(recurrent_gemma, ClassFacts(joined_rotary=True)),
    "rwkv": Row(rwkv),
    "xlstm": Row(xlstm),
    "lfm2": Row(lfm2),
    "lfm2_moe": Row(lfm2),
}
