"""A model from its sizes alone: what the fields do not say is a stated default, and what cannot be is refused at once.

Defaults are those of a GPT: a feed-forward of four times the width with two GEMMs and biases, LayerNorm, rotary
positions, a head of its own (arXiv:2204.06745, GPT-NeoX). A gated one is a Llama's: three GEMMs, RMSNorm, no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError, Problems
from shardwise.models._architecture import Architecture
from shardwise.models._config import MOST_LAYERS
from shardwise.models._fields import FIELDS, SIZE_FIELDS
from shardwise.models._importer import architecture_from_config

VOCAB = 51200
CONTEXT = 2048
_USED = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "ffn", "vocab_size"),
    *("max_context", "num_experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "tied", "attention_bias"),
    *("mlp_bias", *SIZE_FIELDS),
)
_EXPERTS = ("experts_per_token", "expert_ffn", "shared_expert_ffn", "expert_interval")


class _Sizes:
    """The fields that were given, what is wrong with them, and what is taken where nothing was said."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.problems = Problems()
        self.notes: list[str] = []

    def get(self, name: str, default: Any, why: str) -> Any:
        """Return a field, or the default with a note."""
        if name in self.given:
            return self.given[name]
        self.notes.append(f"{name} {str(default).lower() if isinstance(default, bool) else default}: {why}")
        return default

    def whole(self, name: str) -> int:
        """Return a size that is usable in the arithmetic of others, 0 where it is missing or wrong."""
        value = self.given.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

    def scaled(self, name: str, ratio: str, unit: int, of: str) -> int:
        """Return a size given outright or as a ratio of another; 0 where neither was given."""
        if ratio not in self.given:
            return self.whole(name)
        share = self.given[ratio]
        if name in self.given:
            self.problems.add(ratio, share, f"gives {name} too", f"give one of {name} and {ratio}")
            return self.whole(name)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1e6:
            self.problems.add(ratio, share, "must be a number above 0", "write a number such as 4")
            return 0
        size = round(unit * share)
        if unit and (size < 1 or abs(size - unit * share) > 1e-6 * unit):
            rule = f"of {of} = {unit} is {unit * share:g}, which is not a whole number"
            self.problems.add(ratio, share, rule, f"give {name} itself, such as {max(size, 1)}")
        return size


def architecture_from_sizes(fields: Mapping[str, Any]) -> Architecture:
    """Return what `model_from_sizes` makes a model of."""
    sizes = _Sizes(fields)
    _refuse_others(sizes)
    hidden, layers = sizes.whole("hidden_size"), sizes.whole("num_layers")
    for name, example in (("hidden_size", 4096), ("num_layers", 32)):
        if name not in fields:
            rule = "is missing: a model without a name needs it"
            sizes.problems.add(name, None, rule, f"give for example {name} {example}, or name a model")
    config = {"hidden_size": hidden or 1, "num_layers": layers or 1} | {k: fields[k] for k in _USED if k in fields}
    config |= _style(sizes) | _attention(sizes, hidden) | _feed_forward(sizes, hidden, layers)
    config["vocab_size"] = sizes.get("vocab_size", VOCAB, "GPT-2's vocabulary, padded for eight ranks")
    config["tie_word_embeddings"] = sizes.get("tied", False, "the head has a table of its own")
    for name in (*SIZE_FIELDS, "tied"):
        config.pop(name, None)
    return _checked(sizes, config, _name(fields))


def _name(fields: Mapping[str, Any]) -> str:
    experts = f"-{fields['num_experts']}-experts" if fields.get("num_experts") else ""
    return f"{fields.get('num_layers')}-layers-{fields.get('hidden_size')}-wide{experts}"


def _checked(sizes: _Sizes, config: dict[str, Any], name: str) -> Architecture:
    """Return the model, or raise what is wrong with single fields, what contradicts, and what the importer finds."""
    try:
        architecture = architecture_from_config(config, name=name, notes=sizes.notes)
    except InputError as error:
        # What follows from a field that is missing or wrong here already says nothing new.
        seen = {p.field for p in sizes.problems.items}
        raise InputError([*sizes.problems.items, *(p for p in error.problems if p.field not in seen)]) from None
    sizes.problems.raise_if_any()
    return architecture


