"""From the keys of a configuration file to a model."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Literal, TypeAlias, cast

from shardwise.errors import InputError, Problem, near
from shardwise.models._architecture import Architecture
from shardwise.models._config import Config
from shardwise.models._fields import FIELDS
from shardwise.models._quantised import quantization_of
from shardwise.models._towers import tower_parameters
from shardwise.models.families import DESCRIBED, FAMILIES, SAME_AS, TEXT_OF, builder
from shardwise.models.families._parts import with_task, written
from shardwise.records import dataclass, replace

_LLAMA = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "hidden_act"),
    "rms_norm_eps",
)
_NOT_LLAMA = (
    *("expert", "moe", "lora", "mamba", "ssm", "conv", "linear_", "block_type", "latent", "mlp_type", "alibi"),
    *("cross_attention", "encoder", "decoder_layers"),
)
# Activations whose feed-forwards have no gate, in the families that have them.
_NO_GATE = ("relu2", "xielu")
# What an unknown type may have that no family has, by the keys that tell.
_BEYOND = {
    "a decoder that attends to an encoder": (
        *("is_encoder_decoder", "decoder", "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers"),
    ),
    "convolutions over sound": ("num_feat_extract_layers",),
    "attention to relative positions": ("relative_attention",),
}
_STATED = ("hidden_size", "num_layers", "num_attention_heads", "vocab_size")
# Switches that give the layers of a class another attention, to the tokens of another part.
_CROSSES = ("is_encoder_decoder", "add_cross_attention")
# Keys of models that draft for another: EAGLE-3, DFlash and Medusa keep other tables and layers than their class.
_DRAFTS = ("draft_vocab_size", "dflash_config", "medusa_num_heads", "eagle_config")
# Factors of released models are 2 to 8; what is far beyond says nothing of a table.
_LONGEST_FACTOR = 1024
_GUESSED = "read as llama because it has its keys: no biases or norms beyond"
_AS_LLAMA = "write model_type llama where its layers are Llama's and these keys change none"
# What a class is for, behind the family in its name.
_PURPOSE = re.compile(r"((LMHead|DoubleHeads|Decoder)?Model)?(For[A-Z]\w*)?$")


def architecture_from_config(
    raw: Mapping[str, Any],
    *,
    name: str = "",
    overrides: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    part: FilePart = "",
) -> Architecture:
    """Return what `model_from_config` makes a model of."""
    if part not in PARTS:
        raise InputError([Problem("part", part, "is unknown", "use text for the language model alone")])
    file = unwrap(raw)
    problems = [] if part else file.problems()
    try:
        model = _read(file, overrides or {}, notes)
    except InputError as error:
        raise InputError([*problems, *error.problems]) from None
    if problems:
        raise InputError(problems)
    towers = tower_parameters(raw, file.keys) if file.others else 0
    if towers:
        model = replace(model, tower_parameters=towers)
    # A folder may be called anything: its letters stand on pages and in scripts.
    plain = "".join(letter if letter.isprintable() else "_" for letter in name)
    return replace(model, name=plain or model.name)


def _read(file: LanguageModelKeys, overrides: Mapping[str, Any], notes: Sequence[str]) -> Architecture:
    """Return the language model of a file."""
    more = file.notes
    stated, model_type = _model_type(file, more)
    keys, canonical, replaced = _place(dict(file.keys), overrides)
    described = model_type in DESCRIBED and "gated_mlp" in keys and "norm_type" in keys
    defaults = {} if described else _defaults(stated, model_type, bool(file.section))
    config = Config(keys, model_type, defaults=defaults, overrides=canonical, replaced=replaced)
    config.notes += [*notes, *more]
    for key in _CROSSES:
        rule = "gives layers attention to another part, which is not understood"
        config.expect(keys.get(key) is not True, key, rule, "describe a model without it")
    for key in _DRAFTS:
        rule = "is of a draft that reads another model's states, which is not understood"
        config.expect(not keys.get(key), key, rule, "name the model that it drafts for, and speculate with it")
    model = with_task(config, written(builder(model_type, described)(config), config.facts.norm))
    quantization = quantization_of(config, model)
    assumptions = config.finish()
    strange = config.not_understood()
    if strange and any(note.endswith(_GUESSED) for note in more):
        raise InputError([Problem("model_type", stated, _why_not([], strange, alone=True), _AS_LLAMA)])
    if strange and (own := _own_class(file.keys)):
        rule = f"is a class of its own, of which {', '.join(strange)} may change layers"
        raise InputError([Problem("architectures", own, rule, "leave it out where these keys change none")])
    factor = _rotary_factor(file.keys)
    return replace(model, quantization=quantization, assumptions=assumptions, rotary_factor=factor)


def _rotary_factor(keys: Mapping[str, Any]) -> float:
    """Return the factor of linear scaling of positions, of the layers that have one; 0 where none is scaled so."""
    stated = [keys.get("rope_scaling"), keys.get("rope_parameters")]
    stated += [part for one in stated if isinstance(one, Mapping) for part in one.values()]
    linear = (one for one in stated if isinstance(one, Mapping) and "linear" in (one.get("rope_type"), one.get("type")))
    factor = next((one.get("factor") for one in linear), 0.0)
    if not isinstance(factor, int | float) or isinstance(factor, bool):
        return 0.0
    return float(factor) if 1 <= factor <= _LONGEST_FACTOR else 0.0


def _model_type(file: LanguageModelKeys, notes: list[str]) -> tuple[str, str]:
    """The type of the language model as its file has it, and the family that it is read as."""
    keys = file.keys
    word = keys.get("model_type")
    if "_class_name" in keys:
        rule = "is a part of a diffusion model, which is not understood"
        raise InputError([Problem("_class_name", keys["_class_name"], rule, "name a language model")])
    if not isinstance(word, str):
        remedy = 'add "model_type", such as "llama"'
        raise InputError([Problem("model_type", word, "is missing or not text", remedy)])
    text = TEXT_OF.get(word, word)
    known = SAME_AS.get(text, text)
    if known not in FAMILIES:
        return text, _nearest(word, keys, notes, alone=not file.others)
    if known != word:
        notes.append(f"model_type {word} is read as {known}")
    return text, known


def _nearest(word: str, keys: Mapping[str, Any], notes: list[str], alone: bool) -> str:
    """The family of an unknown type: the one its `architectures` name, or Llama if it says all that Llama says.

    A language model that has other parts beside it is not taken for Llama: its layers may attend to them.
    """
    by_class = {_letters(name): name for name in FAMILIES}
    named = keys.get("architectures")
    for architecture in named if isinstance(named, list) else ():
        family = by_class.get(str(architecture).lower().partition("for")[0])
        if family:
            notes.append(f"model_type {word} is unknown, read as {family} because its architecture is {architecture}")
            return family
    missing = [key for key in _LLAMA if keys.get(key) is None]
    strange = [key for key in keys if any(part in key for part in _NOT_LLAMA) and keys[key] not in (None, 0, False)]
    strange += ["hidden_act"] if keys.get("hidden_act") in _NO_GATE else []
    if alone and not missing and not strange:
        notes.append(f"model_type {word} is unknown, {_GUESSED}")
        return "llama"
    beyond = [what for what, tell in _BEYOND.items() if any(keys.get(key) not in (None, 0, False) for key in tell)]
    rule = f"has {', '.join(beyond)}, which is not understood" if beyond else _why_not(missing, strange, alone)
    raise InputError([Problem("model_type", word, rule, _near(word))])


def _own_class(keys: Mapping[str, Any]) -> str:
    """Return the class of a file whose code no family here has, empty where it has none or one that is known."""
    named = keys.get("architectures")
    # Sorted, since words of a class stand in another order at times: HunYuanMoEV1 of hunyuan_v1_moe.
    known = {tuple(sorted(_letters(name.lower()))) for name in (*FAMILIES, *SAME_AS, *TEXT_OF, *wrappers())}
    classes = [one for one in named if isinstance(one, str)] if isinstance(named, list) else []
    spelled = ((one, sorted(_letters(_PURPOSE.sub("", one, count=1).lower()))) for one in classes)
    return next((one for one, letters in spelled if tuple(letters) not in known), "")


def _why_not(missing: list[str], strange: list[str], alone: bool) -> str:
    lacks = f"lacks {', '.join(missing)}" if missing else ""
    has = f"has {', '.join(strange)}" if strange else ""
    others = "" if alone else "has parts beside it"
    reasons = " and ".join(filter(None, (lacks, has, others)))
    return f"is not a supported family, and cannot be read as llama: it {reasons}"


def _near(word: str) -> str:
    close = near(word, [*FAMILIES, *SAME_AS], 3, 0.5)
    return f"use a supported type{', such as ' + ', '.join(close) if close else ''}"


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


def _defaults(stated: str, model_type: str, nested: bool) -> dict[str, Any]:
    """The class defaults; sizes that every file states have none, unless a wrapper saved only the differences."""
    defaults = _class_defaults().get(stated) or _class_defaults().get(model_type, {})
    if nested:
        return defaults
    always = {key for name in _STATED for key in FIELDS[name].keys}
    return {key: value for key, value in defaults.items() if key not in always}


FilePart: TypeAlias = Literal["", "text"]
PARTS: tuple[FilePart, ...] = ("", "text")
"""What of a file is counted: all of it, or its language model alone."""

_TEXT = ("text_config", "language_config", "llm_config", "thinker_config")
# Sections of a part, whatever wraps them.
_WORDS = (
    *("vision", "visual", "vit_", "image", "audio", "speech", "talker", "token2wav", "code2wav", "tts", "projector"),
    *("tower", "qformer", "perceiver", "resampler", "connector", "aligner", "codec", "sam_", "vq_", "dit_", "backbone"),
)
_SECTIONS = ("encoder", "decoder", "encoder_config", "decoder_config", "text_encoder", "vision", "visual")
# Keys of flat files that name a part without describing it.
_NAMES = (
    *("mm_vision_tower", "vision_tower", "mm_projector_type", "audio_tower", "speech_encoder", "vision_lora"),
    *("speech_lora", "embd_layer", "img_processor", "audio_processor", "image_encoder", "vision_encoder"),
    "audio_encoder",
)
# Keys of a section that make it a model of its own, whatever it is called.
_WIDTHS, _DEPTHS = {*FIELDS["hidden_size"].keys, "embed_dim", "width"}, {*FIELDS["num_layers"].keys, "depth", "layers"}
_GENERATES = "forconditionalgeneration"
# What the language model takes from the file around it where it says nothing itself.
_OUTER = ("quantization_config", "torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageModelKeys:
    """The language model of a file: its keys, the section that held them ("" for a flat file), and other parts."""

    keys: dict[str, Any]
    section: str = ""
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What was left out."""
        if not self.others:
            return []
        where = f" ({self.section})" if self.section else ""
        return [f"only the language model{where} is counted, without {', '.join(self.others)}"]

    def problems(self) -> list[Problem]:
        """Return a problem for each part beside the language model."""
        remedy = "count the language model alone with --part text (part='text')"
        return [
            Problem(name, value, "is a part of the model that is not understood", remedy)
            for name, value in self.others.items()
        ]


