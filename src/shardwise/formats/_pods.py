"""Containers of Kubernetes objects that start a serving engine, with what is said of them above."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from shardwise.formats._launched import engine_in
from shardwise.records import dataclass, replace


@dataclass(slots=True)
class Service:
    """One set of like pods: their command line, how many there are, what they are said to run, variables and image."""

    text: str = ""
    replicas: int = 1
    role: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    image: str = ""


def services_of(tree: Any, above: Service | None = None) -> Iterator[Service]:
    """Yield the containers of a tree of Kubernetes objects that start something, with what is said of them above."""
    above = above or Service()
    if isinstance(tree, list):
        for one in tree:
            yield from services_of(one, above)
    if not isinstance(tree, Mapping):
        return
    copies = tree.get("replicas")
    here = Service(
        replicas=above.replicas * copies if type(copies) is int else above.replicas,
        role=_role(tree) or above.role,
        variables={**above.variables, **_variables(tree)},
        image=str(tree.get("image", "")),
    )
    started = _words(tree.get("command")) or _words(tree.get("image"))  # whose entry point takes the arguments
    words = [_filled(word, here.variables) for word in (*started, *_words(tree.get("args")))]
    text = "\n".join(words) if any("\n" in word for word in words) else shlex.join(words)
    if words and (engine_in(text) or engine_in(" ".join(words))):
        script = len(words) > 2 and words[-2] in ("-c", "-lc", "-ec")
        open_ = r"${\1}" if script or "\n" in text else "'\"${\\1}\"'"  # between the quotes around a word
        yield replace(here, text=_VARIABLE.sub(open_, words[-1] if script else text))
        return
    for value in tree.values():
        yield from services_of(value, here)


# A variable in the words of a container, which Kubernetes fills: of a container's own, or of its pod's by their names
# in capitals (kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables).
_VARIABLE = re.compile(r"\$\(([A-Z][A-Z0-9_]*)\)")


def _filled(word: str, variables: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word)


def _role(tree: Mapping[str, Any]) -> str:
    """Return what pods are said to run: of Dynamo's components, or by the name of a role with pods of its own."""
    if "subComponentType" in tree or "podTemplate" in tree:
        return str(tree.get("subComponentType", tree.get("type", "")))
    named = str(tree.get("name", "")) if "template" in tree else ""
    return named if named in ("prefill", "decode") else ""


def _variables(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables of a container, and those that LeaderWorkerSet sets in a group of so many pods."""
    values: dict[str, str] = {}
    for one in (one for key in ("env", "envs") if isinstance(listed := tree.get(key), list) for one in listed):
        if isinstance(one, Mapping) and {"name", "value"} <= one.keys():
            values[str(one["name"])] = str(one["value"])
    return values | ({"LWS_GROUP_SIZE": str(tree["size"])} if isinstance(tree.get("size"), int) else {})


def _words(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else [str(value)] if isinstance(value, str) else []
