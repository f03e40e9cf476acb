"""A case written back as the words of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

_LEFT_OUT = ("command", "model", "json", "width", "config", "save", "help", "plot", "timeline", "from_args")


def command_words(command: str, values: Mapping[str, Any]) -> list[str]:
    """Return the words that say a case; pairs of flag and value are one word each, so that lines break between them.

    >>> command_words("train", {"model": "gpt2", "on": "8xh100", "tp": 8, "overlap": False})
    ['shardwise train gpt2', '--on 8xh100', '--tp 8', '--no-overlap']
    """
    first = ["shardwise", command, *([shlex.quote(str(values["model"]))] if "model" in values else [])]
    found = [" ".join(first)]
    for key, value in values.items():
        if key in _LEFT_OUT or value is None:
            continue
        dashed = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            found.append(f"--{dashed} {shlex.quote(_text(value))}")
    if "from_args" in values:
        found += ["--", *map(shlex.quote, values["from_args"])]
    return found


def _text(value: Any) -> str:
    """Return a value as a flag reads it back, to the last digit."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, float) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return repr(value) if isinstance(value, float) else str(value)