@cache
def wrappers() -> dict[str, dict[str, Any]]:
    """Return the classes of several parts by model type: `parts`, and `tied` where the class decides it."""
    with open(os.path.join(os.path.dirname(__file__), "class_defaults.json"), encoding="ascii") as file:
        return cast(dict[str, dict[str, Any]], json.load(file)["wrappers"])


def unwrap(raw: Mapping[str, Any]) -> LanguageModelKeys:
    """Return the language model of a file and the parts beside it.

    >>> unwrap({"model_type": "new_vl", "text_config": {"hidden_size": 8}, "vision_config": {"depth": 2}}).others
    {'vision_config': 'an object'}
    """
    if not isinstance(raw, Mapping):
        raise InputError(
            [Problem("config", type(raw).__name__, "must be an object", "give the contents of config.json")]
        )
    section = next((key for key in _TEXT if isinstance(raw.get(key), Mapping)), "")
    others = _others(raw, section)
    if not section:
        return LanguageModelKeys(keys={key: value for key, value in raw.items() if key not in others}, others=others)
    inner = unwrap(raw[section])
    keys = {key: raw[key] for key in _OUTER if key in raw} | inner.keys | _tied(raw)
    if keys.get("model_type") is None:
        keys["model_type"] = raw.get("model_type")
    others |= {f"{section}.{name}": stated for name, stated in inner.others.items()}
    path = ".".join(filter(None, (section, inner.section)))
    return LanguageModelKeys(keys=keys, section=path, others=others or {"model_type": raw.get("model_type")})


