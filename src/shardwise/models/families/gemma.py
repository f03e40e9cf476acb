"""Gemma 3n and Gemma 4: embeddings for each layer, layers that read an earlier layer's cache, adapters.

Source: the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace

_PATTERN_3N = ("sliding",) * 4 + ("full",)
_PATTERN_4 = ("sliding",) * 5 + ("full",)


def _core(config: Config) -> Attention:
    bias = config.flag("attention_bias")
    return replace(parts.attention(config, qkv_bias=bias, out_bias=bias), qk_norm="head", v_norm=True)


def _reuses(config: Config, number: int) -> list[bool]:
    """The last `num_kv_shared_layers` layers read the cache of the last layer of their kind before them."""
    shared = config.count("num_kv_shared_layers")
    config.expect(shared < number, "num_kv_shared_layers", f"must be less than the {number} layers", "use fewer")
    return [i >= number - shared for i in range(number)]


def _widths(config: Config, number: int) -> list[int]:
    """The feed-forward width of each layer: one for all, or a list."""
    if not isinstance(config.raw.get("intermediate_size"), Sequence) or "ffn" in config.overrides:
        return [config.size("ffn")] * number
    return config.sequence("intermediate_size", number, int) or [1] * number


def _layer_inputs(config: Config, model: Architecture, number: int) -> Architecture:
    """Embeddings for each layer: one wide table, a projection of the stream to the same width, and their norm."""
    width = config.count("hidden_size_per_layer_input", default=0)
    if not width:
        config.accept("vocab_size_per_layer_input")
        return model
    rows = config.size("vocab_size_per_layer_input")
    projection = Projection(name="per_layer_projection", inputs=model.hidden, outputs=number * width)
    return replace(
        model,
        extras=(*model.extras, projection),
        extra_embedding=rows * number * width,
        extra_vectors=model.extra_vectors + width,
    )


def _gate(config: Config, hidden: int) -> tuple[Projection, ...]:
    """What lets a layer's own embedding into the stream."""
    width = config.count("hidden_size_per_layer_input", default=0)
    if not width:
        return ()
    return (
        Projection(name="per_layer_gate", inputs=hidden, outputs=width),
        Projection(name="per_layer_out", inputs=width, outputs=hidden),
    )


def _altup(hidden: int, streams: int) -> tuple[Projection, ...]:
    """AltUp's small maps: which stream a token reads and how the others are corrected."""
    return (
        Projection(name="altup_router", inputs=hidden, outputs=streams),
        Projection(name="altup_predict", inputs=streams, outputs=streams * streams),
        Projection(name="altup_correct", inputs=streams, outputs=streams),
    )


def gemma3n(config: Config) -> Architecture:
    """Return Gemma 3n: AltUp streams, a low-rank LAuReL branch and layer embeddings around Gemma 3's layer."""
    number, hidden, rank = config.layers(), config.size("hidden_size"), config.size("laurel_rank")
    core, window, streams = _core(config), config.size("window"), config.repeats("altup_num_inputs", default=4)
    laurel = (
        Projection(name="laurel_left", inputs=hidden, outputs=rank),
        Projection(name="laurel_right", inputs=rank, outputs=hidden),
    )
    extras = (*_altup(hidden, streams), *laurel, *_gate(config, hidden))
    act = parts.activation(config, "gelu_pytorch_tanh")

    def block(kind: str, reuses: bool, width: int) -> Block:
        mixer = replace(core, window=window if kind == "sliding" else 0, kv_from_earlier=reuses)
        ffn = MLP(ffn=width, activation=act)
        return Block(mixers=(mixer,), feed_forward=ffn, norms=4, extra_norms=3, extras=extras, extra_vectors=hidden)

    kinds = parts.windows(config, number, _PATTERN_3N)
    keys = list(zip(kinds, _reuses(config, number), _widths(config, number), strict=True))
    made = {key: block(*key) for key in dict.fromkeys(keys)}
    model = parts.language_model(config, tuple(made[key] for key in keys))
    outer = tuple(
        Projection(name=f"altup_{way}_{i}", inputs=hidden, outputs=hidden)
        for way in ("in", "out")
        for i in range(1, streams)
    )
    return _layer_inputs(config, replace(model, extras=outer), number)


