"""Mixtures whose windowed layers differ from their full ones: Trinity (AFMoE), MiMo-V2-Flash and Step-3.5.

Source: the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import ClassFacts, Config, Row
from shardwise.models._mixers import Attention
from shardwise.models._model import MLP, Block, FeedForward, Model, MoE
from shardwise.models.families import _parts as parts
from shardwise.models.families.mixture import with_mtp


def _assemble(
    c: Config, kinds: list[str], sparse: list[bool], cores: dict[str, Attention], experts: MoE, norms: int = 2
) -> Model:
    """Return the model whose layers take their attention by kind and their feed-forward by whether they are sparse."""
    dense: FeedForward = experts if all(sparse) else parts.mlp(c)
    pairs = list(zip(kinds, sparse, strict=True))
    made = {
        (k, s): Block(mixers=(cores.get(k, cores["full"]),), feed_forward=experts if s else dense, norms=norms)
        for k, s in dict.fromkeys(pairs)
    }
    return parts.language_model(c, tuple(made[pair] for pair in pairs))


def afmoe(c: Config) -> Model:
    """Return AFMoE: a gate on every attention output, four norms, router biases that are parameters."""
    number, window = c.layers(), c.size("window")
    c.expect(not c.flag("attention_bias"), "attention_bias", "is not supported for afmoe", "leave it out")
    core = replace(parts.attention(c), qk_norm="head", output_gate=True)
    period = c.repeats("global_attn_every_n_layers", default=4) or 1
    kinds = parts.windows(c, number, ("sliding",) * (period - 1) + ("full",))
    experts = replace(parts.moe(c, shared_count=True), router_bias=True)
    first = c.count("first_dense_layers")
    sparse = [i >= first for i in range(number)]
    return _assemble(c, kinds, sparse, {"full": core, "sliding": replace(core, window=window)}, experts, norms=4)


def mimo_v2_flash(c: Config) -> Model:
    """Return MiMo-V2-Flash: windowed layers have twice the key-value heads, and sinks."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(parts.attention(c, qkv_bias=bias), v_head_dim=c.size("v_head_dim"))
    kv = c.size("swa_num_key_value_heads", default=2 * core.kv_heads)
    c.expect(core.heads % kv == 0, "num_key_value_heads", f"doubled must divide {core.heads} heads", "use fewer")
    local = replace(core, kv_heads=kv, sinks=True, window=c.count("sliding_window_size") or c.size("window"))
    given = c.sequence("hybrid_layer_pattern", number, int)
    kinds = ["sliding" if swa else "full" for swa in given]
    kinds = kinds or parts.windows(c, number, _mimo_pattern(number))
    experts = replace(parts.moe(c), correction_bias=True)
    c.accept("window", "num_shared_experts", "swa_num_attention_heads", "swa_head_dim", "swa_v_head_dim")
    return _assemble(c, kinds, _mimo_sparse(c, number), {"full": core, "sliding": local}, experts)


def _mimo_pattern(number: int) -> tuple[str, ...]:
    return tuple("full" if i == 0 or (i + 1) % 6 == 0 else "sliding" for i in range(number))


def _mimo_sparse(c: Config, number: int) -> list[bool]:
    words, numbers = c.sequence("mlp_layer_types", number), c.sequence("moe_layer_freq", number, int)
    if words:
        return [word == "sparse" for word in words]
    return [bool(n) for n in numbers] or [i > 0 for i in range(number)]


def step3p5(c: Config) -> Model:
    """Return Step-3.5: a gate for each head, more heads in windowed layers, a shared expert."""
    number, bias = c.layers(), c.flag("attention_bias")
    core = replace(
        parts.attention(c, qkv_bias=bias, out_bias=bias),
        qk_norm="head",
        qk_norm_kind="rmsnorm-offset",
        head_gate=c.flag("gating", default=True),
    )
    heads = c.count("num_sliding_attention_heads") or core.heads
    local = replace(core, heads=heads, window=c.count("window"))
    kinds = parts.windows(c, number, ("full",))
    words = c.sequence("mlp_layer_types", number)
    sparse = [word == "sparse" for word in words] or [i >= 3 for i in range(number)]
    mlp_bias = c.flag("mlp_bias")
    c.expect(not mlp_bias, "mlp_bias", "is not supported for step3p5", "leave it out")
    experts = replace(parts.moe(c), correction_bias=True)
    shared = MLP(ffn=c.size("shared_expert_ffn"), activation=experts.activation)
    model = _assemble(c, kinds, sparse, {"full": core, "sliding": local}, replace(experts, shared=shared))
    c.accept("per_layer_config", "mtp_layer_types", "mtp_mlp_layer_types")
    return with_mtp(c, parts.renormed(model, "rmsnorm-offset"))


ROWS: dict[str, Row] = {
    "afmoe": Row(afmoe, ClassFacts(normalised=True)),
    "mimo_v2_flash": Row(mimo_v2_flash, ClassFacts(float_router=True, joined_rotary=True)),
    "step3p5": Row(step3p5, ClassFacts(normalised=True, joined_rotary=True)),
}
