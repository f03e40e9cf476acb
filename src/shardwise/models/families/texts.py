"""Language models inside files of several parts that no other family has: Molmo 2, DeepSeek-OCR 2, Voxtral Realtime.

Source: the model classes of transformers 5.24.0, checked to the parameter by `tests/models`.
"""

from __future__ import annotations

from shardwise.models._architecture import Architecture, Block
from shardwise.models._config import ClassFacts, Config
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.models.families.moe import dense_beside
from shardwise.records import replace

# The width between the two maps of a layer's norm that follows the delay of the sound (VoxtralRealtimeTextAdaRmsNorm).
_DELAY_WIDTH = 32


def molmo2(config: Config) -> Architecture:
    """Return Molmo 2: Qwen3's layers, or OLMo's norms over whole projections, and further rows of the embedding."""
    bias = config.flag("attention_bias")
    kind = config.text("qk_norm_type", default="qwen3")
    core = parts.attention(config, qkv_bias=bias)
    core = replace(core, qk_norm="head" if kind == "qwen3" else "full", fused_projection=True)
    config.accept("norm_after", "rope_scaling_layers")
    ffn = replace(parts.mlp(config), fused_projection=True)
    model = parts.language_model(config, (Block(mixers=(core,), feed_forward=ffn),) * config.layers())
    more = config.count("additional_vocab_size", default=0)
    return replace(model, extra_embedding=more * model.hidden)


def ocr(config: Config) -> Architecture:
    """Return DeepSeek-OCR 2: grouped-query attention, leading dense layers, shared experts."""
    number, bias = config.layers(), config.flag("attention_bias")
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    experts = parts.moe(config, shared_count=True)
    words, first = config.sequence("mlp_layer_types", number), config.count("first_dense_layers", default=1)
    sparse = [word == "sparse" for word in words] or [i >= first for i in range(number)]
    config.accept("first_dense_layers", "mlp_bias", "moe_layer_freq")
    dense = dense_beside(config, experts, sparse)
    if config.flag("mlp_bias"):
        config.problems.add("mlp_bias", True, "is not understood beside experts", "leave it out")
    blocks = {one: Block(mixers=(core,), feed_forward=experts if one else dense) for one in (True, False)}
    return parts.language_model(config, tuple(blocks[one] for one in sparse))


def voxtral_realtime(config: Config) -> Architecture:
    """Return Voxtral Realtime: Mistral's layers, each with two maps that scale its norm by the delay of the sound."""
    hidden, number = config.size("hidden_size"), config.layers()
    core = replace(parts.attention(config), window=config.count("window"))
    # One row a sequence goes through them, not one a token.
    maps = 2 * hidden * _DELAY_WIDTH
    block = Block(mixers=(core,), feed_forward=parts.mlp(config), extra_vectors=maps)
    return parts.language_model(config, (block,) * number)


ROWS: dict[str, FamilyRow] = {
    "molmo2_text": FamilyRow(molmo2),
    "deepseek_ocr2_text": FamilyRow(ocr, ClassFacts(float_router=True)),
    "unlimited_ocr_text": FamilyRow(ocr, ClassFacts(float_router=True)),
    "voxtral_realtime_text": FamilyRow(voxtral_realtime),
}
