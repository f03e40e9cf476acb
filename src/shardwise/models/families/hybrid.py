"""State-space models and their hybrids with attention: Mamba, Mamba-2, Jamba, Bamba, Granite 4, Falcon-H1, Zamba 2.

Sources: arXiv:2312.00752, arXiv:2405.21060, arXiv:2411.15242 and the model classes of transformers 5.23.0.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, FeedForward, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention
from shardwise.models._recurrent import Mamba1, Mamba2
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace

MAMBA = ("mamba", "linear", "linear_attention")


def mamba(config: Config) -> Architecture:
    """Return Mamba or Falcon-Mamba: one state-space mixer a layer, no feed-forward."""
    hidden = config.size("hidden_size")
    inner = round(config.scaled("expand", hidden, "ssm_expand", default=2))
    config.accept("ffn", "d_inner", "hidden_act")
    core = Mamba1(
        inner=inner,
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        dt_rank=_dt_rank(config, "time_step_rank"),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias"),
    )
    return parts.language_model(config, (Block(mixers=(core,), feed_forward=None, norms=1),) * config.layers())


def _dt_rank(config: Config, key: str) -> int:
    """The rank of the time step; "auto" and absent mean hidden / 16, rounded up."""
    if config.raw.get(key, "auto") == "auto" and key not in config.overrides:
        config.accept(key)
        return -(-config.size("hidden_size") // 16)
    return config.size(key)


def mamba2(config: Config) -> Architecture:
    """Return Mamba-2: heads * head_dim wide, one mixer a layer."""
    core = Mamba2(
        heads=config.size("ssm_heads", "num_heads"),
        head_dim=config.size("ssm_head_dim", "head_dim"),
        groups=config.size("ssm_groups"),
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        chunk=config.size("ssm_chunk", default=256),
        conv_bias=config.flag("use_conv_bias", default=True),
        proj_bias=config.flag("use_bias"),
        out_bias=config.flag("use_bias"),
    )
    config.accept("time_step_rank", "hidden_act")
    inner = round(config.scaled("expand", config.size("hidden_size"), default=2))
    rule = f"times head_dim {core.head_dim} must be expand * hidden_size = {inner}"
    config.expect(core.inner == inner, "ssm_heads", rule, f"use {inner // core.head_dim or 1} heads")
    return parts.language_model(config, (Block(mixers=(core,), feed_forward=None, norms=1),) * config.layers())


def jamba(config: Config) -> Architecture:
    """Return Jamba: one attention layer a period, Mamba elsewhere; an MoE every second layer."""
    number, hidden = config.layers(), config.size("hidden_size")
    core = replace(parts.attention(config), rotary=False)
    scan = Mamba1(
        inner=round(config.scaled("mamba_expand", hidden, default=2)),
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        dt_rank=_dt_rank(config, "mamba_dt_rank"),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias"),
        norms=True,
    )
    dense = parts.mlp(config)
    experts = parts.moe(config, "intermediate_size")
    attends = parts.every(config.size("attn_layer_period"), config.count("attn_layer_offset"), number)
    sparse = parts.every(config.size("expert_layer_period"), config.count("expert_layer_offset"), number)
    pairs = list(zip(attends, [s and experts.experts > 1 for s in sparse], strict=True))
    made = {
        (a, s): Block(mixers=(core if a else scan,), feed_forward=experts if s else dense)
        for a, s in dict.fromkeys(pairs)
    }
    return parts.language_model(config, tuple(made[pair] for pair in pairs))


def _mamba2_of_hybrid(config: Config, *, gated_norm: bool = True) -> Mamba2:
    """Mamba-2 as Bamba, Granite 4 and Falcon-H1 spell it."""
    heads = config.size("ssm_heads")
    inner = config.count("mamba_d_ssm") or round(config.scaled("mamba_expand", config.size("hidden_size"), default=2))
    word = config.raw.get("mamba_d_head")
    derived = word in (None, "auto") and not config.has("ssm_head_dim")
    width = inner // heads if derived else config.size("ssm_head_dim", "mamba_d_head")
    config.accept("mamba_d_head")
    rule = f"times head width {width} must be {inner}"
    config.expect(heads * width == inner, "ssm_heads", rule, f"use {inner // max(width, 1) or 1}")
    return Mamba2(
        heads=heads,
        head_dim=width,
        groups=config.size("ssm_groups"),
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        chunk=config.size("ssm_chunk", default=256),
        conv_bias=config.flag("mamba_conv_bias", default=True),
        proj_bias=config.flag("mamba_proj_bias"),
        out_bias=config.flag("mamba_proj_bias"),
        gated_norm=gated_norm,
    )


def bamba(config: Config) -> Architecture:
    """Return Bamba: Mamba-2 layers with attention at `attn_layer_indices`."""
    number, bias = config.layers(), config.flag("attention_bias")
    core, scan = parts.attention(config, qkv_bias=bias, out_bias=bias), _mamba2_of_hybrid(config)
    listed = config.indices("attn_layer_indices") or []
    kinds = config.sequence("layers_block_type", number) or [
        "attention" if i in listed else "mamba" for i in range(number)
    ]
    ffn = parts.mlp(config, bias=config.flag("mlp_bias"))
    made = parts.build(kinds, lambda k: Block(mixers=(scan if k in MAMBA else core,), feed_forward=ffn))
    return parts.language_model(config, made)


def granitemoehybrid(config: Config) -> Architecture:
    """Return Granite 4: Mamba-2 or attention, then a shared expert beside the MoE, or the shared expert alone."""
    number, bias = config.layers(), config.flag("attention_bias")
    kinds = config.sequence("layer_types", number) or config.sequence("layers_block_type", number) or ["mamba"] * number
    core, scan = parts.attention(config, qkv_bias=bias, out_bias=bias), _mamba2_of_hybrid(config)
    core = replace(core, rotary=config.text("position_embedding_type", default="nope") == "rope")
    shared = MLP(ffn=config.size("shared_expert_ffn"), activation=parts.activation(config), fused_projection=True)
    ffn: FeedForward = shared
    if config.count("num_experts"):
        ffn = replace(parts.moe(config, "intermediate_size"), shared=shared)
    config.accept("ffn", "experts_per_token")
    made = parts.build(kinds, lambda k: Block(mixers=(scan if k in MAMBA else core,), feed_forward=ffn))
    return parts.language_model(config, made)


def falcon_h1(config: Config) -> Architecture:
    """Return Falcon-H1: attention and Mamba-2 side by side in every layer."""
    bias = config.flag("attention_bias")
    core = parts.attention(config, qkv_bias=bias, out_bias=bias)
    scan = _mamba2_of_hybrid(config, gated_norm=config.flag("mamba_rms_norm"))
    scan = replace(scan, out_bias=config.flag("projectors_bias"))
    config.accept("mamba_expand")
    block = Block(mixers=(core, scan), feed_forward=parts.mlp(config, bias=config.flag("mlp_bias")))
    return parts.language_model(config, (block,) * config.layers())


_ZAMBA_LAYERS = (
    *(["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7),
    *(["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2),
)


def zamba2(config: Config) -> Architecture:
    """Return Zamba 2."""
    number, hidden = config.layers(), config.size("hidden_size")
    words = config.sequence("layers_block_type", number) or _by_hybrid_ids(config, number) or list(_ZAMBA_LAYERS)
    if len(words) != number:
        config.problems.add("layers_block_type", None, f"is missing for {number} layers", "list the kind of each layer")
    scan = _zamba_mixer(config, hidden)
    plain = Block(mixers=(scan,), feed_forward=None, norms=1)
    shared, memories = _transformer(config, hidden), config.size("num_mem_blocks", default=1)
    hybrids = words.count("hybrid")
    config.accept(
        "attention_hidden_size",
        "head_dim",
        "kv_channels",
        "num_query_groups",
        "ssm_head_dim",
        "layer_types",
        "hybrid_layer_ids",
    )
    layers, uses = [], 0
    for word in words:
        if word != "hybrid":
            layers.append(plain)
            continue
        at = uses % memories
        memory = replace(shared, shared_weights=f"memory {at}")
        # Each use of a block is a module with the adapters of all its uses (modeling_zamba2.py Zamba2MLP).
        owned = _owned(config, hidden, shared, instances=len(range(at, hybrids, memories)))
        layers.append(replace(plain, extras=owned, also=(memory,)))
        uses += 1
    return parts.language_model(config, tuple(layers))


def _by_hybrid_ids(config: Config, number: int) -> list[str]:
    """The kinds of layers where the file lists only which are hybrid."""
    hybrid = config.indices("hybrid_layer_ids")
    return [] if hybrid is None else ["hybrid" if i in hybrid else "mamba" for i in range(number)]


def _zamba_mixer(config: Config, hidden: int) -> Mamba2:
    heads = config.size("ssm_heads")
    inner = round(config.scaled("mamba_expand", hidden, default=2))
    config.expect(inner % heads == 0, "ssm_heads", f"must divide the inner width {inner}", "use a divisor")
    config.accept("use_conv_bias")
    return Mamba2(
        heads=heads,
        head_dim=max(inner // heads, 1),
        groups=config.size("ssm_groups"),
        state=config.size("ssm_state"),
        conv=config.size("ssm_conv"),
        chunk=config.size("ssm_chunk", default=256),
        proj_bias=config.flag("add_bias_linear"),
        out_bias=config.flag("add_bias_linear"),
    )


def _transformer(config: Config, hidden: int) -> Block:
    """The shared transformer: it reads stream and embeddings side by side, so its first norm is twice as wide."""
    heads = config.size("num_attention_heads")
    core = Attention(
        heads=heads,
        kv_heads=parts.kv_heads(config, heads),
        head_dim=max(2 * hidden // heads, 1),
        input_width=2 * hidden,
        rotary=config.flag("use_mem_rope"),
    )
    width = config.count("ffn") or 4 * hidden
    ffn = MLP(ffn=width, bias=config.flag("add_bias_linear"), activation=parts.activation(config, "gelu"),
              fused_projection=True)  # fmt: skip
    return Block(mixers=(core,), feed_forward=ffn, extra_vectors=hidden)


def _owned(config: Config, hidden: int, shared: Block, instances: int) -> tuple[Projection, ...]:
    """What each hybrid layer has for itself: a map back to the stream and low-rank adapters of the shared weights."""
    rank = config.size("adapter_rank", default=128)
    ffn = shared.feed_forward
    width = ffn.ffn if isinstance(ffn, MLP) else 1
    owned = [
        Projection(name="hybrid_linear", inputs=hidden, outputs=hidden),
        Projection(name="mlp_adapter_down", inputs=hidden, outputs=rank, instances=instances),
        Projection(name="mlp_adapter_up", inputs=rank, outputs=2 * width, instances=instances),
    ]
    for which in "qkv" if config.flag("use_shared_attention_adapter") else "":
        owned.append(Projection(name=f"{which}_adapter_down", inputs=2 * hidden, outputs=rank, instances=instances))
        owned.append(Projection(name=f"{which}_adapter_up", inputs=rank, outputs=2 * hidden, instances=instances))
    return tuple(owned)


ROWS: dict[str, FamilyRow] = {
    "mamba": FamilyRow(mamba),
    "falcon_mamba": FamilyRow(mamba),
    "mamba2": FamilyRow(mamba2),
    "jamba": FamilyRow(jamba, ClassFacts(normalised=False)),
    "bamba": FamilyRow(bamba, ClassFacts(joined_rotary=True)),
    "granitemoehybrid": FamilyRow(granitemoehybrid, ClassFacts(normalised=False)),
    "falcon_h1": FamilyRow(falcon_h1),
    "zamba2": FamilyRow(zamba2),
}
