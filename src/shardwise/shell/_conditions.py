"""The truth of what stands between the brackets of a test.

Source: POSIX.1-2024, Shell and Utilities, test; [[ ]] as in Bash.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from shardwise.shell._budget import Budget

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
