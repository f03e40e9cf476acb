"""YAML as PyYAML reads it for accelerate itself, without what a file of settings does not need.

Source: YAML 1.1 by PyYAML's safe loader, in C where it has that. Anchors, aliases, tags and several documents are
refused: aliases alone let a kilobyte stand for a terabyte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from shardwise.errors import InputError, Problem, bounded, cut
from shardwise.files import check_tree
from shardwise.formats._imported import Keys
from shardwise.shell import left_open

MOST_DEPTH = 32
MOST_CHARACTERS = 16000
"""Characters of one value or key."""


def parse(text: str, source: str = "file") -> dict[str, Any]:
    r"""Return the map that a file holds; raises `InputError` with the line of what is refused.

    >>> parse("a: 1\nb:\n  c: true  # note\n  d:\n  - x\n  - 2.5")
    {'a': 1, 'b': {'c': True, 'd': ['x', 2.5]}}
    """
    import yaml

    try:
        with bounded("file", source):
            _check_events(text, source)
            tree = yaml.load(text, Loader=_loader())
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise _refused(source, line, f"is not valid YAML ({cut(str(error.problem))})") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise _refused(source, 0, f"is not valid YAML ({cut(' '.join(str(error).split()))})") from None
    if not isinstance(tree, dict):
        raise InputError([Problem("file", source, "holds no keys", "write for example distributed_type: FSDP")])
    check_tree(tree, source, "file")
    return tree


def _check_events(text: str, source: str) -> None:
    """Raise `InputError` for what a plain file of settings does not have, before anything is built of it."""
    import yaml

    depth = documents = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        tagged = getattr(event, "tag", None) is not None
        rules = {
            "uses an anchor, an alias or a tag": getattr(event, "anchor", None) is not None or tagged,
            f"nests deeper than {MOST_DEPTH} levels": depth > MOST_DEPTH,
            "is the second document": documents > 1,
            f"has more than {MOST_CHARACTERS:,} characters": len(getattr(event, "value", "")) > MOST_CHARACTERS,
        }
        if rule := next((rule for rule, broken in rules.items() if broken), ""):
            raise _refused(source, event.start_mark.line + 1 if event.start_mark else 0, rule)


@cache
def _loader() -> Any:
    """Return the safe loader that refuses keys that stand twice."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value == "<<":
                    raise yaml.constructor.ConstructorError(None, None, "merges another map", key.start_mark)
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key.start_mark)
                if key.value in seen:
                    rule = f"the key {cut(key.value)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, rule, key.start_mark)
                seen.add(key.value)
            return dict(super().construct_mapping(node, deep))

    return Loader


def _refused(source: str, line: int, rule: str) -> InputError:
    where = f"{source} line {line}" if line else source
    return InputError([Problem("file", where, rule, "write plain maps, lists and values")])


def dump(tree: dict[str, Any]) -> str:
    r"""Return a map as text that `parse` reads back.

    >>> dump({"a": 1, "b": {"c": True, "d": None, "e": "no"}})
    "a: 1\nb:\n  c: true\n  d: null\n  e: 'no'\n"
    """
    import yaml

    return yaml.dump(tree, Dumper=_dumper(), sort_keys=False)


@cache
def _dumper() -> Any:
    """Return the safe dumper that writes text of several lines as it stands, and no aliases."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return Dumper


_ASSIGNED = re.compile(r"[+~]{0,2}([A-Za-z_][\w.@/-]{0,200})=(.*)", re.DOTALL)
_NAMED = re.compile(r"\$\{(?:oc\.select:)?([\w.]{1,200})(?:,([^{}]{0,200}))?\}")
MOST_STEPS = 8
"""Settings that may name each other in a row."""


def assigned(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings of a command line by their dotted paths, and the words that are none.

    >>> assigned(["--recipe", "a", "train.micro_batch_size=2", "+model.fp8=null"])
    ({'train.micro_batch_size': 2, 'model.fp8': None}, ['--recipe', 'a'])
    """
    values: dict[str, Any] = {}
    rest: list[str] = []
    for word in words:
        one = None if word.startswith("-") else _ASSIGNED.fullmatch(word)
        if one is None:
            rest.append(word)
        else:
            values[one[1]] = value_of(one[2])
    return values, rest


def value_of(text: str) -> Any:
    """Return the value that a word stands for, itself where it is no plain YAML.

    >>> value_of("[1, 2]"), value_of("True"), value_of("a: b: c")
    ([1, 2], True, 'a: b: c')
    """
    from shardwise.errors import InputError

    try:
        return parse(f"value: {text}")["value"]
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
    """Record settings that are read and hang on a variable that nobody set; they then have no value.

    A model may be named beside the file: where it hangs on one, there is none.
    """
    for path in [path for path in keys.values if keys.table["read"].get(path, "model") != "model"]:
        value = keys.values[path]
        why = left_open(value) if isinstance(value, str) else None
        if why is not None:
            keys.problems.add(path, value, *why)
            keys.values[path] = None
