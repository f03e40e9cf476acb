"""What a language model is: blocks of mixers and feed-forwards, in order, between an embedding and a head.

A `Model` says what is computed, never how it is laid out. Counts of parameters and FLOPs are folds over the ledger that
`shardwise.ops` makes of it, so no formula stands here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, Literal, TypeAlias

from shardwise.models._wrapped import Part

NormKind: TypeAlias = Literal[
    "rmsnorm",
    "rmsnorm-float",
    "rmsnorm-offset",
    "rmsnorm-no-weight",
    "layernorm",
    "layernorm-no-bias",
    "layernorm-float",
    "layernorm-no-weight",
    "none",
]
"""How a norm is learned, and where transformers applies its weights.

"rmsnorm-offset" stores its weights as an offset from one (Gemma, Qwen3-Next), "rmsnorm-float" meets them in fp32
(OLMo 2), "layernorm-float" has no bias and is written out in fp32 (Cohere).
"""
Activation: TypeAlias = Literal["silu", "gelu", "gelu-tanh", "gelu-new", "relu", "relu2", "xielu"]
"""Activations by name; "gelu-new" is the tanh GELU that transformers writes out in Python for GPT-2 and others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A linear map outside the standard operators (adapters, embedding projections), applied to every token.

    One `of_sequence` is applied to the first token of each sequence alone (poolers, classifiers).
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    of_sequence: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Softmax attention with grouped key-value heads (MHA, GQA and MQA are numbers of `kv_heads`).

    `window` and `chunk` are in tokens, 0 for none. `qk_norm` "head" normalises each head with weights of `head_dim`,
    "full" the whole projection, "heads" has weights of heads * head_dim but normalises each head. `kv_from_earlier`
    marks a layer that reads the key-value cache of an earlier layer and so has no key and value projections.
    `shared_key_value` makes one projection serve as key and value. `output_gate` has a gate of every output element,
    `head_gate` one of every head. `v_norm` has no weights. `rotary` is whether positions rotate queries and keys,
    `softcap` whether scores go through a tanh. `fused_projection` is one matrix for queries, keys and values, of which
    the values are a view; `joined_rotary` puts heads together from a rotated and an unrotated part.
    """

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "heads", "full"] = "none"
    qk_norm_kind: NormKind = "rmsnorm"
    v_norm: bool = False
    sinks: bool = False
    output_gate: bool = False
    head_gate: bool = False
    rotary: bool = True
    window: int = 0
    chunk: int = 0
    causal: bool = True
    shared_key_value: bool = False
    kv_from_earlier: bool = False
    input_width: int = 0
    softcap: bool = False
    fused_projection: bool = False
    joined_rotary: bool = False

    @property
    def value_dim(self) -> int:
        """The width of one value head."""
        return self.v_head_dim or self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Indexer:
    """The selector of sparse attention (DeepSeek-V3.2): small heads that pick `top_k` past tokens.

    One that is `shared` takes the selection of an earlier layer and has no weights (GLM-5, arXiv:2603.12201).
    """

    heads: int
    head_dim: int
    top_k: int
    shared: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values through a low-rank latent.

    `q_lora_rank` 0 means a full-rank query projection. `latent_norm` "none" leaves the latents as they are (Megatron-LM
    without --qk-layernorm).
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    latent_norm: NormKind = "rmsnorm"
    indexer: Indexer | None = None
    causal: bool = True

    @property
    def qk_head_dim(self) -> int:
        """The width of one query head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressedAttention:
    """DeepSeek-V4's attention: one key-value head, a window, and past tokens compressed `rate` to one beside it.

    Keys are values. The query goes through `q_lora_rank`, the output through `out_groups` maps of `out_lora_rank` each.
    `rate` 0 is the window alone. An indexed layer compresses overlapping windows and picks `indexer.top_k` of them.
    """

    heads: int
    head_dim: int
    q_lora_rank: int
    out_groups: int
    out_lora_rank: int
    window: int
    rate: int = 0
    indexer: Indexer | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba1:
    """Selective state space (arXiv:2312.00752); `inner` = expand * hidden. `norms` are Jamba's on dt, B and C."""

    inner: int
    state: int
    conv: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False
    norms: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2:
    """State space duality (arXiv:2405.21060); `inner` = heads * head_dim. `proj_bias` is of the input projection."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int = 256
    conv_bias: bool = True
    proj_bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True

    @property
    def inner(self) -> int:
        """The width of the state-space stream."""
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDelta:
    """Gated delta rule linear attention (arXiv:2412.06464).

    `style` names the projections around the recurrence: "gated-delta-net" (Qwen3-Next), or "kda" (Kimi Linear, whose
    decay and output gates go through a low rank of `value_dim`).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int
    style: Literal["gated-delta-net", "kda"] = "gated-delta-net"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortConv:
    """Gated short convolution (LFM2)."""

    width: int
    conv: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentGate:
    """Real-gated linear recurrent unit with its two branches (Griffin, arXiv:2402.19427)."""

    width: int
    heads: int
    conv: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rwkv:
    """RWKV-4 time mixing (arXiv:2305.13048)."""

    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Mlstm:
    """Matrix LSTM cell of xLSTM (arXiv:2405.04517); dims are per head."""

    heads: int
    qk_dim: int
    v_dim: int
    bias: bool = False


