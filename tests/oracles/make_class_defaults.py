"""Writes the class defaults of the configuration classes of transformers: src/shardwise/models/class_defaults.json.

Beside them the classes of several parts (a language model with a vision tower, an encoder with a decoder): the keys of
their parts, and whether the class ties the embedding and the head where the file does not say.

Needs transformers (pinned below), no network. A default that moves when another size is changed is not a default but a
derivation (head_dim from hidden_size, per-layer lists from num_hidden_layers); those are left out, and the importer
derives them itself.

    python tests/oracles/make_class_defaults.py
"""

import json
import os
import pathlib
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import transformers
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "num_key_value_heads")
PINNED = "5.24.0"
ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "src"))

from shardwise.models._fields import NO_EFFECT  # noqa: E402  (the package need not be installed here)
from shardwise.models.families import FAMILIES, SAME_AS  # noqa: E402

TYPES = sorted({*FAMILIES, *SAME_AS} & set(CONFIG_MAPPING_NAMES))


def scalars(config: object) -> dict[str, object]:
    """The scalar fields of a configuration that say something about sizes."""
    everything = json.loads(config.to_json_string(use_diff=False))  # type: ignore[attr-defined]
    return {
        key: value
        for key, value in everything.items()
        if isinstance(value, (int, float, str, type(None))) and key not in NO_EFFECT and not key.startswith("_")
    }


def defaults(model_type: str) -> dict[str, object]:
    """The scalar class defaults that do not move with another size."""
    config = AutoConfig.for_model(model_type)
    base, names = scalars(config), dict(getattr(config, "attribute_map", {}))
    moved: set[str] = set()
    for canonical in SIZES:
        key = names.get(canonical, canonical)
        value = base.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        try:
            other = scalars(AutoConfig.for_model(model_type, **{key: 2 * value}))
        except Exception:  # a class may refuse the pair; then nothing is learned about it
            continue
        moved |= {name for name, default in base.items() if other.get(name) != default and name != key}
    return {key: value for key, value in base.items() if key not in moved}


# Sections of one model, which are no parts of their own.
SECTIONS = {"attn_config", "ffn_config"}


def wrappers() -> dict[str, dict[str, object]]:
    """The parts of every class that has some, and whether it ties embedding and head: null where it does not say."""
    found: dict[str, dict[str, object]] = {}
    for model_type in sorted(CONFIG_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(model_type)
        except Exception:  # a class that cannot be made without arguments has no defaults to read
            continue
        parts = sorted(set(type(config).sub_configs) - SECTIONS)
        if parts:
            found[model_type] = {"parts": parts, "tied": getattr(config, "tie_word_embeddings", None)}
    return found


if __name__ == "__main__":
    if transformers.__version__ != PINNED:
        raise SystemExit(f"transformers {PINNED} is pinned, found {transformers.__version__}")
    lines = []
    for model_type in TYPES:
        lines.append(f"  {json.dumps(model_type)}: {json.dumps(defaults(model_type))}")
    head = json.dumps(f"class defaults of the configuration classes of transformers {PINNED}, read 2026-11-29")
    whole = [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in wrappers().items()]
    text = f'{{\n "source": {head},\n "defaults": {{\n' + ",\n".join(lines) + "\n },\n"
    text += ' "wrappers": {\n' + ",\n".join(whole) + "\n }\n}\n"
    (ROOT / "src/shardwise/models/class_defaults.json").write_text(text)
