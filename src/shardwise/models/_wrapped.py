"""Files of several parts: the keys of the language model, and what stands beside it.

A multimodal file holds its language model in a section of its own (`text_config`), or flat with a tower in a section
beside it. What is counted is the language model; another part is named, so that nobody takes the rest for the whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import field
from functools import cache
from typing import Any, Literal, TypeAlias, cast

from shardwise.errors import InputError, Problem
from shardwise.records import dataclass

Part: TypeAlias = Literal["", "text"]
PARTS: tuple[Part, ...] = ("", "text")
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
    *("speech_lora", "embd_layer", "img_processor", "audio_processor"),
)
# What the language model takes from the file around it where it says nothing itself.
_OUTER = ("quantization_config", "torch_dtype", "dtype")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwrapped:
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
            Problem(name, said, "is a part of the model that is not understood", remedy)
            for name, said in self.others.items()
        ]


@cache
def wrappers() -> dict[str, dict[str, Any]]:
    """Return the classes of several parts by model type: `parts`, and `tied` where the class decides it."""
    with open(os.path.join(os.path.dirname(__file__), "class_defaults.json"), encoding="ascii") as file:
        return cast(dict[str, dict[str, Any]], json.load(file)["wrappers"])


def unwrap(raw: Mapping[str, Any]) -> Unwrapped:
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
        return Unwrapped(keys={key: value for key, value in raw.items() if key not in others}, others=others)
    inner = unwrap(raw[section])
    keys = {key: raw[key] for key in _OUTER if key in raw} | inner.keys | _tied(raw)
    if keys.get("model_type") is None:
        keys["model_type"] = raw.get("model_type")
    others |= {f"{section}.{name}": said for name, said in inner.others.items()}
    path = ".".join(filter(None, (section, inner.section)))
    return Unwrapped(keys=keys, section=path, others=others or {"model_type": raw.get("model_type")})


def _others(raw: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The parts beside the language model: sections that the file has, and those that its class always has."""
    found: dict[str, Any] = {}
    of_class = _of_class(raw.get("model_type"))
    for key, value in raw.items():
        named = isinstance(value, Mapping) and (key in _SECTIONS or any(word in key for word in _WORDS))
        if key != section and value and (named or key in _NAMES or (key in of_class and key not in _TEXT)):
            found[key] = _said(value)
    if section or not found:
        found |= {key: "left to its class" for key in of_class if key not in _TEXT and raw.get(key) is None}
    return found


def _of_class(word: object) -> list[str]:
    return list(wrappers().get(word, {}).get("parts", ())) if isinstance(word, str) else []


def _said(value: Any) -> Any:
    """What a file says of a part: its type where it is an object."""
    return value.get("model_type") or "an object" if isinstance(value, Mapping) else value


def _tied(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Whether embedding and head are one table: the outer file decides, or its class (transformers 5.23.0)."""
    if "tie_word_embeddings" in raw:
        return {"tie_word_embeddings": raw["tie_word_embeddings"]}
    word = raw.get("model_type")
    tied = wrappers().get(word, {}).get("tied") if isinstance(word, str) else None
    return {} if tied is None else {"tie_word_embeddings": tied}
