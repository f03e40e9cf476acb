"""From the words of a command line to the raw value of each flag, with everything that is wrong with them.

The standard library's parser stops at its first complaint; this one reads on, so that one run tells all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.answers._flags import NOT_BUILT, Command, Flag
from shardwise.answers._kinds import FALSE, TRUE
from shardwise.answers._meant import meant
from shardwise.errors import Problems

MOST_NAMED = 50
"""Flags that are not known, and words too many, that are named one by one."""


@dataclass(slots=True)
class ScannedWords:
    """What was typed: words by position, raw values by key, and problems."""

    words: list[str] = field(default_factory=list)
    given: dict[str, object] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def put(self, flag: Flag, value: object) -> None:
        """Record the value of a flag; a second one that differs is a problem."""
        if flag.key in self.given and self.given[flag.key] != value:
            self.problems.add(
                flag.key, str(value), f"is given twice, first as {self.given[flag.key]}", "give one value"
            )
        self.given[flag.key] = value


def _takes(flag: Flag, word: str | None) -> bool:
    """Return whether the next word is the value of a flag."""
    if word is None:
        return False
    if flag.kind.switch:
        return word.lower() in (*TRUE[:3], *FALSE[:3])
    return flag.kind.greedy or word == "-" or not word.startswith("-") or (word[1:2] != "-" and word != "-h")


def scan(words: Sequence[str], command: Command) -> ScannedWords:
    """Return what the words of one command say; never raises."""
    found = ScannedWords()
    rest = deque(words)
    unknown: list[tuple[str, str | None]] = []
    while rest:
        word = rest.popleft()
        if word == "-h":
            word = "--help"
        if not word.startswith("-") or word == "-":
            found.words.append(word)
            continue
        name, equals, value = word.partition("=")
        flag, negated = _find(name, command)
        if flag is None:
            after = rest[0] if rest and not rest[0].startswith("-") and not equals else None
            unknown.append((name, value if equals else after))
            if after is not None:
                found.words.append(rest.popleft())
        elif negated:
            if equals:
                found.problems.add(flag.key, value, f"{name} takes no value", f"write {name}")
            found.put(flag, False)
        elif equals:
            found.put(flag, value)
        elif _takes(flag, rest[0] if rest else None):
            found.put(flag, rest.popleft())
        elif flag.kind.switch:
            found.put(flag, True)
        else:
            found.problems.add(flag.key, None, "has no value", f"write {flag.option} {flag.kind.word}")
    _report_unknown(found, unknown, command)
    return found


def _find(name: str, command: Command) -> tuple[Flag | None, bool]:
    """Return the flag of a typed name, and whether it was negated."""
    if not name.startswith("--"):
        return next((f for f in command.flags.values() if f.short == name), None), False
    key = name[2:].replace("-", "_")
    if key in command.flags and "_" not in name:
        return command.flags[key], False
    plain = key.removeprefix("no_")
    if plain != key and plain in command.flags and command.flags[plain].kind.switch and "_" not in name:
        return command.flags[plain], True
    return None, False


def _remedy(key: str, command: Command) -> str:
    """Return which flag may be meant: the one that other systems call so, else one that is spelt alike."""
    from difflib import get_close_matches

    options = {field: flag.option for field, flag in command.flags.items()}
    near = [options[field] for field in meant(key, options) or get_close_matches(key, options, 1)]
    lists = f"`shardwise {command.name} --help` lists them"
    return f"did you mean {' or '.join(near)}? {lists}" if near else lists


def _report_unknown(found: ScannedWords, unknown: list[tuple[str, str | None]], command: Command) -> None:
    """Add a problem for each unknown flag; a word after it is its value where there are words enough without."""
    for name, value in unknown[:MOST_NAMED]:
        key = name.lstrip("-").replace("-", "_")
        spare = len(found.words) > len(command.positionals)
        if value is not None and value in found.words and spare:
            found.words.remove(value)
        if key in NOT_BUILT:
            found.problems.add(key, value, f"{NOT_BUILT[key]} is not built yet", "leave it out")
            continue
        found.problems.add(key, value, f"is not a flag of {command.name}", _remedy(key, command))
    if len(unknown) > MOST_NAMED:
        rule = f"is one of {len(unknown)} flags that {command.name} does not have"
        found.problems.add("arguments", unknown[MOST_NAMED][0], rule, "correct those above first")
        return
    for word in () if command.many else found.words[len(command.positionals) :][:MOST_NAMED]:
        found.problems.add("arguments", word, f"is one word too many for {command.name}", "write flags as --flag value")
