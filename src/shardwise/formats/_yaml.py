"""YAML as PyYAML reads it for accelerate itself, without what a file of settings does not need.

Source: YAML 1.1 by PyYAML's safe loader, in C where it has that. Anchors, aliases, tags and several documents are
refused: aliases alone let a kilobyte stand for a terabyte.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from shardwise.errors import InputError, Problem, bounded, cut
from shardwise.files import check_tree

MOST_DEPTH = 32
MOST_CHARACTERS = 4000
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
                    said = f"the key {cut(key.value)} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, said, key.start_mark)
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