Mixer: TypeAlias = (
    Attention
    | LatentAttention
    | CompressedAttention
    | Mamba1
    | Mamba2
    | GatedDelta
    | ShortConv
    | RecurrentGate
    | Rwkv
    | Mlstm
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MLP:
    """A feed-forward of width `ffn`; gated ones have a gate and an up projection; style "rwkv" adds a receptance."""

    ffn: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"
    style: Literal["standard", "rwkv"] = "standard"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoE:
    """Routed experts of width `ffn`, `top_k` per token, with optional shared experts that every token visits.

    `latent` is the width the routed experts work on (0: hidden). `correction_bias` is one router value per expert, a
    buffer in some implementations and a parameter (`router_bias`) in others. `zero_experts` have no weights and cost
    nothing. `normalised` is whether the weights of the chosen experts are made to sum to one, `float_weights` whether
    they stay in fp32 (Mixtral in transformers), `float_router` whether the router works on an fp32 copy of its input.
    `clamped` is whether gate and up are held within limits before the activation (gpt-oss).
    """

    experts: int
    top_k: int
    ffn: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"
    router_bias: bool = False
    correction_bias: bool = False
    shared: MLP | None = None
    shared_gate: bool = False
    latent: int = 0
    zero_experts: int = 0
    normalised: bool = False
    float_weights: bool = False
    float_router: bool = False
    clamped: bool = False


FeedForward: TypeAlias = MLP | MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One layer: mixers on the residual stream (several run side by side), then feed-forwards, with `norms` norms.

    `parallel` marks a block whose mixer and feed-forward read the same input and are added together. Blocks with the
    same non-empty `shared_weights` own one copy of their weights. `extras` are further projections of the block,
    `extra_norms` further norms of the residual stream, `extra_vectors` the number of further learned values outside
    the operators. `also` are blocks inside this layer beside its own mixers and feed-forward (LongCat's second half,
    Zamba's shared transformer), which may themselves share weights. `idle` ones are held and never run: layers that
    attend to the tokens of another part, where the language model is alone.
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    norm: NormKind = "rmsnorm"
    norms: int = 2
    extra_norms: int = 0
    parallel: bool = False
    shared_weights: str = ""
    extras: tuple[Projection, ...] = ()
    extra_vectors: int = 0
    also: tuple[Block, ...] = ()
    idle: tuple[Block, ...] = ()


def _looks_back(block: Block) -> bool:
    own = all(m.causal for m in block.mixers if isinstance(m, Attention | LatentAttention))
    return own and all(map(_looks_back, block.also))


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A language model. Build one with `Model.load`; every width is stored, none is derived later.

    `layers` lists the blocks in order (equal blocks are equal values). `mtp` are multi-token-prediction layers, each
    with a 2 * hidden to hidden projection and `mtp_norms` norms beside its block. `logit_softcap` is whether logits go
    through a tanh.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    layers: tuple[Block, ...]
    tied: bool = False
    norm: NormKind = "rmsnorm"
    final_norm: bool = True
    embedding_norm: bool = False
    positions: int = 0
    token_types: int = 0
    head: bool = True
    head_bias: bool = False
    logit_softcap: bool = False
    embedding: bool = True
    max_context: int = 0
    dropout: bool = False
    mtp: tuple[Block, ...] = ()
    mtp_norms: int = 3
    extras: tuple[Projection, ...] = ()
    embedding_width: int = 0
    extra_embedding: int = 0
    extra_vectors: int = 0
    quantization: str = ""
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def load(
        cls, name_or_path: str | PathLike[str], overrides: Mapping[str, Any] | None = None, *, part: Part = ""
    ) -> Model:
        """Return the model of a catalogue name, a config.json, a directory that holds one, or a hub id.

        A file of several parts is refused unless `part` "text" asks for its language model alone.

        >>> Model.load("gpt2").hidden
        768
        """
        from shardwise.models._load import load_model

        return load_model(name_or_path, overrides, part=part)

    @classmethod
    def from_sizes(cls, **fields: Any) -> Model:
        """Return the model of some sizes alone, with every default that was taken among its assumptions.

        >>> Model.from_sizes(num_layers=12, hidden_size=768, num_experts=512).layers[0].feed_forward.experts
        512
        """
        from shardwise.models._sizes import model_from_sizes

        return model_from_sizes(fields)

    @property
    def kinds(self) -> Counter[Block]:
        """How many layers there are of each distinct block, in order of first appearance."""
        return Counter(self.layers)

    @property
    def generates(self) -> bool:
        """Whether it can make tokens one after another: no layer looks at tokens that follow."""
        return all(map(_looks_back, self.kinds))

    @property
    def num_layers(self) -> int:
        """The number of layers, multi-token-prediction layers not counted."""
        return len(self.layers)
