"""Words of a command: which lie within another, and which nothing gives a value."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_NAMED = re.compile(r"\$\{?([A-Za-z_0-9]\w*)", re.ASCII)
WORD = re.compile(r"(?<![\w$])[A-Za-z_]\w*", re.ASCII)


def left_open(text: str) -> tuple[str, str] | None:
    """Return why a word has no value, and what gives it one; None for a word without an open place.

    >>> left_open("${TP}"), left_open("8")
    (('depends on $TP, which the script does not set', 'give --set TP=VALUE'), None)
    >>> left_open("$((ISL + 20))")[1], left_open("$(nvidia-smi -L)")[1]
    ('give --set ISL=VALUE', 'write in the script what it prints')
    """
    if not re.search(r"\$[\w{(]", text, re.ASCII):
        return None
    if re.search(r"\$\((?!\()", text):
        return "is what a command prints, and no command is run", "write in the script what it prints"
    match = _NAMED.search(text) or WORD.search(text)
    name = match[match.lastindex or 0] if match else "VARIABLE"
    return f"depends on ${name}, which the script does not set", f"give --set {name}=VALUE"


# What a command prints, whose words are its own, and the character that stands in its place while the others are cut.
_PRINTED = re.compile(r"\$\((?!\()(?:[^()]|\([^()]*\))*\)")
_MARK = "\0"


def _restored(words: Sequence[str], printed: Sequence[str]) -> list[str]:
    """Return words with what commands print put back where its marks stand."""
    pieces = iter(printed)
    return [re.sub(_MARK, lambda _: next(pieces, _MARK), word) for word in words]


def flat(words: Sequence[str]) -> list[str]:
    """Return words with those that hold a whole command line cut open, and <what is to be filled in> put together.

    >>> flat(["srun", "bash", "-c", "python a.py --x 1"])
    ['srun', 'bash', '-c', 'python', 'a.py', '--x', '1']
    >>> flat(["torchrun", "--rdzv-endpoint", "$(srun --nodes=1 hostname):29500"])
    ['torchrun', '--rdzv-endpoint', '$(srun --nodes=1 hostname):29500']
    """
    names: list[str] = []
    for word in words:
        printed = _PRINTED.findall(word)
        bare = _PRINTED.sub(_MARK, word) if printed else word
        if re.search(r"\s--?\w", bare) or (" " in bare and ".py" in bare):
            try:
                names += flat(_restored(shlex.split(bare), printed))
            except ValueError:
                names.append(word)
        elif names and names[-1].startswith("<") and not names[-1].endswith(">") and not word.startswith("--"):
            names[-1] += " " + word
        else:
            names.append(word)
    return names
