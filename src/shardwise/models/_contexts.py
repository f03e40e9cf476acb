"""Contexts of releases that share the sizes of a model of the catalogue and were trained to another length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.user_catalogue import plain


def released_context(entry: Mapping[str, Any], word: str) -> int:
    """Return the context of a release by the name that somebody says, 0 where it is that of the entry.

    A folder and another owner's copy are known by their last part, as the release is.

    >>> entry = {"contexts": {"Qwen/Qwen2.5-7B-Instruct": 32768}}
    >>> [released_context(entry, one) for one in ("qwen2.5-7b-instruct", "me/Qwen2.5-7B-Instruct", "qwen2.5-7b")]
    [32768, 32768, 0]
    """
    contexts: dict[str, int] = entry.get("contexts", {})
    own = plain(re.split(r"[/\\]", word.rstrip("/\\"))[-1])
    whole = plain(word)
    for name, tokens in contexts.items():
        last = name.rpartition("/")[2]
        if plain(last) == own or whole in (plain(name), plain(name.replace("/", "_"))):
            return tokens
    return 0
