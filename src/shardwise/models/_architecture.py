"""What a language model is: blocks of mixers and feed-forwards, in order, between an embedding and a head.

An `Architecture` says what is computed, never how it is laid out. Counts of parameters and FLOPs are folds over the
ledger that `shardwise.ops` makes of it, so no formula stands here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from functools import cached_property
from typing import Literal, Self, TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.models._mixers import Mixer, NormKind
from shardwise.records import dataclass, replace

Activation: TypeAlias = Literal["silu", "gelu", "gelu-tanh", "gelu-new", "quick-gelu", "relu", "relu2", "xielu"]
"""Activations by name; "gelu-new" is the tanh GELU that transformers writes out in Python for GPT-2 and others, and
"quick-gelu" the one by a sigmoid, written out too (CLIP)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Projection:
    """A linear map outside the standard operators (adapters, embedding projections), applied to every token.

    One `of_sequence` is applied to the first token of each sequence alone (poolers, classifiers). `besides` is the
    number of tokens of a sequence that it is not applied to (class tokens and registers beside patches). What is no
    `linear` layer of its class, but a convolution or a parameter, has no adapters. Of several `instances` in a layer
    one runs; the weights of the others are those of other layers. What mixes residual `streams` around a branch reads
    all of them.
    """

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    of_sequence: bool = False
    besides: int = 0
    linear: bool = True
    instances: int = 1
    streams: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class MLP:
    """A feed-forward of width `ffn`; gated ones have a gate and an up projection; style "rwkv" adds a receptance.

    `fused_projection` is one linear layer for gate and up.
    """

    ffn: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"
    style: Literal["standard", "rwkv"] = "standard"
    fused_projection: bool = False

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Return what tensor parallelism divides, by what it is."""
        return (("ffn width", self.ffn),)

    def modules(self) -> tuple[str, ...]:
        """Return the modules that Megatron recomputes by name (core/transformer/transformer_config.py)."""
        return ("mlp", "mlp_act")


@dataclass(frozen=True, kw_only=True, slots=True)
class MoE:
    """Routed experts of width `ffn`, `top_k` per token, with optional shared experts that every token visits.

    `latent` is the width the routed experts work on (0: hidden). `correction_bias` is one router value per expert, a
    buffer in some implementations and a parameter (`router_bias`) in others. `zero_experts` have no weights and cost
    nothing. `normalised` is whether the weights of the chosen experts are made to sum to one, `float_weights` whether
    they stay in fp32 (Mixtral in transformers), `float_router` whether the router works on an fp32 copy of its input.
    `clamped` is whether gate and up are held within limits before the activation (gpt-oss), `scaled_gate` whether its
    sigmoid is of a multiple of the gate, and one is added to up. `chosen_softmax` is whether the router's softmax is of
    the chosen experts alone, `router_norm` whether it reads a norm of its own of the stream, with learned scales (Gemma
    4), `all_tokens` whether the class hands every token to every expert, with zeros where not chosen (Llama 4).
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
    scaled_gate: bool = False
    chosen_softmax: bool = False
    router_norm: bool = False
    all_tokens: bool = False

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Return what tensor parallelism divides, by what it is; routed experts are split by etp."""
        return (("shared expert width", self.shared.ffn),) if self.shared is not None else ()

    def modules(self) -> tuple[str, ...]:
        """Return the modules that Megatron recomputes by name (core/transformer/transformer_config.py)."""
        return ("moe", "moe_act") if self.shared is None else ("moe", "moe_act", "shared_experts")


FeedForward: TypeAlias = MLP | MoE


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One layer: mixers on the residual stream (several run side by side), then feed-forwards, with `norms` norms.

    `parallel` marks a block whose mixer and feed-forward read the same input and are added together. Blocks with the
    same non-empty `shared_weights` own one copy of their weights. `branch_scale` multiplies the output of each branch
    with one learned value a channel (LayerScale, arXiv:2103.17239). `extras` are further projections of the block,
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
    branch_scale: bool = False
    shared_weights: str = ""
    extras: tuple[Projection, ...] = ()
    extra_vectors: int = 0
    also: tuple[Block, ...] = ()
    idle: tuple[Block, ...] = ()

    @property
    def experts(self) -> MoE | None:
        """Its own feed-forward where that is a mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, MoE) else None

    @property
    def dense(self) -> MLP | None:
        """Its own feed-forward where that is dense."""
        return self.feed_forward if isinstance(self.feed_forward, MLP) else None

    @property
    def moes(self) -> tuple[MoE, ...]:
        """Its own mixture of experts, and those of the blocks inside it."""
        own = (self.experts,) if self.experts is not None else ()
        return (*own, *(moe for block in self.also for moe in block.moes))

    @property
    def has_experts(self) -> bool:
        """Whether its feed-forward, or one inside it, is a mixture of experts."""
        return bool(self.moes)

    def splits(self) -> tuple[tuple[str, int], ...]:
        """Return what tensor parallelism divides, by what it is."""
        forward = self.feed_forward.splits() if self.feed_forward is not None else ()
        return (*(split for mixer in self.mixers for split in mixer.splits()), *forward)

    def modules(self) -> frozenset[str]:
        """Return the modules that can be recomputed by name."""
        mixing = {name for mixer in self.mixers for name in mixer.modules()}
        forward = self.feed_forward.modules() if self.feed_forward is not None else ()
        return frozenset({*mixing, *forward, *(("layernorm",) if self.norms else ())})

    @property
    def is_causal(self) -> bool:
        """Whether every mixer sees only the tokens before a token, and itself."""
        return all(mixer.is_causal for mixer in self.mixers) and all(block.is_causal for block in self.also)


