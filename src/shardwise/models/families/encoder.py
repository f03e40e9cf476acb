"""Encoders of text: BERT and its relatives, ModernBERT, the text encoders of CLIP and SigLIP.

Source: the model classes of transformers 5.23.0; arXiv:1810.04805.
"""

from __future__ import annotations

from shardwise.models._architecture import MLP, Architecture, Block, Projection
from shardwise.models._config import ClassFacts, Config
from shardwise.models._mixers import Attention, NormKind
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import FamilyRow
from shardwise.records import replace


def _block(config: Config, heads: int, hidden: int) -> Block:
    """A post-norm block with biases and attention both ways."""
    width = config.size("ffn", "hidden_dim")
    core = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        qkv_bias=True,
        out_bias=True,
        causal=False,
        rotary=False,
    )
    config.expect(hidden % heads == 0, "hidden_size", f"must be a multiple of the {heads} heads", "use a multiple")
    ffn = MLP(ffn=width, gated=False, bias=True, activation=parts.activation(config, "gelu"))
    return Block(mixers=(core,), feed_forward=ffn, norm="layernorm")


def bert(config: Config) -> Architecture:
    """Return BERT, RoBERTa or DistilBERT with the head of the class that the file names, by default of masked words."""
    hidden, heads = config.size("hidden_size", "dim"), config.size("num_attention_heads")
    distil = config.model_type == "distilbert"
    model = Architecture(
        name=config.model_type,
        family=config.model_type,
        hidden=hidden,
        vocab=config.size("vocab_size"),
        layers=(_block(config, heads, hidden),) * config.layers(),
        tied=config.flag("tied", default=True),
        norm="layernorm",
        final_norm=False,
        embedding_norm=True,
        positions=config.size("max_context"),
        token_types=0 if distil else config.size("type_vocab_size", default=2),
        max_context=config.size("max_context"),
        dropout=parts.drops(config),
    )
    return _with_task(config, model, " ".join(config.words("architectures")))


# The heads of each class, by the end of its name: learned maps in their order; BERT, RoBERTa, DistilBERT where they
# differ. "pooler" and "dense" map a first token to the same width, "labels", "pair" and "choice" classify it, "tokens"
# classifies every token. Source: transformers 5.23.0 models/bert, models/roberta and models/distilbert.
_HEADS: dict[str, tuple[tuple[str, ...], ...]] = {
    "Model": (("pooler",), ("pooler",), ()),
    "SequenceClassification": (("pooler", "labels"), ("dense", "labels"), ("dense", "labels")),
    "TokenClassification": (("tokens",),) * 3,
    "QuestionAnswering": (("tokens",),) * 3,
    "MultipleChoice": (("pooler", "choice"), ("pooler", "choice"), ("dense", "choice")),
    "NextSentencePrediction": (("pooler", "pair"),) * 3,
}


def _with_task(config: Config, model: Architecture, architecture: str) -> Architecture:
    """Return an encoder with the head of its class."""
    hidden = model.hidden
    mapped = Projection(name="head_transform", inputs=hidden, outputs=hidden, bias=True)
    first = replace(mapped, of_sequence=True)
    heads = next((_HEADS[end] for end in _HEADS if architecture.endswith(end)), None)
    if heads is None or architecture.endswith("LMHeadModel"):
        masked = replace(model, head_bias=True, extras=(mapped,), extra_vectors=2 * hidden)
        if not architecture.endswith("PreTraining"):
            return masked
        return replace(masked, extras=(mapped, replace(first, name="pooler"), replace(first, name="pair", outputs=2)))
    names = heads[0 if config.model_type == "bert" else 2 if config.model_type == "distilbert" else 1]
    widths = {"labels": parts.labels(config), "pair": 2, "choice": 1, "tokens": parts.labels(config)}
    extras = (
        replace(first, name=name, outputs=widths.get(name, hidden), of_sequence=name != "tokens") for name in names
    )
    return replace(model, head=False, extras=tuple(extras))


