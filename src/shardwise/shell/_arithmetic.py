"""Arithmetic of the shell on whole numbers of 64 bits.

Source: POSIX.1-2024, Shell Command Language, section 2.6.4, with the operators and precedence of ISO C.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from shardwise.shell._lexer import Budget

VariableLookup: TypeAlias = Callable[[str], str | None]
MOST_DEPTH = 16
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]{1,16}|[0-9]{1,20})(?![0-9A-Za-z_#])|\$?\{?([A-Za-z_]\w*)\}?"
    r"|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>!~&|^?:()]))",
    re.ASCII,
)
_LEVELS = {"||": 1, "&&": 2, "|": 3, "^": 4, "&": 5, "==": 6, "!=": 6, "<": 7, ">": 7, "<=": 7, ">=": 7}
_LEVELS |= {"<<": 8, ">>": 8, "+": 9, "-": 9, "*": 10, "/": 10, "%": 10, "**": 11}
_PLAIN: dict[str, Callable[[int, int], int]] = {
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
    "&": lambda a, b: a & b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    ">": lambda a, b: a > b,
    "<=": lambda a, b: a <= b,
    ">=": lambda a, b: a >= b,
    "<<": lambda a, b: a << (b % 64),
    ">>": lambda a, b: a >> (b % 64),
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


def value_of(text: str, lookup: VariableLookup, depth: int = MOST_DEPTH) -> int | None:
    """Return the value of an expression, None where something in it is not known or it is none.

    A variable's value is an expression itself; one that is set to nothing is 0.

    >>> value_of("2 + 3 * (n > 1 ? n : 1)", {"n": "4"}.get), value_of("1 / 0", {}.get), value_of("1or 2", {}.get)
    (14, None, None)
    """
    if depth <= 0:
        return None
    tokens: list[str] = []
    at = 0
    while match := _TOKEN.match(text, at):
        tokens.append(match[1] or match[2] or match[3])
        at = match.end()
    if text[at:].strip():
        return None
    expression = _Expression(tokens, lookup, depth)
    try:
        value = expression.choice()
    except _Unfinished:
        return None
    return value if expression.at == len(tokens) else None


class _Unfinished(Exception):
    """The text is no expression."""


class _Expression:
    """Reads tokens from left to right; what is not known is None and makes all that needs it None."""

    def __init__(self, tokens: list[str], lookup: VariableLookup, depth: int) -> None:
        self.tokens, self.lookup, self.depth, self.at = tokens, lookup, depth, 0

    def _here(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def choice(self) -> int | None:
        """Return the value of a choice or of what is simpler."""
        self.depth -= 1
        if self.depth < 0:
            raise _Unfinished
        value = self._binary(1)
        if self._here() == "?":
            self.at += 1
            yes = self.choice()
            self._step(":")
            no = self.choice()
            value = None if value is None else yes if value else no
        self.depth += 1
        return value

    def _step(self, mark: str) -> None:
        if self._here() != mark:
            raise _Unfinished
        self.at += 1

    def _binary(self, least: int) -> int | None:
        left = self._unary()
        while (level := _LEVELS.get(self._here(), 0)) >= least:
            mark = self.tokens[self.at]
            self.at += 1
            left = _joined(mark, left, self._binary(level if mark == "**" else level + 1))
        return left

    def _unary(self) -> int | None:
        marks: list[str] = []
        while self._here() in ("-", "+", "!", "~"):
            marks.append(self._here())
            self.at += 1
        value = self._operand()
        for mark in reversed(marks):
            if value is not None:
                value = _wrapped({"-": -value, "+": value, "!": int(not value), "~": ~value}[mark])
        return value

    def _operand(self) -> int | None:
        token = self._here()
        self.at += 1
        if token == "(":
            chosen = self.choice()
            self._step(")")
            return chosen
        if token[:1].isdigit():
            octal = len(token) > 1 and token[0] == "0" and token[1] not in "xX"
            digits = "0o" + token[1:] if octal else token
            return _wrapped(int(digits, 0)) if not (octal and set(token) & {"8", "9"}) else None
        if not token.isidentifier():
            raise _Unfinished
        value = self.lookup(token)
        return None if value is None else value_of(value, self.lookup, self.depth - 1) if value.strip() else 0


def _joined(mark: str, a: int | None, b: int | None) -> int | None:
    """Return the value of two operands, where one may decide it alone."""
    if mark == "&&":
        return 0 if a == 0 or b == 0 else None if a is None or b is None else 1
    if mark == "||":
        return 1 if a or b else None if a is None or b is None else 0
    if a is None or b is None or (mark in ("/", "%") and b == 0) or (mark == "**" and b < 0):
        return None
    if mark in ("/", "%"):
        whole = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return _wrapped(whole if mark == "/" else a - whole * b)
    return _wrapped(pow(a, b, 1 << 64) if mark == "**" else int(_PLAIN[mark](a, b)))


def _wrapped(number: int) -> int:
    """Return a number as 64 bits with a sign hold it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt,
    "-ge": operator.ge,
}  # fmt: skip
_JOINTS = (("||", any), ("-o", any), ("&&", all), ("-a", all))


def test(words: Sequence[str], budget: Budget) -> bool:
    """Return the truth of a condition; files that are asked for count as there.

    >>> test(["8", "-gt", "4", "-a", "!", "-z", "x"], Budget())
    True
    """
    for joint, whole in _JOINTS:
        if joint in words:
            return whole([test(side, budget) for side in _sides(words, joint)])
    marks = next((i for i, word in enumerate(words) if word != "!"), len(words))
    return _plain(words[marks:], budget) != bool(marks % 2)


def _sides(words: Sequence[str], joint: str) -> list[list[str]]:
    sides: list[list[str]] = [[]]
    for word in words:
        if word == joint:
            sides.append([])
        else:
            sides[-1].append(word)
    return sides


def _plain(words: Sequence[str], budget: Budget) -> bool:
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) != (words[0] == "-z")
    if len(words) == 2 and words[0] in ("-f", "-d", "-e", "-s", "-r", "-x"):
        return True
    if len(words) == 3 and words[1] in ("=", "==", "!="):
        return matches(words[0], words[2], budget) == (words[1] != "!=")
    if len(words) == 3 and words[1] in _NUMBERS:
        left, right = (re.fullmatch(r"\s*([-+]?[0-9]{1,20})\s*", word) for word in (words[0], words[2]))
        return bool(left and right and _NUMBERS[words[1]](int(left[1]), int(right[1])))
    return len(words) == 1 and bool(words[0])


def matches(text: str, pattern: str, budget: Budget) -> bool:
    """Return whether a text is of a pattern of the shell; one with many stars takes that many looks at the text."""
    budget.spend(len(text) * (pattern.count("*") + 1) // 1000 + len(pattern) // 100)
    return fnmatchcase(text, pattern)
