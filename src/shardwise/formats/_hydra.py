"""Settings as Hydra and OmegaConf take them: `a.b.c=value` words of a command line, and `${a.b}` within a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.errors import Problem
from shardwise.formats import _yaml
from shardwise.formats._keys import Keys

_ASSIGNED = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]{0,200})=(.*)", re.DOTALL)
_NAMED = re.compile(r"\$\{(?:oc\.select:)?([\w.]{1,200})(?:,([^{}]{0,200}))?\}")
_OPEN = re.compile(r"\$\{?(\w+)")
MOST_STEPS = 8
"""Settings that may name each other in a row."""


def assigned(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a command line by their dotted paths, and the words that are none.

    >>> assigned(["--recipe", "a", "train.micro_batch_size=2", "+model.fp8=null"])
    ({'train.micro_batch_size': 2, 'model.fp8': None}, ['--recipe', 'a'])
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        one = None if word.startswith("-") else _ASSIGNED.fullmatch(word)
        if one is None:
            rest.append(word)
        else:
            found[one[1]] = value_of(one[2])
    return found, rest


def value_of(text: str) -> Any:
    """Return the value that a word stands for, itself where it is no plain YAML.

    >>> value_of("[1, 2]"), value_of("True"), value_of("a: b: c")
    ([1, 2], True, 'a: b: c')
    """
    from shardwise.errors import InputError

    try:
        return _yaml.parse(f"value: {text}")["value"]
    except InputError:
        return text


def resolved(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which those that name another have its value, or the default beside the name.

    >>> resolved({"a": 2, "b": "${a}", "c": "${oc.select:x.y,512}"})
    {'a': 2, 'b': 2, 'c': 512}
    """
    return {path: _followed(value, values) for path, value in values.items()}


def _followed(value: Any, values: Mapping[str, Any]) -> Any:
    for _ in range(MOST_STEPS):
        one = _NAMED.fullmatch(value) if isinstance(value, str) else None
        if one is None:
            return value
        value = values[one[1]] if one[1] in values else None if one[2] is None else value_of(one[2])
    return None


def refuse_open(keys: Keys) -> None:
    """Record settings that are read and hang on a variable that nobody set; they then have no value."""
    for path in [path for path in keys.values if path in keys.table["read"]]:
        value = keys.values[path]
        one = _OPEN.search(value) if isinstance(value, str) else None
        if one:
            rule = f"depends on ${one[1]}, which the script does not set"
            keys.problems.items.append(Problem(path, value, rule, f"give --set {one[1]}=VALUE"))
            keys.values[path] = None