MOST_PREDICTIONS = 32

STATE_TYPES = {"auto": 0.0, "float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
"""Bytes of an element of a recurrent state by the word of a model's file, 0 where that leaves it to the engine.

github.com/vllm-project/vllm v0.33.0 vllm/config/cache.py, MambaDType.
"""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """The layers of a language model and what is around them; every width is stored, none is derived later.

    `layers` lists the blocks in order (equal blocks are equal values). `mtp` are multi-token-prediction layers, each
    with a 2 * hidden to hidden projection and `mtp_norms` norms beside its block. `logit_softcap` is whether logits go
    through a tanh. `tower_parameters` are of the towers of images and sound beside it, which engines load and nothing
    else here counts; 0 where there are none or their sizes are not known. `state_types` are the keys by which the file
    names the type of recurrent states, each with it. `rotary_factor` is by how much linear scaling lengthens positions,
    0 where none is scaled so. `stated_context` is the context of its file where `max_context` is a shorter one, which a
    server takes requests of; 0 where they are one.
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
    tower_parameters: int = 0
    rotary_factor: float = 0.0
    stated_context: int = 0
    state_types: tuple[tuple[str, str], ...] = ()
    assumptions: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if len(self.mtp) > MOST_PREDICTIONS:
            rule = f"must be at most {MOST_PREDICTIONS}: each is a ledger of its own, with a head and a loss"
            raise InputError([Problem("num_mtp_layers", len(self.mtp), rule, "write a smaller number")])
        rule, remedy = f"must be one of {', '.join(STATE_TYPES)}", "write one of them, or leave it out"
        unknown = [Problem(key, word, rule, remedy) for key, word in self.state_types if word not in STATE_TYPES]
        if unknown:
            raise InputError(unknown)

    @cached_property
    def kinds(self) -> Counter[Block]:
        """How many layers there are of each distinct block, in order of first appearance."""
        return Counter(self.layers)

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Which of the `kinds` each layer is."""
        number = {block: i for i, block in enumerate(self.kinds)}
        return tuple(number[block] for block in self.layers)

    @property
    def generates(self) -> bool:
        """Whether it can make tokens one after another: it has a head, and no layer looks at tokens that follow."""
        return self.head and all(block.is_causal for block in self.kinds)

    @property
    def moes(self) -> tuple[MoE, ...]:
        """The mixtures of experts of its distinct blocks, in order."""
        return tuple(moe for block in self.kinds for moe in block.moes)

    @property
    def has_experts(self) -> bool:
        """Whether some layer is a mixture of experts."""
        return bool(self.moes)

    @property
    def most_experts(self) -> int:
        """Routed experts of the layer that has most of them, 0 where none has any."""
        return max((moe.experts for moe in self.moes), default=0)

    @property
    def streams(self) -> int:
        """Residual streams that a layer hands to the next."""
        return max((p.streams for block in self.kinds for p in block.extras), default=1)

    @property
    def has_windows(self) -> bool:
        """Whether some layer needs no more than its last tokens kept."""
        return any(cache.limit for block in self.kinds for mixer in block.mixers for cache in mixer.caches())

    @property
    def most_tokens(self) -> int:
        """Tokens that its server takes, or that it has positions or patches for, 0 where neither ends."""
        if self.stated_context:
            return self.max_context
        return self.positions or (0 if self.embedding else self.max_context)

    def limited(self, context: int) -> Self:
        """Return the model on a server that takes no longer requests; the checkpoint and its tables stay whole."""
        if not 0 < context < self.max_context:
            return self
        return replace(self, max_context=context, stated_context=self.stated_context or self.max_context)

    def whole_context(self) -> Self:
        """Return the model with layers that look back on every token."""
        layers = (replace(block, mixers=tuple(m.whole_context() for m in block.mixers)) for block in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def num_layers(self) -> int:
        """The number of layers, multi-token-prediction layers not counted."""
        return len(self.layers)
