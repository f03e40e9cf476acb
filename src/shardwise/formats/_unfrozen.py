"""Patterns of parameters' names that train, as words for parts of a model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from shardwise.formats._imported import Keys
from shardwise.formats._words import words_of
from shardwise.models import Model, layer_name, layer_names

_LINEAR = {"attention": ("q", "k", "v", "o"), "mlp": ("gate", "up", "down")}
_NORMS = ("input_layernorm", "post_attention_layernorm")
_PARENTS = {"attention": "self_attn", "mlp": "mlp"}
_WHOLE = {"embedding": "model.embed_tokens.weight", "head": "lm_head.weight", "norms": "model.norm.weight"}
# What a pattern may hold: no group that repeats, and few repeats, so that no name takes long.
_PLAIN = re.compile(r"(?!.*\)[+*{?])(?!(?:.*[+*{]){5})[\w.^$|()?:\[\]\\+*{},-]{1,200}", re.ASCII)
_RANGE = re.compile(r"\[\d*(:\d*)?\]$")


def unfrozen_parts(keys: Keys, path: str, model: Model | None) -> tuple[str, ...]:
    """Return what patterns of names let train of a model, nothing where that is all or is not found out.

    Patterns match from the start of a name, dots are themselves, and a range of rows behind one leaves the parameter
    whole in memory (axolotl 0.19.0 utils/freeze.py LayerNamePattern and freeze_layers_except).
    """
    texts = words_of(keys, path)
    if not texts:
        return ()
    if model is None or model.has_experts or layer_names(model.family) or not all(map(_PLAIN.fullmatch, texts)):
        keys.assumed.append(f"all weights train: which ones {path} names is not found out")
        return ()
    try:
        patterns = [re.compile(re.sub(r"\.(?!\+)", r"\\.", _RANGE.sub("", text))) for text in texts]
    except re.error:
        keys.fail(path, "has a pattern that is no regular expression", "write for example ^lm_head.weight$")
        return ()

    def trains(name: str) -> bool:
        return any(pattern.match(name) for pattern in patterns)

    linear = {f"{_PARENTS[part]}.{layer_name(model.family, part, short)}.weight" for part in _LINEAR
              for short in _LINEAR[part]}  # fmt: skip
    reached = {at: {name for name in linear if trains(f"model.layers.{at}.{name}")} for at in range(model.num_layers)}
    norms = any(trains(f"model.layers.{at}.{name}.weight") for at in reached for name in _NORMS)
    parts = [word for word, name in _WHOLE.items() if trains(name) or (word == "norms" and norms)]
    if not parts and not any(reached.values()):
        keys.fail(path, f"names nothing of {model.name} from its start", "write for example model.layers.31.")
    if any(reached.values()):
        parts = [word for word in parts if word != "norms" or trains(_WHOLE[word])]
    if any(names and names != linear for names in reached.values()):
        keys.assumed.append(f"whole layers train: those of which {path} names a part are not told apart")
    return (*parts, *_ranges(at for at, names in reached.items() if names))


def _ranges(layers: Iterable[int]) -> list[str]:
    """Return the words of layers, in whole ranges.

    >>> _ranges([0, 1, 2, 7])
    ['layers:0-2', 'layers:7']
    """
    runs: list[list[int]] = []
    for at in layers:
        if runs and at == runs[-1][1] + 1:
            runs[-1][1] = at
        else:
            runs.append([at, at])
    return [f"layers:{first}" if first == last else f"layers:{first}-{last}" for first, last in runs]
