"""DeepSeek-V4: compressed sparse attention, hyper-connections in place of the residual stream, experts everywhere.

Source: the model class of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._mixers import CompressedAttention, Indexer
from shardwise.models._model import Block, Model, Projection
from shardwise.models.families import _parts as parts
from shardwise.models.families.mixture import with_mtp

_BY_RATE = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
_RATES = {"compressed_sparse": 4, "heavily_compressed": 128}


def build(c: Config) -> Model:
    """Return DeepSeek-V4."""
    number, hidden, streams = c.layers(), c.size("hidden_size"), c.size("hc_mult")
    experts = replace(parts.moe(c, shared_count=True), correction_bias=True)
    mixes = streams * (2 + streams)
    hyper = tuple(
        Projection(name=f"hyper_connection_{i}", inputs=streams * hidden, outputs=mixes) for i in ("attention", "mlp")
    )
    base = _attention(c)

    def block(kind: str) -> Block:
        mixer = _with_rate(c, base, kind)
        return Block(mixers=(mixer,), feed_forward=experts, extras=hyper, extra_vectors=2 * (mixes + 3))

    c.accept("mlp_layer_types", "num_hash_layers", "num_key_value_heads", "qk_rope_head_dim", "attention_bias")
    c.expect(not c.flag("mlp_bias"), "mlp_bias", "is not supported", "leave it out")
    layers = parts.build(_kinds(c, number), block)
    gather = Projection(name="hyper_head", inputs=streams * hidden, outputs=streams)
    model = replace(parts.language_model(c, layers), extras=(gather,), extra_vectors=streams + 1)
    c.note("the streams of hyper-connections are counted as projections, their extra residual traffic is not")
    return with_mtp(c, model)


def _attention(c: Config) -> CompressedAttention:
    heads, groups, width = c.size("num_attention_heads"), c.size("o_groups"), c.size("head_dim")
    c.expect(
        heads * width % groups == 0, "o_groups", f"must divide heads * head_dim = {heads * width}", "use a divisor"
    )
    return CompressedAttention(
        heads=heads,
        head_dim=width,
        q_lora_rank=c.size("q_lora_rank"),
        out_groups=groups,
        out_lora_rank=c.size("o_lora_rank"),
        window=c.size("window"),
    )


def _kinds(c: Config, number: int) -> list[str]:
    """The kind of each layer: `layer_types`, or `compress_ratios`, or the class pattern."""
    if c.has("compress_ratios") and not c.has("layer_types"):
        ratios = c.indices("compress_ratios") or []
        return [_BY_RATE.get(rate, "unknown") for rate in (*ratios, *[0] * number)][:number]
    pattern = ["heavily_compressed", "heavily_compressed"]
    pattern += ["compressed_sparse" if i % 2 else "heavily_compressed" for i in range(max(number - 2, 0))]
    return parts.windows(c, number, pattern[:number])


def _with_rate(c: Config, base: CompressedAttention, kind: str) -> CompressedAttention:
    if kind == "sliding":
        return base
    if kind not in _RATES:
        rule, remedy = "is not a layer of deepseek_v4", f"use sliding, {' or '.join(_RATES)} attention"
        c.problems.add("layer_types", kind, rule, remedy)
        return base
    rate = c.section("compress_rates").size(f"{kind}_attention", default=_RATES[kind])
    if kind == "heavily_compressed":
        return replace(base, rate=rate)
    indexer = Indexer(heads=c.size("index_n_heads"), head_dim=c.size("index_head_dim"), top_k=c.size("index_topk"))
    return replace(base, rate=rate, indexer=indexer)


ROWS: dict[str, Row] = {
    "deepseek_v4": Row(build, ClassFacts(normalised=True)),
}
