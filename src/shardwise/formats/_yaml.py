"""YAML as PyYAML reads it for accelerate itself, without what a file of settings does not need.

Source: YAML 1.1 by PyYAML's safe loader, in C where it has that. Tags and several documents are refused, and aliases
where what they stand for adds up to more than a file says without any: they alone let a kilobyte be a terabyte.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from shardwise.errors import InputError, Problem, bounded, cut
from shardwise.files import check_tree
from shardwise.formats._imported import Keys
from shardwise.shell import left_open

MOST_DEPTH = 32
MOST_CHARACTERS = 16000
"""Characters of one value or key."""
MOST_REPEATED = 10_000
"""Keys, values, maps and lists that all aliases of a file stand for together."""


def parse(text: str, source: str = "file") -> dict[str, Any]:
    r"""Return the map that a file holds, merges and aliases written out; raises `InputError` with a line.

    >>> parse("a: 1\nb:\n  c: true  # note\n  d:\n  - x\n  - 2.5")
    {'a': 1, 'b': {'c': True, 'd': ['x', 2.5]}}
    """
    import yaml

    try:
        with bounded("file", source):
            aliases = _check_events(text, source)
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
    if aliases:
        tree = {key: _copied(value) for key, value in tree.items()}
    check_tree(tree, source, "file")
    return tree


def _check_events(text: str, source: str) -> bool:
    """Return whether a file has aliases; raises `InputError` for what settings lack, before any of it is built."""
    import yaml

    count = _Repeated()
    depth = documents = 0
    for event in yaml.parse(text, Loader=_loader()):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        documents += isinstance(event, yaml.DocumentStartEvent)
        rules = {
            "uses a tag": getattr(event, "tag", None) is not None,
            "is the second document": documents > 1,
            f"has more than {MOST_CHARACTERS:,} characters": len(getattr(event, "value", "")) > MOST_CHARACTERS,
            **count.rules(event),
            f"nests deeper than {MOST_DEPTH} levels": max(depth, count.deepest) > MOST_DEPTH,
        }
        if rule := next((rule for rule, broken in rules.items() if broken), ""):
            raise _refused(source, event.start_mark.line + 1 if event.start_mark else 0, rule)
    return count.repeated > 0


@dataclass(slots=True)
class _Repeated:
    """What stands at each anchor, as nodes and levels once its own aliases are written out.

    An alias is counted as what it stands for before that is copied, so that no file is built to be measured.
    """

    known: dict[str, tuple[int, int]] = field(default_factory=dict)
    open: list[list[Any]] = field(default_factory=list)
    repeated: int = 0
    deepest: int = 0

    def rules(self, event: Any) -> dict[str, bool]:
        """Return the rules on aliases, and which of them an event breaks; it is counted."""
        import yaml

        inside = False
        if isinstance(event, yaml.AliasEvent):
            inside = any(name == event.anchor for name, _, _ in self.open)
            nodes, levels = self.known.get(str(event.anchor), (1, 0))
            self.repeated += nodes
            self._add(nodes, levels)
        elif isinstance(event, yaml.CollectionStartEvent):
            self.open.append([event.anchor, 1, 1])
        elif isinstance(event, yaml.ScalarEvent):
            self._close(event.anchor, 1, 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            self._close(*self.open.pop())
        return {
            f"has aliases that stand for more than {MOST_REPEATED:,} keys and values": self.repeated > MOST_REPEATED,
            "has an alias inside what it stands for": inside,
        }

    def _close(self, anchor: str | None, nodes: int, levels: int) -> None:
        if anchor is not None:
            self.known[anchor] = nodes, levels
        self._add(nodes, levels)

    def _add(self, nodes: int, levels: int) -> None:
        self.deepest = max(self.deepest, len(self.open) + levels)
        if self.open:
            self.open[-1][1] += nodes
            self.open[-1][2] = max(self.open[-1][2], levels + 1)


def _copied(tree: Any) -> Any:
    """Return values in which nothing is shared, as if each alias had been written out."""
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(value) for value in tree] if isinstance(tree, list) else tree


@cache
def _loader() -> Any:
    """Return the safe loader that refuses keys that stand twice."""
    import yaml

    class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
        checked: dict[int, Any]

        def flatten_mapping(self, node: Any) -> None:
            """Write out what a map merges, after its own keys were checked: then they stand beside others'."""
            self.__dict__.setdefault("checked", {})
            if id(node) in self.checked:
                return
            self.checked[id(node)] = node
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key.start_mark)
                if key.value in seen:
                    rule = f"the key {cut(key.value)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, rule, key.start_mark)
                seen.add(key.value)
            super().flatten_mapping(node)

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


def mapping(value: Any) -> Mapping[str, Any]:
    """Return an object of a tree, an empty one for whatever else stands there.

    >>> mapping({"replicas": 2}), mapping("two")
    ({'replicas': 2}, {})
    """
    return value if isinstance(value, Mapping) else {}


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
