"""Models of MaxText: those that it names, and those of sizes over a block of its own.

Source: github.com/AI-Hypercomputer/maxtext e591f30cbb src/maxtext/configs/models/*.yml, configs/types.py
get_individual_scales, models/{llama2,mistral,mixtral,qwen2,qwen3,gemma}.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.formats._imported import Keys, table
from shardwise.models import MLP, Attention, Model, catalogue, load_model, model_from_config
from shardwise.records import replace

_TABLE = "maxtext.toml"
# The block of layers -> the class of transformers with the same layers.
_BLOCKS = {
    "llama2": ("llama", "LlamaForCausalLM"), "mistral": ("mistral", "MistralForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"), "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"), "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
}  # fmt: skip
USUAL: dict[str, Any] = {
    "base_emb_dim": 2048, "base_num_query_heads": 16, "base_num_kv_heads": 16, "base_mlp_dim": 7168,
    "base_num_decoder_layers": 16, "head_dim": 128, "vocab_size": 32000, "logits_via_embedding": False,
    "num_experts": 1, "num_experts_per_tok": 1, "base_moe_mlp_dim": -1,
}  # fmt: skip
"""Sizes of configs/base.yml."""
_WHOLE = tuple(name for name in USUAL if name not in ("logits_via_embedding", "base_moe_mlp_dim"))
# What global_parameter_scale multiplies, and by which of its parts.
_SCALED = {
    "base_emb_dim": 0, "base_num_query_heads": 1, "base_num_kv_heads": 1, "base_mlp_dim": 2, "base_moe_mlp_dim": 2,
    "base_num_decoder_layers": 3,
}  # fmt: skip
_SAME = {
    "base_emb_dim": "hidden_size", "base_num_query_heads": "num_attention_heads", "vocab_size": "vocab_size",
    "base_num_kv_heads": "num_key_value_heads", "base_mlp_dim": "intermediate_size", "head_dim": "head_dim",
    "base_num_decoder_layers": "num_hidden_layers", "logits_via_embedding": "tie_word_embeddings",
}  # fmt: skip
_EXPERTS = {
    "mixtral": {
        "num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok",
        "base_moe_mlp_dim": "intermediate_size",
    },
    "qwen3_moe": {
        "num_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok",
        "base_moe_mlp_dim": "moe_intermediate_size",
    },
}  # fmt: skip


def named_model(keys: Keys) -> Model | None:
    """Return the model that is named, or that of the sizes; None where its layers are not known here."""
    name = keys.model = str(keys.raw("model_name") or "default")
    sizes = {path: keys.values[path] for path in USUAL if keys.raw(path) is not None}
    if name == "default":
        return _of_sizes(keys, sizes)
    known = {theirs: ours for ours, theirs in table(_TABLE)["models"].items()}.get(name)
    if known is None:
        keys.assumed.append(f"no model: {name} is not in the catalogue")
        return None
    config = catalogue()[known]["config"]
    kinds = {kind: block for block, (kind, _) in _BLOCKS.items()}
    model, over = load_model(known), keys.flag("override_model_config")
    if sizes.keys() - {"vocab_size"} and over and config.get("model_type") in kinds:
        return _built(keys, config, kinds[config["model_type"]], sizes)
    own = keys.whole("vocab_size") if over else None
    model = replace(model, vocab=own or table(_TABLE)["vocabularies"].get(known, model.vocab))
    for path in (one for one in sizes if one != "vocab_size" or not own):
        rule = f"changes {name}, " + ("whose layers are read whole" if over else "which needs override_model_config")
        keys.fail(path, rule, "leave it out" if over else "set override_model_config: true")
    return replace(model, mtp=model.mtp[: keys.whole("mtp_num_layers", least=0) or 0])


def _scales(keys: Keys) -> tuple[int, int, int, int]:
    """Return the factors of width, heads, feed-forward and layers (configs/types.py get_individual_scales)."""
    scale = keys.whole("global_parameter_scale") or 1
    if scale & (scale - 1):
        keys.fail("global_parameter_scale", "must be a power of two", "use 1, and write the sizes")
    base, rest = divmod(scale.bit_length() - 1, 3)
    return 2 ** (base + (rest > 1)), 2 ** (base + (rest > 0)), 2 ** (base + (rest > 0)), 2**base


def _of_sizes(keys: Keys, given: dict[str, Any]) -> Model | None:
    block = keys.word("decoder_block") or "llama2"
    if block not in _BLOCKS:
        keys.assumed.append(f"no model: layers of decoder_block {block} are not read from sizes")
        return None
    gates = keys.raw("mlp_activations")
    if gates is not None and (not isinstance(gates, list) or len(gates) != 2):
        keys.assumed.append("no model: mlp_activations without a gate are not read")
        return None
    for path in _WHOLE:
        keys.whole(path)
    keys.flag("logits_via_embedding")
    keys.whole("base_moe_mlp_dim", rest=True)
    if keys.problems.items:
        return None
    if not given:
        keys.assumed.append("the model of base.yml: 16 layers of width 2048, since none is named")
    sizes, scales = USUAL | given, _scales(keys)
    sizes |= {name: sizes[name] * scales[part] for name, part in _SCALED.items() if sizes[name] != -1}
    return _built(keys, {"model_type": _BLOCKS[block][0], "architectures": [_BLOCKS[block][1]]}, block, sizes)


def _built(keys: Keys, config: Mapping[str, Any], block: str, sizes: Mapping[str, Any]) -> Model | None:
    """Return the model of a configuration under sizes of MaxText's."""
    whole = dict(config) | {theirs: sizes[ours] for ours, theirs in _SAME.items() if ours in sizes}
    whole |= {theirs: sizes[ours] for ours, theirs in _EXPERTS.get(block, {}).items() if sizes.get(ours, -1) != -1}
    try:
        return model_from_config(whole, name="maxtext")
    except InputError as error:
        back = {theirs: ours for ours, theirs in _SAME.items()}
        for one in error.problems:
            keys.problems.add(back.get(one.field, one.field), one.value, one.rule, one.remedy)
        return None


def model_words(model: Model) -> dict[str, Any]:
    """Return what says a model: its name, or its sizes where its layers are those of a block without experts."""
    named = table(_TABLE)["models"].get(model.name)
    if named is not None:
        other = table(_TABLE)["vocabularies"].get(model.name, model.vocab) != model.vocab
        words = {"override_model_config": True, "vocab_size": model.vocab} if other else {}
        return {"model_name": named, **words, **({"mtp_num_layers": len(model.mtp)} if model.mtp else {})}
    config = catalogue().get(model.name, {}).get("config", {})
    block = model.layers[0]
    mixer, feed = block.mixers[0] if block.mixers else None, block.feed_forward
    if not (isinstance(mixer, Attention) and isinstance(feed, MLP)):
        return {}
    kinds = {kind: name for name, (kind, _) in _BLOCKS.items()}
    kind = "qwen3" if mixer.qk_norm != "none" else "qwen2" if mixer.qkv_bias else "llama2"
    return {
        "decoder_block": kinds.get(config.get("model_type", ""), kind), "base_emb_dim": model.hidden,
        "base_num_query_heads": mixer.heads, "base_num_kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim,
        "base_mlp_dim": feed.ffn, "base_num_decoder_layers": model.num_layers, "vocab_size": model.vocab,
        "logits_via_embedding": model.tied,
    }  # fmt: skip
