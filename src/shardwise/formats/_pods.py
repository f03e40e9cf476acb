"""Containers of Kubernetes objects that start a serving engine, with what is said of them above."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from shardwise.formats._launched import engine_in
from shardwise.records import dataclass, replace


@dataclass(slots=True)
class Service:
    """One set of like pods: their command line, how many there are, what they are said to run, and their variables."""

    text: str = ""
    replicas: int = 1
    role: str = ""
    variables: dict[str, str] = field(default_factory=dict)


def services_of(tree: Any, above: Service | None = None) -> Iterator[Service]:
    """Yield the containers of a tree of Kubernetes objects that start something, with what is said of them above."""
    above = above or Service()
    if isinstance(tree, list):
        for one in tree:
            yield from services_of(one, above)
    if not isinstance(tree, Mapping):
        return
    here = Service(
        replicas=tree["replicas"] if isinstance(tree.get("replicas"), int) else above.replicas,
        role=str(tree.get("subComponentType", tree.get("type", "") if "podTemplate" in tree else above.role)),
        variables={**above.variables, **_variables(tree)},
    )
    started = _words(tree.get("command")) or _words(tree.get("image"))  # whose entry point takes the arguments
    words = [*started, *_words(tree.get("args"))]
    text = "\n".join(words) if any("\n" in word for word in words) else shlex.join(words)
    if words and (engine_in(text) or engine_in(" ".join(words))):
        inline = words[-1] if len(words) > 2 and words[-2] in ("-c", "-lc", "-ec") else text
        yield replace(here, text=inline if "\n" in text or inline != text else text)
        return
    for value in tree.values():
        yield from services_of(value, here)


def _variables(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container, and those that LeaderWorkerSet sets in a group of so many pods."""
    values: dict[str, str] = {}
    for one in (one for key in ("env", "envs") if isinstance(listed := tree.get(key), list) for one in listed):
        if isinstance(one, Mapping) and {"name", "value"} <= one.keys():
            values[str(one["name"])] = str(one["value"])
    return values | ({"LWS_GROUP_SIZE": str(tree["size"])} if isinstance(tree.get("size"), int) else {})


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)] if isinstance(value, str) else []
