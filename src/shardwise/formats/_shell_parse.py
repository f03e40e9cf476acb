"""Launch scripts as trees: the part of the shell's grammar that such scripts use.

Source: POSIX.1-2024, Shell Command Language, sections 2.2 (quoting), 2.3 (tokens), 2.9 (commands); arrays as in Bash.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Quote: TypeAlias = Literal["bare", "single", "double"]
_OPERATORS = (";;", "&&", "||", ";", "|", "&", "(", ")", "\n")
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


@dataclass(slots=True)
class Simple:
    """A command: its words, and whether it runs only after the one before it succeeded or failed."""

    words: list[Word]
    after: str = ""


@dataclass(slots=True)
class If:
    """Conditions with what follows each; one without a condition is the last."""

    branches: list[tuple[list[Node], list[Node]]]


@dataclass(slots=True)
class Loop:
    """A loop over words, or one whose end is not known (`name` empty)."""

    name: str
    words: list[Word]
    body: list[Node]


@dataclass(slots=True)
class Case:
    """A word, and what follows each list of patterns."""

    word: Word
    arms: list[tuple[list[Word], list[Node]]]


@dataclass(slots=True)
class Function:
    """A named body."""

    name: str
    body: list[Node]


Node: TypeAlias = Simple | If | Loop | Case | Function


class Lexer:
    """Cuts a text into words and operators; bodies of here-documents are kept by the words that name them."""

    def __init__(self, text: str) -> None:
        self.text = text.replace("\r\n", "\n")
        self.at = 0
        self.documents: list[str] = []

    def tokens(self, closing: str = "") -> list[Token]:
        """Return the tokens up to the end, or up to an unquoted closing mark."""
        found: list[Token] = []
        waiting: list[str] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if closing and char == closing:
                self.at += 1
                return found
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char in " \t":
                self.at += 1
            elif char == "#":
                self._skip_line()
            elif self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
                waiting.append(self._delimiter())
            elif char in "<>":
                self._redirection(found)
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                self.at += len(operator)
                found.append(Word([("single", operator)]) if _in_test(found, operator) else operator)
                if operator == "\n":
                    self._documents(waiting)
            else:
                found.append(self._word())
        return found

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
        while waiting:
            mark = waiting.pop(0)
            body: list[str] = []
            while self.at < len(self.text):
                end = self.text.find("\n", self.at)
                end = len(self.text) if end < 0 else end
                line, self.at = self.text[self.at : end], min(end + 1, len(self.text))
                if line.strip() == mark:
                    break
                body.append(line)
            self.documents.append("\n".join(body))

    def _redirection(self, found: list[Token]) -> None:
        """Skip a redirection with its target, and the number of the stream before it."""
        if found and isinstance(found[-1], Word) and found[-1].bare.isdigit() and self.text[self.at - 1].isdigit():
            found.pop()
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
                word.items = [t for t in self.tokens(")") if isinstance(t, Word)]
                break
            self._piece(word, char)
        if self.at == start:
            self.at += 1
        return word

    def _piece(self, word: Word, char: str) -> None:
        if char == "'":
            end = self.text.find("'", self.at + 1)
            end = len(self.text) if end < 0 else end
            word.pieces.append(("single", self.text[self.at + 1 : end]))
            self.at = end + 1
        elif char == '"':
            word.pieces.append(("double", self._double()))
        elif char == "\\":
            if self.text[self.at + 1 : self.at + 2] != "\n":
                word.pieces.append(("single", self.text[self.at + 1 : self.at + 2]))
            self.at += 2
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
        found: list[str] = []
        while self.at < len(self.text) and self.text[self.at] != '"':
            char, after = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == "\\" and after == "\n":
                self.at += 2
            elif char == "\\" and after in ('"', "\\", "`"):
                found.append(after)
                self.at += 2
            elif char == "\\" and after == "$":
                found.append("\\$")
                self.at += 2
            elif char in "$`":
                found.append(self._expansion())
            else:
                found.append(char)
                self.at += 1
        self.at += 1
        return "".join(found)

    def _expansion(self) -> str:
        """Return a variable or a substitution as it stands, brackets balanced."""
        start, pairs = self.at, {"{": "}", "(": ")"}
        if self.text[self.at] == "`":
            end = self.text.find("`", self.at + 1)
            self.at = len(self.text) if end < 0 else end + 1
            return self.text[start : self.at]
        self.at += 1
        opening = self.text[self.at : self.at + 1]
        if opening in pairs:
            depth = 0
            while self.at < len(self.text):
                char = self.text[self.at]
                depth += (char == opening) - (char == pairs[opening])
                self.at += 1
                if depth == 0:
                    break
        elif opening.isalpha() or opening == "_":
            while self.at < len(self.text) and (self.text[self.at].isalnum() or self.text[self.at] == "_"):
                self.at += 1
        else:
            self.at += 1
        return self.text[start : self.at]


def _in_test(found: list[Token], operator: str) -> bool:
    """Return whether an operator joins conditions between [[ and ]]."""
    if operator not in ("&&", "||"):
        return False
    marks = [t.bare for t in found if isinstance(t, Word) and t.bare in ("[[", "]]")]
    return bool(marks) and marks[-1] == "[["


class Parser:
    """Makes a tree of tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens = tokens
        self.at = 0

    def nodes(self, *ends: str) -> list[Node]:
        """Return commands up to one of the ends, which is left standing."""
        found: list[Node] = []
        after = ""
        while self.at < len(self.tokens) and self._here() not in ends:
            token = self.tokens[self.at]
            if isinstance(token, str):
                after = token if token in ("&&", "||") else ("" if token == "\n" and not after else after)
                after = "" if token in (";", "|", "&", "(", ")") else after
                self.at += 1
                continue
            node = self._node(token)
            if isinstance(node, Simple):
                node.after = after
            after = ""
            found.append(node)
        return found

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

    def _node(self, token: Word) -> Node:
        makers = {"if": self._if, "for": self._for, "while": self._while, "until": self._while, "case": self._case}
        if token.bare in makers:
            self.at += 1
            return makers[token.bare]()
        if token.bare == "function" or (self.tokens[self.at + 1 : self.at + 3] == ["(", ")"]):
            return self._function(token)
        if token.bare == "{":
            self.at += 1
            body = self.nodes("}")
            self._next("}")
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
        branches: list[tuple[list[Node], list[Node]]] = []
        while True:
            condition = self.nodes("then")
            self._next("then")
            branches.append((condition, self.nodes("elif", "else", "fi")))
            if not self._next("elif"):
                break
        if self._next("else"):
            branches.append(([], self.nodes("fi")))
        self._next("fi")
        return If(branches)

    def _for(self) -> Loop:
        name = self.tokens[self.at].bare if isinstance(self.tokens[self.at], Word) else ""  # type: ignore[union-attr]
        self.at += bool(name)
        words: list[Word] = []
        if self._next("in"):
            words = self._simple().words
        body = self._body()
        return Loop(name, words, body)

    def _while(self) -> Loop:
        self.nodes("do")
        return Loop("", [], self._body())

    def _body(self) -> list[Node]:
        self.nodes("do")
        self._next("do")
        body = self.nodes("done")
        self._next("done")
        return body

    def _case(self) -> Case:
        word = self.tokens[self.at]
        self.at += 1
        self._next("in")
        arms: list[tuple[list[Word], list[Node]]] = []
        while self.at < len(self.tokens) and not self._next("esac"):
            patterns: list[Word] = []
            while self.at < len(self.tokens) and self._here() != ")":
                token = self.tokens[self.at]
                if isinstance(token, Word):
                    patterns.append(token)
                self.at += 1
            self.at += 1
            arms.append((patterns, self.nodes(";;", "esac")))
            self._next(";;")
        return Case(word if isinstance(word, Word) else Word(), arms)

    def _function(self, token: Word) -> Function:
        self.at += 1
        if token.bare == "function":
            token = self.tokens[self.at]  # type: ignore[assignment]
            self.at += 1
        while self._here() in ("(", ")", "\n"):
            self.at += 1
        self._next("{")
        body = self.nodes("}")
        self._next("}")
        return Function(token.bare, body)


def parsed(text: str) -> tuple[list[Node], list[str]]:
    """Return the tree of a script, and its here-documents.

    >>> parsed("A=1; python x.py --a $A")[0][1].words[2].text
    '--a'
    """
    lexer = Lexer(text)
    tokens = lexer.tokens()
    return Parser(tokens).nodes(), lexer.documents