def modernbert(config: Config) -> Architecture:
    """Return ModernBERT: pre-norm, gated, rotary, every third layer full and the others windowed (arXiv:2412.13663).

    The norm of the embedding is the first norm of the first layer, which has none of its own.
    """
    number, bias = config.layers(), config.flag("attention_bias")
    core = replace(parts.attention(config, qkv_bias=bias, out_bias=bias), causal=False)
    ffn = MLP(ffn=config.size("ffn"), bias=config.flag("mlp_bias"), activation=parts.activation(config, "gelu"),
              fused_projection=True)  # fmt: skip
    norm: NormKind = "layernorm" if config.flag("norm_bias") else "layernorm-no-bias"
    period = config.period("global_attn_every_n_layers", 3)
    kinds = parts.windows(config, number, ("full", *("sliding",) * (period - 1)))
    # Half of the tokens that a layer sees lie on each side of a token (modeling_modernbert.py, ModernBertAttention).
    local = replace(core, window=config.size("local_attention") // 2 + 1)
    layers = parts.build(
        kinds, lambda k: Block(mixers=(local if k == "sliding" else core,), feed_forward=ffn, norm=norm)
    )
    return _with_modern_head(config, parts.language_model(config, layers, norm=norm))


def _with_modern_head(config: Config, model: Architecture) -> Architecture:
    """Return ModernBERT with the head of the class that the file names, by default of masked words."""
    hidden, name = model.hidden, " ".join(config.words("architectures")) or "ModernBertForMaskedLM"
    if name.endswith("Model"):
        return replace(model, head=False)
    mapped = Projection(name="head_transform", inputs=hidden, outputs=hidden, bias=config.flag("classifier_bias"))
    model = replace(model, extra_vectors=(1 + (model.norm == "layernorm")) * hidden, extras=(mapped,))
    if name.endswith("MaskedLM"):
        return replace(model, head_bias=config.flag("decoder_bias", default=True))
    whole = name.endswith(("SequenceClassification", "MultipleChoice"))
    classes = 1 if name.endswith("MultipleChoice") else parts.labels(config)
    labels = Projection(name="labels", inputs=hidden, outputs=classes, bias=True, of_sequence=whole)
    return replace(model, head=False, extras=(replace(mapped, of_sequence=whole), labels))


def clip_text(config: Config) -> Architecture:
    """Return the text encoder of CLIP, which sees the words before a word, or of SigLIP, which sees all and maps one.

    Source: arXiv:2103.00020, arXiv:2303.15343; transformers 5.23.0 models/clip, models/siglip and models/siglip2.
    """
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    block = _block(config, heads, hidden)
    clip = config.model_type == "clip_text_model"
    core = replace(parts.attention(config, qkv_bias=True, out_bias=True), rotary=False, causal=clip)
    mapped = Projection(
        name="head", inputs=hidden, outputs=config.size("projection_size", default=hidden), bias=True, of_sequence=True
    )
    config.accept("projection_dim", "projection_size")
    return Architecture(
        name=config.model_type,
        family=config.model_type,
        hidden=hidden,
        vocab=config.size("vocab_size"),
        layers=(replace(block, mixers=(core,)),) * config.layers(),
        norm="layernorm",
        positions=config.size("max_context"),
        max_context=config.size("max_context"),
        dropout=parts.drops(config),
        head=False,
        extras=() if clip else (mapped,),
    )


ROWS: dict[str, FamilyRow] = {
    "bert": FamilyRow(bert),
    "roberta": FamilyRow(bert),
    "xlm-roberta": FamilyRow(bert),
    "distilbert": FamilyRow(bert),
    "modernbert": FamilyRow(modernbert, ClassFacts(fused_qkv=True)),
    "clip_text_model": FamilyRow(clip_text),
    "siglip_text_model": FamilyRow(clip_text),
    "siglip2_text_model": FamilyRow(clip_text),
}
