"""Encoders: BERT and its relatives, and the vision transformer.

Source: the model classes of transformers 5.23.0; arXiv:1810.04805, arXiv:2010.11929.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.models._config import Config, Row
from shardwise.models._mixers import Attention
from shardwise.models._model import MLP, Block, Model, Projection
from shardwise.models.families import _parts as parts


def _block(c: Config, heads: int, hidden: int, qkv_bias: bool = True) -> Block:
    """A post-norm block with biases and attention both ways."""
    width = c.size("ffn", "hidden_dim")
    core = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=max(hidden // heads, 1),
        qkv_bias=qkv_bias,
        out_bias=True,
        causal=False,
        rotary=False,
    )
    c.expect(hidden % heads == 0, "hidden_size", f"must be a multiple of the {heads} heads", "use a multiple")
    ffn = MLP(ffn=width, gated=False, bias=True, activation=parts.activation(c, "gelu"))
    return Block(mixers=(core,), feed_forward=ffn, norm="layernorm")


def bert(c: Config) -> Model:
    """Return BERT, RoBERTa or DistilBERT with the head of the class that the file names, by default of masked words."""
    hidden, heads = c.size("hidden_size", "dim"), c.size("num_attention_heads")
    distil = c.model_type == "distilbert"
    model = Model(
        name=c.model_type,
        family=c.model_type,
        hidden=hidden,
        vocab=c.size("vocab_size"),
        layers=(_block(c, heads, hidden),) * c.layers(),
        tied=c.flag("tied", default=True),
        norm="layernorm",
        final_norm=False,
        embedding_norm=True,
        positions=c.size("max_context"),
        token_types=0 if distil else c.size("type_vocab_size", default=2),
        max_context=c.size("max_context"),
        dropout=parts.drops(c),
    )
    return _with_task(c, model, " ".join(c.words("architectures")))


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


def _with_task(c: Config, model: Model, architecture: str) -> Model:
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
    names = heads[0 if c.model_type == "bert" else 2 if c.model_type == "distilbert" else 1]
    widths = {"labels": parts.labels(c), "pair": 2, "choice": 1, "tokens": parts.labels(c)}
    extras = (
        replace(first, name=name, outputs=widths.get(name, hidden), of_sequence=name != "tokens") for name in names
    )
    return replace(model, head=False, extras=tuple(extras))


def vit(c: Config) -> Model:
    """Return a vision transformer: patches in and no vocabulary out; without an image size its layers alone."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    model = Model(
        name=c.model_type,
        family=c.model_type,
        hidden=hidden,
        vocab=1,
        layers=(_block(c, heads, hidden, c.flag("qkv_bias", default=True)),) * c.layers(),
        norm="layernorm",
        final_norm=False,
        head=False,
        embedding=False,
        max_context=c.count("max_context"),
        dropout=parts.drops(c),
    )
    if "image_size" in c.raw:
        return _with_patches(c, model)
    c.note("a vision transformer is its layers alone: no patch embedding, no positions, no head")
    return model


def _with_patches(c: Config, layers: Model) -> Model:
    """Add the map of patches, a class token, a position each, the last norm, and a pooler or a classifier.

    Source: transformers 5.23.0 models/vit/modeling_vit.py; arXiv:2010.11929 equations 1 to 4.
    """
    hidden, side, image = layers.hidden, c.size("patch_size", default=16), c.size("image_size")
    c.expect(image % side == 0, "image_size", f"must be a multiple of the patch size {side}", "use a multiple")
    tokens = (image // side) ** 2 + 1
    patches = Projection(name="patches", inputs=c.size("num_channels", default=3) * side**2, outputs=hidden, bias=True)
    bare = " ".join(c.words("architectures")).endswith("Model")
    classes = 1 if bare else parts.labels(c)
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
