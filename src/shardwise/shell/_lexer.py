"""Launch scripts as words and operators, with their quoting.

Source: POSIX.1-2024, Shell Command Language, sections 2.2 and 2.3; arrays as in Bash.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from shardwise.errors import InputError, Problem

Quote: TypeAlias = Literal["bare", "single", "double"]
# What a variable may be called beside a name: $@, $?, $1 and their like.
_SPECIAL = ("@", "*", "#", "?", "$", "!", "-")
_NAME = re.compile(r"\w+", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,9}")
_OPERATORS = (";;", "&&", "||", ";", "|", "&", "(", ")", "\n")


@dataclass(slots=True)
class Word:
    """One word in its pieces, each with its quoting; an array assignment has its items."""

    pieces: list[tuple[Quote, str]] = field(default_factory=list)
    items: list[Word] | None = None

    @property
    def text(self) -> str:
        """The word before any expansion."""
        return "".join(text for _, text in self.pieces)

    @property
    def bare(self) -> str:
        """The word where nothing of it is quoted, else nothing."""
        return self.text if all(quote == "bare" for quote, _ in self.pieces) else ""


Token: TypeAlias = Word | str


def whole_of(text: str) -> int | None:
    """Return the whole number that a word is, None where it is none or more than any machine has.

    >>> whole_of("16"), whole_of("-1"), whole_of("\u00b2")
    (16, None, None)
    """
    return int(text) if _WHOLE.fullmatch(text) else None


class Lexer:
    """Cuts a text into words and operators; bodies of here-documents are kept by the words that name them."""

    def __init__(self, text: str, budget: Budget) -> None:
        self.text = text.replace("\r\n", "\n")
        self.budget = budget
        self.at = 0
        self.documents: list[str] = []
        self.in_test = False
        self.left_open = ""

    def tokens(self, closing: str = "") -> list[Token]:
        """Return the tokens up to the end, or up to an unquoted closing mark."""
        tokens: list[Token] = []
        waiting: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if closing and char == closing:
                self.at += 1
                return tokens
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t":
                self.at += 1
            elif char == "#":
                self._skip_line()
            elif self.text.startswith("((", self.at) and not self.in_test and (sum_ := self._arithmetic()):
                tokens += [Word([("bare", "((")]), Word([("double", f"${sum_}")])]
            elif self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
                waiting.append(self._delimiter())
            elif char in "<>":
                self._redirection(tokens)
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                self.at += len(operator)
                joins = self.in_test and operator in ("&&", "||")
                tokens.append(Word([("single", operator)]) if joins else operator)
                if operator == "\n":
                    self._documents(waiting)
            else:
                tokens.append(word := self._word())
                self.in_test = (self.in_test or word.bare == "[[") and word.bare != "]]"
        self._opened("(" if closing else "")
        return tokens

    def _opened(self, mark: str) -> None:
        """Keep the first mark that the text leaves open."""
        self.left_open = self.left_open or mark

    def _arithmetic(self) -> str:
        """Return an arithmetic command with its brackets, stepping over it; nothing where two subshells open."""
        start = self.at
        self._balanced("(", ")")
        text = self.budget.made(self.text[start : self.at])
        if text.endswith("))"):
            return text
        self.at = start
        return ""

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _delimiter(self) -> str:
        self.at += 2
        while self.text[self.at : self.at + 1] in ("-", " "):
            self.at += 1
        return self._word().text

    def _documents(self, waiting: list[str]) -> None:
        """Take the bodies of the here-documents that the line before asked for."""
        for mark in waiting:
            body: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], min(end + 1, len(self.text))
                if line.strip() == mark:
                    break
                body.append(line)
            self.documents.append("\n".join(body))
        waiting.clear()

    def _redirection(self, tokens: list[Token]) -> None:
        """Skip a redirection with its target, and the number of the stream before it."""
        stream = tokens and isinstance(tokens[-1], Word) and whole_of(tokens[-1].bare) is not None
        if stream and self.text[self.at - 1] in "0123456789":
            tokens.pop()
        while self.text[self.at : self.at + 1] in ("<", ">", "&", "|"):
            self.at += 1
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        if self.text[self.at : self.at + 1] not in ("", "\n"):
            self._word()

    def _word(self) -> Word:
        word, start = Word(), self.at
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\n;|&<>)":
                break
            if char == "(":
                if not word.bare.endswith("="):
                    break
                self.at += 1
                with self.budget.deeper():
                    word.items = [t for t in self.tokens(")") if isinstance(t, Word)]
                break
            self._piece(word, char)
        if self.at == start:
            self.at += 1
        return word

    def _piece(self, word: Word, char: str) -> None:
        if char == "'":
            end = self.text.find("'", self.at + 1)
            self._opened("'" if end < 0 else "")
            end = len(self.text) if end < 0 else end
            word.pieces.append(("single", self.text[self.at + 1 : end]))
            self.at = end + 1
        elif char == '"':
            word.pieces.append(("double", self._double()))
        elif char == "\\":
            if self.text[self.at + 1 : self.at + 2] != "\n":
                word.pieces.append(("single", self.text[self.at + 1 : self.at + 2]))
            self.at += 2
        elif char == "$" and self.text[self.at + 1 : self.at + 2] in ("'", '"'):
            self.at += 1
        elif char == "$" or char == "`":
            word.pieces.append(("bare", self._expansion()))
        else:
            start = self.at
            while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&<>()'\"\\$`":
                self.at += 1
            word.pieces.append(("bare", self.text[start : self.at]))

    def _double(self) -> str:
        """Return what stands between double quotes; a backslash keeps its meaning before $ only for the expansion."""
        self.at += 1
        pieces: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            char, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == "\\" and after == "\n":
                self.at += 2
            elif char == "\\" and after in ('"', "\\", "`"):
                pieces.append(after)
                self.at += 2
            elif char == "\\" and after == "$":
                pieces.append("\\$")
                self.at += 2
            elif char in "$`":
                pieces.append(self._expansion())
            else:
                pieces.append(char)
                self.at += 1
        self._opened('"' if self.at >= len(self.text) else "")
        self.at += 1
        return "".join(pieces)

    def _expansion(self) -> str:
        """Return a variable or a substitution as it stands, brackets balanced."""
        start, pairs = self.at, {"{": "}", "(": ")"}
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self._opened("`" if end < 0 else "")
            self.at = len(self.text) if end < 0 else end + 1
            return self.text[start : self.at]
        self.at += 1
        opening = self.text[self.at : self.at + 1]
        if opening in pairs:
            self._balanced(opening, pairs[opening])
        elif (name := _NAME.match(self.text, self.at)) and not opening.isdigit():
            self.at = name.end()
        elif opening.isdigit() or opening in _SPECIAL:
            self.at += 1
        return self.text[start : self.at]

    def _balanced(self, opening: str, closing: str) -> None:
        """Step to the end of a substitution: brackets within quotes, and behind a backslash, are letters."""
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                with self.budget.deeper():
                    self._double()
                continue
            if char == "'" and opening == "(" and (end := self.text.find("'", self.at + 1)) > 0:
                self.at = end
            depth += (char == opening) - (char == closing)
            self.at += 1 + (char == "\\")
            if depth == 0:
                return
        self._opened(f"${opening}")


MOST_STEPS = 100_000
MOST_CHARACTERS = 4 << 20
MOST_DEPTH = 60


@dataclass(slots=True)
class Budget:
    """What is left of steps (commands, turns of loops, words), of characters that are made, and of nesting.

    >>> Budget("run.sh", steps=3).spend(4)
    Traceback (most recent call last):
    shardwise.errors.InputError: file = 'run.sh': takes more than 100,000 steps; give a script that launches less
    """

    source: str = "script"
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS
    depth: int = MOST_DEPTH

    def spend(self, steps: int = 1) -> None:
        """Take some steps."""
        self.steps -= steps
        if self.steps < 0:
            raise self._error(f"takes more than {MOST_STEPS:,} steps", "give a script that launches less")

    def made(self, text: str) -> str:
        """Return a text that was made, which takes its characters."""
        self.characters -= len(text)
        if self.characters < 0:
            raise self._error(f"makes more than {MOST_CHARACTERS:,} characters", "give a script that makes less")
        return text

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Run a block one level deeper."""
        self.depth -= 1
        if self.depth < 0:
            raise self._error(f"nests deeper than {MOST_DEPTH} levels", "give a script that is flatter")
        try:
            yield
        finally:
            self.depth += 1

    def _error(self, rule: str, remedy: str) -> InputError:
        return InputError([Problem("file", self.source, rule, remedy)])
