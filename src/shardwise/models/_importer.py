"""From the keys of a configuration file to a `Model`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

from shardwise.errors import InputError, Problem
from shardwise.models._config import Config
from shardwise.models._fields import FIELDS
from shardwise.models._model import Model
from shardwise.models.families import DESCRIBED, FAMILIES, SAME_AS, builder

_WRAPPED = ("text_config", "language_config", "llm_config", "thinker_config")
_LLAMA = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "hidden_act"),
    "rms_norm_eps",
)
_NOT_LLAMA = ("expert", "moe", "lora", "mamba", "ssm", "conv", "linear_", "block_type", "latent", "mlp_type", "alibi")
_STATED = ("hidden_size", "num_layers", "num_attention_heads", "vocab_size")
_OUTER = ("tie_word_embeddings", "quantization_config", "torch_dtype", "dtype")


def model_from_config(
    raw: Mapping[str, Any], *, name: str = "", overrides: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
) -> Model:
    """Return the model that a Hugging Face style configuration describes.

    >>> keys = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    >>> model_from_config(keys).hidden
    768
    """
    keys, nested, more = _unwrap(raw)
    model_type = _model_type(keys, more)
    keys, canonical, replaced = _place(keys, overrides or {})
    described = model_type in DESCRIBED and "gated_mlp" in keys and "norm_type" in keys
    defaults = {} if described else _defaults(model_type, nested)
    c = Config(keys, model_type, defaults=defaults, overrides=canonical, replaced=replaced)
    c.notes += [*notes, *more]
    model = builder(model_type, described)(c)
    quantization = _quantization(c)
    assumptions = c.finish()
    return replace(model, name=name or model.name, quantization=quantization, assumptions=assumptions)


def _unwrap(raw: Mapping[str, Any]) -> tuple[dict[str, Any], bool, list[str]]:
    """The language model's own keys, whether they stood inside a wrapper, and what was assumed."""
    if not isinstance(raw, Mapping):
        remedy = "give the contents of config.json"
        raise InputError([Problem("config", type(raw).__name__, "must be an object", remedy)])
    for key in _WRAPPED:
        inner = raw.get(key)
        if isinstance(inner, Mapping):
            outer = {k: raw[k] for k in _OUTER if k in raw}
            kept, _, notes = _unwrap({**outer, **inner})
            kept.setdefault("model_type", raw.get("model_type"))
            return kept, True, [f"only the language model ({key}) is described, not the parts around it", *notes]
    return dict(raw), False, []


def _model_type(keys: Mapping[str, Any], notes: list[str]) -> str:
    word = keys.get("model_type")
    if not isinstance(word, str):
        remedy = 'add "model_type", such as "llama"'
        raise InputError([Problem("model_type", word, "is missing or not text", remedy)])
    known = SAME_AS.get(word, word)
    if known not in FAMILIES:
        return _nearest(word, keys, notes)
    if known != word:
        notes.append(f"model_type {word} is read as {known}")
    return known


def _nearest(word: str, keys: Mapping[str, Any], notes: list[str]) -> str:
    """The family of an unknown type: the one its `architectures` name, or Llama if it says all that Llama says."""
    by_class = {name.replace("_", "").replace("-", ""): name for name in FAMILIES}
    named = keys.get("architectures")
    for architecture in named if isinstance(named, list) else ():
        family = by_class.get(str(architecture).lower().partition("for")[0])
        if family:
            notes.append(f"model_type {word} is unknown, read as {family} because its architecture is {architecture}")
            return family
    missing = [key for key in _LLAMA if keys.get(key) is None]
    strange = [key for key in keys if any(part in key for part in _NOT_LLAMA) and keys[key] not in (None, 0, False)]
    if not missing and not strange:
        notes.append(f"model_type {word} is unknown, read as llama because it has its keys: no biases or norms beyond")
        return "llama"
    raise InputError([Problem("model_type", word, _why_not(missing, strange), _near(word))])


def _why_not(missing: list[str], strange: list[str]) -> str:
    lacks = f"lacks {', '.join(missing)}" if missing else ""
    has = f"has {', '.join(strange)}" if strange else ""
    return f"is not a supported family, and cannot be read as llama: it {' and '.join(filter(None, (lacks, has)))}"


def _near(word: str) -> str:
    from difflib import get_close_matches  # only a mistake needs it

    near = get_close_matches(word, [*FAMILIES, *SAME_AS], 3, 0.5)
    return f"use a supported type{', such as ' + ', '.join(near) if near else ''}"


def _place(keys: dict[str, Any], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Keys with overrides put in, overrides by field name, and old values of overrides by a file's key (`n_embd`)."""
    canonical = {name: value for name, value in overrides.items() if name in FIELDS}
    replaced: dict[str, Any] = {}
    for key in overrides.keys() - canonical.keys():
        aliases = {alias for field in FIELDS.values() if key in field.keys for alias in field.keys}
        old = [keys.pop(alias) for alias in aliases if alias in keys]
        replaced[key], keys[key] = (old[0] if old else None), overrides[key]
    return keys, canonical, replaced


@cache
def _class_defaults() -> dict[str, dict[str, Any]]:
    with open(os.path.join(os.path.dirname(__file__), "class_defaults.json"), encoding="ascii") as file:
        return cast(dict[str, dict[str, Any]], json.load(file)["defaults"])


def _defaults(model_type: str, nested: bool) -> dict[str, Any]:
    """The class defaults; sizes that every file states have none, unless a wrapper saved only the differences."""
    defaults = _class_defaults().get(model_type, {})
    if nested:
        return defaults
    stated = {key for name in _STATED for key in FIELDS[name].keys}
    return {key: value for key, value in defaults.items() if key not in stated}


def _quantization(c: Config) -> str:
    """The method of a quantised checkpoint, such as fp8, mxfp4, awq or gptq with its bits; empty when there is none."""
    if c.raw.get("quantization_config") is None:
        c.accept("quantization_config")
        return ""
    section = c.section("quantization_config")
    method, bits = section.text("quant_method"), section.count("bits")
    return f"{method}-int{bits}" if bits else method or section.text("quant_algo")
