"""Zamba 2: Mamba-2 layers, some of which first run one of a few transformers that they share (arXiv:2411.15242)."""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import Config, Row
from shardwise.models._mixers import Attention
from shardwise.models._model import MLP, Block, Model, Projection
from shardwise.models._recurrent import Mamba2
from shardwise.models.families import _parts as parts

_DEFAULT = (
    *(["mamba"] + (["mamba"] * 5 + ["hybrid"]) * 7),
    *(["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2),
)


def build(c: Config) -> Model:
    """Return Zamba 2."""
    number, hidden = c.layers(), c.size("hidden_size")
    words = c.sequence("layers_block_type", number) or _by_index(c, number) or list(_DEFAULT)
    if len(words) != number:
        c.problems.add("layers_block_type", None, f"is missing for {number} layers", "list the kind of each layer")
    scan = _mamba(c, hidden)
    plain = Block(mixers=(scan,), feed_forward=None, norms=1)
    shared, memories = _transformer(c, hidden), c.size("num_mem_blocks", default=1)
    owned = _owned(c, hidden, shared)
    c.accept(
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
        memory = replace(shared, shared_weights=f"memory {uses % memories}")
        layers.append(replace(plain, extras=owned, also=(memory,)))
        uses += 1
    return parts.language_model(c, tuple(layers))


def _by_index(c: Config, number: int) -> list[str]:
    """The kinds of layers where the file lists only which are hybrid."""
    hybrid = c.indices("hybrid_layer_ids")
    return [] if hybrid is None else ["hybrid" if i in hybrid else "mamba" for i in range(number)]


def _mamba(c: Config, hidden: int) -> Mamba2:
    heads = c.size("ssm_heads")
    inner = round(c.scaled("mamba_expand", hidden, default=2))
    c.expect(inner % heads == 0, "ssm_heads", f"must divide the inner width {inner}", "use a divisor")
    c.accept("use_conv_bias")
    return Mamba2(
        heads=heads,
        head_dim=max(inner // heads, 1),
        groups=c.size("ssm_groups"),
        state=c.size("ssm_state"),
        conv=c.size("ssm_conv"),
        chunk=c.size("ssm_chunk", default=256),
        proj_bias=c.flag("add_bias_linear"),
        out_bias=c.flag("add_bias_linear"),
    )


def _transformer(c: Config, hidden: int) -> Block:
    """The shared transformer: it reads stream and embeddings side by side, so its first norm is twice as wide."""
    heads = c.size("num_attention_heads")
    core = Attention(
        heads=heads,
        kv_heads=parts.kv_heads(c, heads),
        head_dim=max(2 * hidden // heads, 1),
        input_width=2 * hidden,
        rotary=c.flag("use_mem_rope"),
    )
    width = c.count("ffn") or 4 * hidden
    ffn = MLP(ffn=width, bias=c.flag("add_bias_linear"), activation=parts.activation(c, "gelu"))
    return Block(mixers=(core,), feed_forward=ffn, extra_vectors=hidden)


def _owned(c: Config, hidden: int, shared: Block) -> tuple[Projection, ...]:
    """What each hybrid layer has for itself: a map back to the stream and low-rank adapters of the shared weights."""
    rank = c.size("adapter_rank", default=128)
    ffn = shared.feed_forward
    width = ffn.ffn if isinstance(ffn, MLP) else 1
    owned = [
        Projection(name="hybrid_linear", inputs=hidden, outputs=hidden),
        Projection(name="mlp_adapter_down", inputs=hidden, outputs=rank),
        Projection(name="mlp_adapter_up", inputs=rank, outputs=2 * width),
    ]
    for which in "qkv" if c.flag("use_shared_attention_adapter") else "":
        owned.append(Projection(name=f"{which}_adapter_down", inputs=2 * hidden, outputs=rank))
        owned.append(Projection(name=f"{which}_adapter_up", inputs=rank, outputs=2 * hidden))
    return tuple(owned)


ROWS: dict[str, Row] = {
    "zamba2": Row(build),
}
