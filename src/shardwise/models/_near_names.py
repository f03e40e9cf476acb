"""Which names of the catalogue may be meant by one that it does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from shardwise.errors import near
from shardwise.user_catalogue import plain


def names_alike(word: str, names: Sequence[str], alike: float) -> list[str]:
    """Return three names that a wrong one may stand for: those that leave no part of it out, the latest release first.

    Behind them are those of its series and those that are spelt alike, each at least so alike.

    >>> releases = ["llama-7b", "llama-2-70b", "llama-3-70b", "llama-3.3-70b", "qwen3-32b"]
    >>> names_alike("llama-70b", releases, 0.5), names_alike("qwen-32b", releases, 0.5)[0]
    (['llama-3.3-70b', 'llama-3-70b', 'llama-2-70b'], 'qwen3-32b')
    """
    series = _series(word)
    own = [name for name in names if series and plain(_series(name)) == plain(series)]
    whole = _complete(word, names)
    return list(dict.fromkeys([*whole, *near(word, own, 3, alike), *near(word, names, 3, alike)]))[:3]


def _complete(word: str, names: Sequence[str]) -> list[str]:
    """Return the names that have every part of a word of two parts or more, with the fewest and highest others."""
    parts = _parts(word)
    if len(parts) < 2:
        return []
    more = {name: [part for part in _parts(name) if part not in parts] for name in names}
    complete = [name for name in names if set(parts) <= set(_parts(name))]
    latest = sorted(complete, key=lambda name: [_value(part) for part in more[name]], reverse=True)
    return sorted(latest, key=lambda name: len(more[name]))


def _parts(name: str) -> list[str]:
    """Return the words and the numbers of a name: llama, 3.3, 70b."""
    return re.findall(r"\d+(?:x\d+)?(?:\.\d+)*[bmt]?(?![a-z])|[a-z]+|\d+", name.lower())


def _value(part: str) -> float:
    """Return what a part is sorted by, the highest first: a release by its number, behind it the smaller size."""
    number = re.match(r"\d+(\.\d+)?", part)
    return -math.inf if number is None else float(number[0]) if number[0] == part else -float(number[0])


def _series(name: str) -> str:
    """Return a name up to its first number, which makes a series: qwen3.5, deepseek-v4; "" where it has none."""
    start = re.match(r"[^\d]*\d+(\.\d+)*", name)
    return start[0] if start else ""


def named_inside(own: str, names: Sequence[str]) -> list[str]:
    """Return the model that a tuned one names, the longest of those that stand in its name.

    >>> known = ["llama-3.1-8b", "qwen2.5-7b", "qwen2.5-72b"]
    >>> named_inside("hermes-3-llama-3.1-8b", known), named_inside("qwen2.5-7b-instruct-abliterated", known)
    (['llama-3.1-8b'], ['qwen2.5-7b'])
    """
    own = plain(own)
    inside = [name for name in names if len(name) > 6 and re.search(rf"{re.escape(plain(name))}(?![\d.])", own)]
    return sorted(inside, key=len)[-1:]
