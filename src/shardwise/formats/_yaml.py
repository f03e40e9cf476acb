"""The part of YAML that configuration files of accelerate use, without a further package: maps, lists and plain values.

Source: YAML 1.2.2, sections 6 to 8; anchors, tags, several documents and folded text are refused.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.errors import InputError, Problem

_KEY = re.compile(r"""("[^"]*"|'[^']*'|[^\s#:'"\[\]{},&*!|>%@`][^:#]*?)\s*:(?:\s+(.*))?$""")
_NUMBER = re.compile(r"[-+]?(\d+|\d+\.\d*|\.\d+|\d+(\.\d*)?[eE][-+]?\d+)$")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None, "yes": True, "no": False}


def parse(text: str, source: str = "file") -> dict[str, Any]:
    r"""Return the map that a file holds; raises `InputError` for what is not understood, with its line.

    >>> parse("a: 1\nb:\n  c: true  # note\n  d:\n  - x\n  - 2.5")
    {'a': 1, 'b': {'c': True, 'd': ['x', 2.5]}}
    """
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        content = _uncommented(line)
        if content.strip() and content.strip() != "---":
            lines.append((number, len(content) - len(content.lstrip(" ")), content.strip()))
    if not lines:
        raise InputError([Problem("file", source, "holds no keys", "write for example distributed_type: FSDP")])
    reader = _Reader(lines, source)
    found = reader.block(lines[0][1])
    if not isinstance(found, dict) or reader.at < len(lines):
        raise reader.error("is not a map of keys at this depth")
    return found


def _uncommented(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i].rstrip()
    return line.rstrip()


class _Reader:
    """Reads lines of (number, indent, text) one after the other."""

    def __init__(self, lines: list[tuple[int, int, str]], source: str) -> None:
        self.lines, self.source, self.at = lines, source, 0

    def error(self, rule: str) -> InputError:
        number, _, text = self.lines[min(self.at, len(self.lines) - 1)]
        remedy = "write plain maps, lists and values"
        return InputError([Problem(f"{self.source} line {number}", text, rule, remedy)])

    def block(self, indent: int) -> Any:
        """Return the map or the list that begins here."""
        return self._list(indent) if self.lines[self.at][2].startswith("- ") else self._map(indent)

    def _map(self, indent: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while self.at < len(self.lines) and self.lines[self.at][1] == indent:
            match = _KEY.match(self.lines[self.at][2])
            if match is None:
                raise self.error("is not a key with a value")
            key = match[1].strip("\"'")
            if key in found:
                raise self.error("stands twice")
            found[key] = self._value(match[2] or "", indent)
        return found

    def _value(self, text: str, indent: int) -> Any:
        self.at += 1
        if text:
            return self.scalar(text)
        if self.at < len(self.lines):
            _, inner, after = self.lines[self.at]
            if inner > indent or (inner == indent and after.startswith("- ")):
                return self.block(inner)
        return None

    def _list(self, indent: int) -> list[Any]:
        found: list[Any] = []
        while self.at < len(self.lines):
            _, here, text = self.lines[self.at]
            if here != indent or not text.startswith("- "):
                break
            if _KEY.match(text[2:]):
                raise self.error("is a map inside a list")
            found.append(self.scalar(text[2:].strip()))
            self.at += 1
        return found

    def scalar(self, text: str) -> Any:
        """Return a value: a number, a truth value, nothing, a word, or a list in brackets."""
        if text[0] in "\"'" and text[-1] == text[0] and len(text) > 1:
            return text[1:-1]
        if text[0] == "[" and text[-1] == "]":
            return [self.scalar(part.strip()) for part in text[1:-1].split(",") if part.strip()]
        if text == "{}":
            return {}
        if text[0] in "&*!|>{[%@`":
            self.at -= 1
            raise self.error("uses a form of YAML that is not read here")
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _NUMBER.match(text):
            return float(text) if re.search(r"[.eE]", text) else int(text)
        return text


def dump(tree: dict[str, Any], indent: int = 0) -> str:
    r"""Return a map as text that `parse` reads back.

    >>> dump({"a": 1, "b": {"c": True, "d": None}})
    'a: 1\nb:\n  c: true\n  d: null\n'
    """
    lines = ""
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += f"{' ' * indent}{key}:\n" + dump(value, indent + 2)
        else:
            lines += f"{' ' * indent}{key}: {_said(value)}\n"
    return lines


def _said(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value)
    plain = isinstance(value, (int, float)) or (text.lower() not in _WORDS and not _NUMBER.match(text))
    return text if plain else f"'{text}'"
