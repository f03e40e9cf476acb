"""Encoders: BERT and its relatives, and the vision transformer.

Source: the model classes of transformers 5.23.0; arXiv:1810.04805, arXiv:2010.11929.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import Config
from shardwise.models._mixers import Attention
from shardwise.models._model import MLP, Block, Model, Projection
from shardwise.models.families import _parts as parts
from shardwise.models.families._parts import Row


def _block(config: Config, heads: int, hidden: int, qkv_bias: bool = True) -> Block:
    """A post-norm block with biases and attention both ways."""
    width = config.size("ffn", "hidden_dim")
    core = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        qkv_bias=qkv_bias,
        out_bias=True,
        causal=False,
        rotary=False,
    )
    config.expect(hidden % heads == 0, "hidden_size", f"must be a multiple of the {heads} heads", "use a multiple")
    ffn = MLP(ffn=width, gated=False, bias=True, activation=parts.activation(config, "gelu"))
    return Block(mixers=(core,), feed_forward=ffn, norm="layernorm")


def bert(config: Config) -> Model:
    """Return BERT, RoBERTa or DistilBERT with the head of the class that the file names, by default of masked words."""
    hidden, heads = config.size("hidden_size", "dim"), config.size("num_attention_heads")
    distil = config.model_type == "distilbert"
    model = Model(
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


def _with_task(config: Config, model: Model, architecture: str) -> Model:
    """Return an encoder with the head of its class."""
    hidden = model.hidden
    mapped = Projection(name="head_transform", inputs=hidden, outputs=hidden, bias=True)
    first = replace(mapped, of_sequence=True)
    heads = next((_HEADS[end] for end in _HEADS if architecture.endswith(end)), None)
    if heads is None:
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


def vit(config: Config) -> Model:
    """Return a vision transformer: patches in and no vocabulary out; without an image size its layers alone."""
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    model = Model(
        name=config.model_type,
        family=config.model_type,
        hidden=hidden,
        vocab=1,
        layers=(_block(config, heads, hidden, config.flag("qkv_bias", default=True)),) * config.layers(),
        norm="layernorm",
        final_norm=False,
        head=False,
        embedding=False,
        max_context=config.count("max_context"),
        dropout=parts.drops(config),
    )
    if "image_size" in config.raw:
        return _with_patches(config, model)
    config.note("a vision transformer is its layers alone: no patch embedding, no positions, no head")
    return model


def _with_patches(config: Config, layers: Model) -> Model:
    """Add the map of patches, a class token, a position each, the last norm, and a pooler or a classifier.

    Source: transformers 5.23.0 models/vit/modeling_vit.py; arXiv:2010.11929 equations 1 to 4.
    """
    hidden, side, image = layers.hidden, config.size("patch_size", default=16), config.size("image_size")
    config.expect(image % side == 0, "image_size", f"must be a multiple of the patch size {side}", "use a multiple")
    tokens = (image // side) ** 2 + 1
    patches = Projection(
        name="patches", inputs=config.size("num_channels", default=3) * side**2, outputs=hidden, bias=True
    )
    bare = " ".join(config.words("architectures")).endswith("Model")
    classes = 1 if bare else parts.labels(config)
    pooler = Projection(name="pooler", inputs=hidden, outputs=hidden, bias=True, of_sequence=True)
    last = pooler if bare else replace(pooler, name="classifier", outputs=classes)
    vectors = (tokens + 1) * hidden
    return replace(layers, final_norm=True, extras=(patches, last), extra_vectors=vectors, max_context=tokens)


ROWS: dict[str, Row] = {
    "bert": Row(bert),
    "roberta": Row(bert),
    "xlm-roberta": Row(bert),
    "distilbert": Row(bert),
    "vit": Row(vit),
}
