"""Typed reading of what was given: each getter checks one value, and everything wrong is collected."""

from __future__ import annotations

import re

from shardwise.errors import plain
from shardwise.formats.megatron._values import GivenArguments, by_name
from shardwise.models import MOST_LAYERS
from shardwise.shell import left_open

MOST_WHOLE = 10**12
_WHOLE = re.compile(r"\s*[-+]?[0-9]{1,15}(?:_[0-9]{1,15}){0,6}\s*")
# What spells a list; letters could make Python's parser warn.
_SPELLED = re.compile(r"[][()0-9,*+\s]{1,10000}")


class Reader:
    """The arguments of one run; `assumed` says what they leave open."""

    def __init__(self, given: GivenArguments) -> None:
        self.given = given
        self.problems = given.problems
        self.assumed: list[str] = []

    def has(self, name: str) -> bool:
        """Return whether an argument was given a value."""
        return self.given.values.get(name) is not None

    def option(self, name: str) -> str:
        """Return how an argument is spelled, as given or as it would be."""
        return self.given.options.get(name) or by_name()[name].option

    def fail(self, name: str, rule: str, remedy: str) -> None:
        """Record a problem of an argument."""
        self.problems.add(self.option(name), plain(self.given.values.get(name)), rule, remedy)

    def assume(self, text: str) -> None:
        """Record something that was assumed."""
        if text not in self.assumed:
            self.assumed.append(text)

    def raw(self, name: str) -> object:
        """Return what was given, or the default; a value from a variable outside the script is a problem."""
        value = self.given.values.get(name)
        value = by_name()[name].default if value is None else value
        why = left_open(value) if isinstance(value, str) else None
        if why is not None:
            self.fail(name, *why)
            return by_name()[name].default
        return value

    def whole(self, name: str, least: int = 1) -> int | None:
        """Return a whole number, or None where there is none."""
        value = self.raw(name)
        if value is None or value == "None":
            return None
        if isinstance(value, str):
            value = int(value) if _WHOLE.fullmatch(value) else None
        number = value if isinstance(value, int) and not isinstance(value, bool) else None
        if number is None or not least <= number <= MOST_WHOLE:
            most = f" and at most {MOST_WHOLE}" if number is not None and number > MOST_WHOLE else ""
            self.fail(name, f"must be a whole number of at least {least}{most}", "write a whole number")
            return None
        return number

    def count(self, name: str) -> int:
        """Return a whole number of at least one that has a default."""
        return self.whole(name) or 1

    def needed(self, name: str) -> int:
        """Return a whole number that must be given; 1 stands in where it is missing."""
        if not self.has(name):
            self.problems.add(self.option(name), None, "is missing", f"give {self.option(name)}")
            return 1
        return self.whole(name) or 1

    def number(self, name: str) -> float:
        """Return a number of at least 0."""
        try:
            parsed = float(str(self.raw(name) or 0))
        except ValueError:
            parsed = -1.0
        if not 0 <= parsed <= MOST_WHOLE:
            self.fail(name, "must be a number of at least 0", "write for example 0.1")
            return 0.0
        return parsed

    def flag(self, name: str) -> bool:
        """Return a switch."""
        value = self.raw(name)
        return value if isinstance(value, bool) else str(value).lower() in ("true", "1", "on")

    def word(self, name: str, *allowed: str) -> str:
        """Return a word out of those allowed; any without a list, and empty where there is none."""
        value = self.raw(name)
        text = "" if value is None else str(value)
        text = next((one for one in allowed if one.lower() == text.lower()), text)
        if allowed and text and text not in allowed:
            self.fail(name, "is not a known choice", "use one of " + ", ".join(allowed))
            return allowed[0]
        return text

    def words(self, name: str) -> tuple[str, ...]:
        """Return the words of an argument that takes several."""
        value = self.raw(name)
        if value is None:
            return ()
        return tuple(str(one) for one in value) if isinstance(value, (tuple, list)) else (str(value),)

    def pattern(self, name: str, length: int) -> int | list[int] | None:
        """Return a frequency: every so many layers, or a list with a number for each layer."""
        value = self.raw(name)
        if value is None:
            return None
        if isinstance(value, (list, tuple)):
            whole = all(isinstance(one, int) or _WHOLE.fullmatch(str(one)) for one in value)
            listed: list[int] | None = [int(one) for one in value] if whole else None
        elif isinstance(value, int) or _WHOLE.fullmatch(str(value)):
            return self.whole(name)
        else:
            listed = spelled_out(str(value))
        if listed is None or len(listed) != length:
            self.fail(name, f"must be a whole number or a list for {length} layers", 'write 1, or "([0]*3+[1]*11)"')
            return 1
        return listed


def spelled_out(text: str) -> list[int] | None:
    """Return the list that sums and multiples of lists spell, or None where the text is anything else.

    >>> spelled_out("([0]*1+[1]*2)*2"), spelled_out("__import__('os')")
    ([0, 1, 1, 0, 1, 1], None)
    """
    import ast

    if not _SPELLED.fullmatch(text):
        return None

    def value(node: ast.expr) -> list[int] | int:
        if isinstance(node, ast.List):
            return [int(value(one)) for one in node.elts]  # type: ignore[arg-type]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
                many, times = (left, right) if isinstance(left, list) else (right, left)
                if isinstance(times, int) and isinstance(many, list) and len(many) * times <= MOST_LAYERS:
                    return many * times
        raise ValueError(text)

    try:
        parsed = value(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return parsed if isinstance(parsed, list) else None