def _others(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The parts beside the language model: sections that the file has, and those that its class always has."""
    parts: dict[str, Any] = {}
    of_class = _of_class(raw)
    for key, value in raw.items():
        named = key in _NAMES or (key in of_class and key not in _TEXT)
        if isinstance(value, Mapping):
            named |= key in _SECTIONS or any(word in key for word in _WORDS)
            named |= not _WIDTHS.isdisjoint(value) and not _DEPTHS.isdisjoint(value)
        if key != section and named and value:
            parts[key] = value.get("model_type") or "an object" if isinstance(value, Mapping) else value
    if section or not parts:
        parts |= {key: "left to its class" for key in of_class if key not in _TEXT and raw.get(key) is None}
    return parts


def _of_class(raw: Mapping[str, Any]) -> list[str]:
    """The parts of the class of a file: that of its type, or of the one that its `architectures` name."""
    named = raw.get("architectures")
    classes = [str(one).lower() for one in named] if isinstance(named, list) else []
    words = [raw.get("model_type"), *(one.removesuffix(_GENERATES) for one in classes if one.endswith(_GENERATES))]
    by_letters = {_letters(name): row["parts"] for name, row in wrappers().items()}
    return next((by_letters[word] for word in map(_letters, words) if word in by_letters), [])


def _letters(word: object) -> str:
    return word.replace("_", "").replace("-", "") if isinstance(word, str) else ""


def _tied(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Whether embedding and head are one table: the outer file decides, or its class (transformers 5.23.0)."""
    if "tie_word_embeddings" in raw:
        return {"tie_word_embeddings": raw["tie_word_embeddings"]}
    word = raw.get("model_type")
    tied = wrappers().get(word, {}).get("tied") if isinstance(word, str) else None
    return {} if tied is None else {"tie_word_embeddings": tied}
