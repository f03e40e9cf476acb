"""Words of a command line as the shell of this system takes them: to be typed again, or taken apart."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable

_PLAIN = re.compile(r"[\w@%+=:,./\\-]+", re.ASCII)


def quoted(word: str) -> str:
    r"""Return a word as it is typed: in single quotes for a POSIX shell, in double ones where Windows has neither.

    Source: "Parsing C command-line arguments" of Microsoft's C runtime (backslashes count before a quote alone).

    >>> quoted("8xh100"), quoted("two words")
    ('8xh100', "'two words'")
    """
    if sys.platform != "win32":
        return shlex.quote(word)
    inner = re.sub(r"(\\+)$", r"\1\1", re.sub(r'(\\*)"', r'\1\1\\"', word))
    return word if _PLAIN.fullmatch(word) else f'"{inner}"'


def joined(words: Iterable[str]) -> str:
    """Return words as the line that is typed.

    >>> joined(["count", "my model"])
    "count 'my model'"
    """
    return " ".join(map(quoted, words))


def split(text: str) -> list[str]:
    r"""Return the words of a text that a flag holds; a backslash is of a path on Windows, elsewhere it quotes.

    Raises `ValueError` for a quotation that is not closed.

    >>> split("train --tp 2 --model 'my model'")
    ['train', '--tp', '2', '--model', 'my model']
    """
    reader = shlex.shlex(text, posix=True)
    reader.whitespace_split, reader.commenters = True, ""
    if sys.platform == "win32":
        reader.escape = ""
    return list(reader)
