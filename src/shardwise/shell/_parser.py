"""Launch scripts as trees: the part of the shell's grammar that such scripts use.

Source: POSIX.1-2024, Shell Command Language, section 2.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from shardwise.errors import InputError, Problem
from shardwise.shell._lexer import Budget, Lexer, Token, Word

_RESERVED = frozenset(
    (
        "if",
        "then",
        "elif",
        "else",
        "fi",
        "for",
        "do",
        "done",
        "while",
        "until",
        "case",
        "esac",
        "in",
        "{",
        "}",
        "function",
    )
)


@dataclass(slots=True)
class Simple:
    """A command: its words, and whether it runs only after the one before it succeeded or failed."""

    words: list[Word]
    after: str = ""


@dataclass(slots=True)
class If:
    """Conditions with what follows each; one without a condition is the last."""

    branches: list[tuple[list[ShellNode], list[ShellNode]]]


# `for ((w=0; w<N; w++))`, the one of C's loops that launch scripts have.
_COUNTED = re.compile(
    r"\$\(\(\s*([A-Za-z_]\w*)\s*=([^;=]{1,200});\s*\1\s*(<=?)([^;=<]{1,200});\s*(?:\1\s*\+\+|\+\+\s*\1|\1\s*\+=\s*1)\s*\)\)",
    re.ASCII,
)


@dataclass(slots=True)
class Loop:
    """A loop over words, one that counts from a number to below another, or one whose end is not known.

    The last has no `name`; `bounds` are arithmetic.
    """

    name: str
    words: list[Word]
    body: list[ShellNode]
    bounds: tuple[str, str] = ("", "")


@dataclass(slots=True)
class CaseCommand:
    """A word, and what follows each list of patterns."""

    word: Word
    arms: list[tuple[list[Word], list[ShellNode]]]


@dataclass(slots=True)
class Function:
    """A named body."""

    name: str
    body: list[ShellNode]


ShellNode: TypeAlias = Simple | If | Loop | CaseCommand | Function


class Parser:
    """Makes a tree of tokens."""

    def __init__(self, tokens: list[Token], budget: Budget) -> None:
        self.tokens = tokens
        self.budget = budget
        self.at = 0
        self.left_open = ""

    def nodes(self, *ends: str) -> list[ShellNode]:
        """Return commands up to one of the ends, which is left standing."""
        nodes: list[ShellNode] = []
        after = ""
        while self.at < len(self.tokens) and self._here() not in ends:
            token = self.tokens[self.at]
            if isinstance(token, str):
                after = token if token in ("&&", "||") else ("" if token == "\n" and not after else after)
                after = "" if token in (";", "|", "&", "(", ")") else after
                self.at += 1
                continue
            with self.budget.deeper():
                node = self._node(token)
            if isinstance(node, Simple):
                node.after = after
            after = ""
            nodes.append(node)
        return nodes

    def _here(self) -> str:
        """Return the operator or the reserved word at hand."""
        if self.at >= len(self.tokens):
            return ""
        token = self.tokens[self.at]
        if isinstance(token, str):
            return token
        return token.bare if token.bare in _RESERVED else ""

    def _next(self, *wanted: str) -> bool:
        """Step over a reserved word or an operator if it is at hand, with separators before it."""
        while self._here() in ("\n", ";") and "\n" not in wanted:
            self.at += 1
        if self._here() in wanted:
            self.at += 1
            return True
        return False

    def _closed(self, first: str, last: str) -> None:
        """Step over the end of a construct; keep the first one that the script ends in."""
        if not self._next(last) and self.at >= len(self.tokens):
            self.left_open = self.left_open or first

    def _node(self, token: Word) -> ShellNode:
        makers: dict[str, Callable[[], ShellNode]] = {
            "if": self._if,
            "for": self._for,
            "while": self._while,
            "until": self._while,
            "case": self._case,
        }
        if token.bare in makers:
            self.at += 1
            return makers[token.bare]()
        if token.bare == "function" or (self.tokens[self.at + 1 : self.at + 3] == ["(", ")"]):
            return self._function(token)
        if token.bare == "{":
            self.at += 1
            body = self.nodes("}")
            self._closed("{", "}")
            return If([([], body)])
        if token.bare in _RESERVED:
            self.at += 1
            return Simple([])
        return self._simple()

    def _simple(self) -> Simple:
        words: list[Word] = []
        while self.at < len(self.tokens) and isinstance(token := self.tokens[self.at], Word):
            words.append(token)
            self.at += 1
        return Simple(words)

    def _if(self) -> If:
        branches: list[tuple[list[ShellNode], list[ShellNode]]] = []
        while True:
            condition = self.nodes("then")
            self._next("then")
            branches.append((condition, self.nodes("elif", "else", "fi")))
            if not self._next("elif"):
                break
        if self._next("else"):
            branches.append(([], self.nodes("fi")))
        self._closed("if", "fi")
        return If(branches)

    def _take(self) -> Word:
        """Return the word at hand, an empty one where the script ends or an operator stands, and step over it."""
        token = self.tokens[self.at] if self.at < len(self.tokens) else ""
        self.at += isinstance(token, Word)
        return token if isinstance(token, Word) else Word()

    def _for(self) -> Loop:
        name = self._take().bare
        words: list[Word] = []
        if name == "((":
            counted = _COUNTED.fullmatch(self._take().text)
            if counted is None:
                return self._while()
            name, first, mark, last = counted.groups()
            return Loop(name, [], self._body(), (first, f"({last}) + 1" if mark == "<=" else last))
        if self._next("in"):
            words = self._simple().words
        body = self._body()
        return Loop(name, words, body)

    def _while(self) -> Loop:
        self.nodes("do")
        return Loop("", [], self._body())

    def _body(self) -> list[ShellNode]:
        self.nodes("do")
        self._next("do")
        body = self.nodes("done")
        self._closed("do", "done")
        return body

    def _case(self) -> CaseCommand:
        word = self._take()
        self._next("in")
        arms: list[tuple[list[Word], list[ShellNode]]] = []
        while not self._next("esac"):
            if self.at >= len(self.tokens):
                self._closed("case", "esac")
                break
            patterns: list[Word] = []
            while self.at < len(self.tokens) and self._here() != ")":
                token = self.tokens[self.at]
                if isinstance(token, Word):
                    patterns.append(token)
                self.at += 1
            self.at += 1
            arms.append((patterns, self.nodes(";;", "esac")))
            self._next(";;")
        return CaseCommand(word, arms)

    def _function(self, token: Word) -> Function:
        self.at += 1
        if token.bare == "function":
            token = self._take()
        while self._here() in ("(", ")", "\n"):
            self.at += 1
        begins = self._next("{")
        body = self.nodes("}")
        self._closed("{" if begins else "", "}")
        return Function(token.bare, body)


def parsed(text: str, budget: Budget, whole: bool = False) -> tuple[list[ShellNode], list[str]]:
    """Return the tree of a script, and its here-documents; a whole one is refused where it ends inside a construct.

    >>> parsed("A=1; python x.py --a $A", Budget())[0][1].words[2].text
    '--a'
    """
    lexer = Lexer(budget.made(text), budget)
    tokens = lexer.tokens()
    parser = Parser(tokens, budget)
    nodes = parser.nodes()
    if whole and (mark := lexer.left_open or parser.left_open):
        rule = f"ends before what {mark} opens is closed"
        raise InputError([Problem("file", budget.source, rule, "give the whole script")])
    return nodes, lexer.documents
