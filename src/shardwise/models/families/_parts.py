"""The parts that many families share: attention, feed-forwards, MoE, layer patterns and the model around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from shardwise.models._architecture import MLP, Activation, Architecture, Block, MoE, Projection
from shardwise.models._config import DROPOUTS, ClassFacts, Config
from shardwise.models._mixers import Attention, LatentAttention, NormKind
from shardwise.records import replace


class FamilyRow(NamedTuple):
    """A family: what makes its model from a configuration, and how its class is written."""

    build: Callable[[Config], Architecture]
    facts: ClassFacts = ClassFacts()


_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "swiglu": "silu",
    "swigluoai": "silu",
    "situ": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu-new",
    "quick_gelu": "quick-gelu",
    "gelu_fast": "gelu-new",
    "gelu_pytorch_tanh": "gelu-tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def activation(config: Config, default: str = "silu") -> Activation:
    """Return the activation of the feed-forwards."""
    keys = ("hidden_activation", "activation_function", "activation", "mlp_hidden_act")
    word = config.text("hidden_act", *keys, default=default)
    if word not in _ACTIVATIONS:
        config.problems.add("hidden_act", word, "is not a known activation", f"use one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS.get(word, "silu")


def head_dim(config: Config, heads: int) -> int:
    """Return the width of one head: the file's word, or hidden size over heads."""
    given = config.count("head_dim")
    if given:
        return given
    hidden = config.size("hidden_size")
    config.expect(
        hidden % heads == 0, "hidden_size", f"must be a multiple of the {heads} heads", "give head_dim explicitly"
    )
    return max(hidden // heads, 1)


def kv_heads(config: Config, heads: int) -> int:
    """Return the number of key-value heads: the file's word, or as many as query heads."""
    number = config.size("num_key_value_heads", default=heads)
    rule = f"must divide the {heads} query heads"
    choices = ", ".join(str(n) for n in range(1, min(heads, 1024) + 1) if heads % n == 0)
    config.expect(heads % number == 0, "num_key_value_heads", rule, f"use one of {choices}")
    return number


def attention(config: Config, *, qkv_bias: bool = False, out_bias: bool = False) -> Attention:
    """Return grouped-query attention with the heads that the file gives."""
    heads = config.size("num_attention_heads")
    return Attention(
        heads=heads,
        kv_heads=kv_heads(config, heads),
        head_dim=head_dim(config, heads),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        fused_projection=config.facts.fused_qkv,
        joined_rotary=config.facts.joined_rotary,
    )


def latent_attention(config: Config) -> LatentAttention:
    """Return multi-head latent attention; the key-value heads in such files say nothing."""
    config.accept("num_key_value_heads", "head_dim", "qk_head_dim")
    heads = config.size("num_attention_heads")
    return LatentAttention(
        heads=heads,
        q_lora_rank=config.count("q_lora_rank", default=0),
        kv_lora_rank=config.size("kv_lora_rank"),
        qk_nope_head_dim=config.size("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.size("v_head_dim", default=max(config.size("hidden_size") // heads, 1)),
        bias=config.flag("attention_bias"),
    )


def mlp(config: Config, *, gated: bool = True, bias: bool = False, act: str = "silu") -> MLP:
    """Return the dense feed-forward."""
    return MLP(ffn=config.size("ffn"), gated=gated, bias=bias, activation=activation(config, act))


def moe(
    config: Config, *keys: str, shared_count: bool = False, gated: bool = True, act: str = "silu", only: str = ""
) -> MoE:
    """Return an MoE whose expert width stands under `keys`, with the file's count of shared experts if asked.

    `only` is the one key of the width in families that leave the others unread.
    """
    experts, top_k = config.size("num_experts"), config.size("experts_per_token")
    remedy = f"use at most {experts}"
    config.expect(top_k <= experts, "experts_per_token", f"must not exceed the {experts} experts", remedy)
    ffn, act_kind = (
        config.size_of("expert_ffn", only) if only else config.size("expert_ffn", *keys),
        activation(config, act),
    )
    shared = config.count("num_shared_experts") if shared_count else 0
    return MoE(
        experts=experts,
        top_k=top_k,
        ffn=ffn,
        gated=gated,
        activation=act_kind,
        normalised=_normalised(config),
        float_weights=config.facts.float_weights,
        float_router=config.facts.float_router,
        chosen_softmax=config.facts.chosen_softmax,
        shared=MLP(ffn=shared * ffn, gated=gated, activation=act_kind) if shared else None,
    )


def _normalised(config: Config) -> bool:
    """Whether the chosen experts' weights are made to sum to one: a fact of the class, or the file's word."""
    if config.facts.normalised is not None:
        config.accept("norm_topk_prob", "route_norm")
        return config.facts.normalised
    return config.flag("norm_topk_prob", "moe_renormalize")


def capped(config: Config, *keys: str) -> bool:
    """Return whether one of the keys gives a value that scores or logits are capped at."""
    return any(config.number(key, default=0) > 0 for key in keys)


THREE_OF_FOUR = ("sliding", "sliding", "sliding", "full")
"""Three windowed layers, then one that sees all."""


def windows(config: Config, number: int, pattern: Sequence[str] = ("full",)) -> list[str]:
    """Return each layer's attention kind (full, sliding, chunked, linear, ...) from `layer_types` or the pattern."""
    words = config.sequence("layer_types", number) or [pattern[i % len(pattern)] for i in range(number)]
    return [word.removesuffix("_attention") for word in words]


def window_pattern(config: Config, pattern: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pattern of the class, or what `sliding_window_pattern` counts: a full layer at the end of a period."""
    if isinstance(config.raw.get("sliding_window_pattern"), str):
        letters = config.text("sliding_window_pattern")
        known = letters != "" and set(letters) <= {"G", "L"}
        config.expect(known, "sliding_window_pattern", "must be letters L and G", "write such as LLLG")
        if not known:
            return pattern
        return tuple("full" if letter == "G" else "sliding" for letter in letters)
    period = config.repeats("sliding_window_pattern", "_sliding_window_pattern", default=len(pattern))
    stated = period > 0 or config.has("layer_types") or not config.count("window")
    config.expect(stated, "sliding_window_pattern", "must be at least 1 beside a window", "write a whole number")
    return pattern if period == len(pattern) else ("sliding",) * (period - 1) + ("full",)


def build(kinds: Sequence[str], block_of: Callable[[str], Block]) -> tuple[Block, ...]:
    """Return one block per layer kind in order, making each distinct kind once."""
    made = {kind: block_of(kind) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


def language_model(config: Config, layers: tuple[Block, ...], *, norm: NormKind = "rmsnorm") -> Architecture:
    """Return the model around the layers: embedding, final norm and head."""
    return Architecture(
        name=config.model_type,
        family=config.model_type,
        hidden=config.size("hidden_size"),
        vocab=config.size("vocab_size"),
        layers=layers,
        tied=config.flag("tied"),
        norm=norm,
        max_context=config.count("max_context"),
        dropout=drops(config),
        logit_softcap=capped(config, "final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"),
    )


def with_state(config: Config, model: Architecture) -> Architecture:
    """Return the model with the types that the file, or else its class, names for its recurrent states."""
    keys = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    named = ((key, config.text(key) if config.has(key) else config.defaults.get(key)) for key in keys)
    return replace(model, state_types=tuple((key, word) for key, word in named if word))


def renormed(model: Architecture, norm: NormKind) -> Architecture:
    """Return the model with every norm of its residual stream of another kind."""
    made = {block: replace(block, norm=norm) for block in dict.fromkeys(model.layers)}
    return replace(model, layers=tuple(made[block] for block in model.layers), norm=norm)


def written(model: Architecture, norm: NormKind) -> Architecture:
    """Return the model with every plain RMSNorm as its class writes it."""
    if norm == "rmsnorm":
        return model
    blocks = (*model.kinds, *model.mtp)
    made = {block: _written(block, norm) for block in dict.fromkeys(blocks)}
    layers, mtp = (tuple(made[block] for block in part) for part in (model.layers, model.mtp))
    return replace(model, layers=layers, mtp=mtp, norm=_way(model.norm, norm))


def _way(norm: NormKind, way: NormKind) -> NormKind:
    return way if norm == "rmsnorm" else norm


def _written(block: Block, way: NormKind) -> Block:
    mixers = (
        replace(m, qk_norm_kind=_way(m.qk_norm_kind, way)) if isinstance(m, Attention) and m.qk_norm != "none"
        else replace(m, latent_norm=_way(m.latent_norm, way)) if isinstance(m, LatentAttention)
        else m
        for m in block.mixers
    )  # fmt: skip
    also, idle = (tuple(_written(one, way) for one in part) for part in (block.also, block.idle))
    return replace(block, mixers=tuple(mixers), norm=_way(block.norm, way), also=also, idle=idle)


def labels(config: Config, default: int = 2) -> int:
    """Return the classes of a classifier: those that `id2label` names, or `num_labels`, or transformers' default."""
    named = config.raw.get("id2label")
    config.accept("id2label", "label2id", "num_labels")
    if isinstance(named, Mapping) and named:
        return len(named)
    config.expect(
        named is None or isinstance(named, Mapping), "id2label", "must be an object", "write { } with its classes"
    )
    return config.size("num_labels", default=default)


# Classes that transformers makes of any decoder, with one map in place of the head, applied to every token, and whether
# it has biases. Source: transformers 5.23.0 modeling_layers.py, GenericForSequenceClassification and its like.
_CLASSIFIES = {"ForSequenceClassification": False, "ForTokenClassification": True, "ForQuestionAnswering": True}


def with_task(config: Config, model: Architecture) -> Architecture:
    """Return a decoder with the head of the class that the file names: of a language model where it names no other."""
    named = " ".join(config.words("architectures"))
    task = next((end for end in _CLASSIFIES if named.endswith(end)), "")
    if not task or not model.head:
        return model
    # A question's answer has a first and a last token.
    classes = 2 if task == "ForQuestionAnswering" else labels(config)
    mapped = Projection(name="labels", inputs=model.hidden, outputs=classes, bias=_CLASSIFIES[task])
    return replace(model, head=False, head_bias=False, tied=False, mtp=(), extras=(*model.extras, mapped))


def drops(config: Config) -> bool:
    """Return whether any dropout of the file is above 0."""
    return max(config.probability(key) for key in DROPOUTS) > 0


def every(period: int, offset: int, number: int) -> list[bool]:
    """Return for each layer whether it is the one of its period."""
    return [i % period == offset for i in range(number)]