def gemma4(config: Config) -> Architecture:
    """Return Gemma 4: wider heads in full layers, keys that serve as values, an MoE beside the dense part."""
    number, hidden = config.layers(), config.size("hidden_size")
    kinds = parts.windows(config, number, _PATTERN_4)
    if kinds[-1] != "full":
        config.note("the last layer is full attention, as the model class makes it")
        kinds[-1] = "full"
    double = 2 if config.flag("use_double_wide_mlp") else 1
    local, wide = _gemma4_cores(config)
    width, gate = config.size("ffn"), _gate(config, hidden)

    def block(kind: str, reuses: bool) -> Block:
        mixer = replace(local if kind == "sliding" else wide, kv_from_earlier=reuses)
        ffn, norms, vectors = _gemma4_ffn(config, width * (double if reuses else 1), hidden)
        extra = norms + (1 if gate else 0)
        return Block(mixers=(mixer,), feed_forward=ffn, norms=4, extra_norms=extra, extras=gate, extra_vectors=vectors)

    keys = list(zip(kinds, _reuses(config, number), strict=True))
    made = {key: block(*key) for key in dict.fromkeys(keys)}
    return _layer_inputs(config, parts.language_model(config, tuple(made[key] for key in keys)), number)


def _gemma4_cores(config: Config) -> tuple[Attention, Attention]:
    """Windowed and full attention: the full one has its own head width and number of key-value heads."""
    local, tied = _core(config), config.flag("attention_k_eq_v")
    kv = config.count("num_global_key_value_heads") if tied else 0
    config.accept("num_global_key_value_heads")
    width, kv = _full_layer(config, kv or local.kv_heads)
    wide = replace(local, head_dim=width, kv_heads=kv, shared_key_value=tied)
    return replace(local, window=config.size("window")), wide


def _full_layer(config: Config, kv: int) -> tuple[int, int]:
    """Head width and key-value heads of full layers, from their own keys or from `per_layer_config`."""
    by_layer = config.raw.get("per_layer_config")
    config.accept("per_layer_config")
    if isinstance(by_layer, dict) and not config.has("global_head_dim"):
        own: object = next(iter(by_layer.values()), {})
        config.expect(
            isinstance(own, dict), "per_layer_config", "must hold an object for each layer", "write { } for each"
        )
        first = Config(own if isinstance(own, dict) else {}, config.model_type)
        first.problems = config.problems
        return first.size("head_dim", default=config.size("head_dim")), first.size("num_key_value_heads", default=kv)
    return config.size("global_head_dim", default=512), kv


def _gemma4_ffn(config: Config, width: int, hidden: int) -> tuple[FeedForward, int, int]:
    """The feed-forward, the norms it adds and the scales of its router."""
    act = parts.activation(config, "gelu_pytorch_tanh")
    dense = MLP(ffn=width, activation=act)
    if not config.flag("enable_moe_block"):
        config.accept("num_experts", "experts_per_token", "expert_ffn")
        return dense, 0, 0
    experts = replace(parts.moe(config, act="gelu_pytorch_tanh"), shared=dense, router_norm=True)
    return experts, 3, hidden + experts.experts


ROWS: dict[str, FamilyRow] = {
    "gemma3n_text": FamilyRow(gemma3n, ClassFacts(norm="rmsnorm-power")),
    "gemma4_text": FamilyRow(gemma4, ClassFacts(normalised=True, float_weights=True, norm="rmsnorm-power")),
    "gemma4_unified_text": FamilyRow(gemma4, ClassFacts(normalised=True, float_weights=True, norm="rmsnorm-power")),
}