def _refuse_others(sizes: _Sizes) -> None:
    for name in sizes.given:
        if name not in _USED:
            rule = "has no place in a model from its sizes" if name in FIELDS else "is not a field of a model"
            sizes.problems.add(
                name, sizes.given[name], rule, "name a model that has it, or use " + ", ".join(_USED[:7])
            )
    if not sizes.given.get("num_experts"):
        for name in _EXPERTS:
            if name in sizes.given:
                sizes.problems.add(
                    name, sizes.given[name], "is of an MoE, and there are no experts", "give num_experts"
                )
        if sizes.given.get("moe"):
            sizes.problems.add("num_experts", None, "is missing: moe asks for experts", "give num_experts, such as 8")
    elif sizes.given.get("moe") is False:
        sizes.problems.add("moe", False, "contradicts num_experts", "leave one of the two out")


def _style(sizes: _Sizes) -> dict[str, Any]:
    """Return norms, biases and positions: a GPT's, or a Llama's where the feed-forward is gated."""
    gated = sizes.get("gated", False, "two GEMMs and biases, as GPT has; gated models have three")
    learned = sizes.get("learned_positions", False, "positions are rotary and have no parameters")
    biases = {name: sizes.given.get(name, not gated) for name in ("attention_bias", "mlp_bias")}
    context = (
        sizes.get("max_context", CONTEXT, "rows of the learned positions")
        if learned
        else sizes.given.get("max_context")
    )
    return {
        "model_type": "llama-like" if gated else "gpt2-like",
        "gated_mlp": gated,
        "hidden_act": "silu" if gated else "gelu",
        "norm_type": "RMSNorm" if gated else "LayerNorm",
        "position_embedding": "learned" if learned else "rope",
        **biases,
        **({"max_context": context} if context is not None else {}),
    }


def _attention(sizes: _Sizes, hidden: int) -> dict[str, Any]:
    """Return heads: as given, or as many as make heads of 128, of 64 in narrow models (GPT-3, arXiv:2005.14165)."""
    heads, width = sizes.whole("num_attention_heads"), sizes.whole("head_dim")
    if "num_attention_heads" not in sizes.given and hidden:
        usual = (64, 128) if hidden < 2048 else (128, 64)
        width = width or next((w for w in usual if hidden % w == 0), 0)
        if not width or hidden % width:
            rule = f"is missing, and no usual head divides the width {hidden}"
            sizes.problems.add(
                "num_attention_heads", None, rule, "give num_attention_heads, and head_dim if it differs"
            )
        else:
            heads = sizes.get("num_attention_heads", hidden // width, f"heads of {width}")
    elif heads and hidden and hidden % heads and not width:
        rule = f"must divide hidden_size = {hidden}, or head_dim must say the width of a head"
        sizes.problems.add("num_attention_heads", heads, rule, "give head_dim, or another number of heads")
        heads = 1
    keys = sizes.scaled("num_key_value_heads", "kv_ratio", heads, "the heads") or heads
    if heads and keys and heads % keys and "num_key_value_heads" not in sizes.given:
        sizes.problems.add(
            "kv_ratio", sizes.given["kv_ratio"], f"gives {keys} heads, which must divide {heads}", "use 1 over one"
        )
        keys = heads
    attention_keys = {"num_attention_heads": heads or 1}
    if "num_key_value_heads" not in sizes.given:
        attention_keys["num_key_value_heads"] = keys or 1
    return attention_keys


def _feed_forward(sizes: _Sizes, hidden: int, layers: int) -> dict[str, Any]:
    """Return the width of the feed-forward and of experts, and which layers have those."""
    width = sizes.scaled("ffn", "ffn_ratio", hidden, "hidden_size")
    if not {"ffn", "ffn_ratio"} & sizes.given.keys():
        width = sizes.get("ffn", 4 * hidden, "four times the width")
    keys: dict[str, Any] = {} if "ffn" in sizes.given else {"ffn": width or 1}
    if not sizes.whole("num_experts"):
        return keys
    keys["experts_per_token"] = sizes.get("experts_per_token", 1, "each token visits one expert")
    keys["expert_ffn"] = sizes.get("expert_ffn", width or 1, "as wide as a dense feed-forward")
    every = sizes.get("expert_interval", 1, "every layer is MoE")
    if isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= max(layers, 1):
        rule = f"must be a whole number from 1 to the {layers} layers"
        sizes.problems.add("expert_interval", every, rule, "write 2 for every other layer")
        every = 1
    keys["moe_layer_freq"] = [int(i % every == every - 1) for i in range(min(layers, MOST_LAYERS) or 1)]
    return keys
