"""From the words of a command line to its answer: find the command, read its flags and case file, and ask."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from shardwise.answers import _commands
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs, known_keys, read_values
from shardwise.answers._files import read_case, write_case
from shardwise.answers._flags import FROM, Command
from shardwise.answers._kinds import SWITCH, fail, nearest
from shardwise.answers._scan import ScannedWords, scan
from shardwise.errors import InputError

_NOT_SAVED = ("json", "width", "config", "save", "help", "plot", "timeline")


def answer(words: Sequence[str]) -> Answer:
    """Return the answer to the words of a command line; raises `InputError` with everything that is wrong."""
    if not words or words[0] in ("-h", "--help", "help"):
        from shardwise.answers._help import overview

        return overview(2 if not words else 0, _columns())
    words, behind = split(words)
    name, rest = _command_of(words)
    command = _commands.command(name, _kind_of(rest) if name == "plan" else "")
    found = scan(rest, command)
    if behind and "from_args" in command.flags:
        found.put(command.flags["from_args"], behind)
    elif behind:
        rule = f"stands behind --, and {name} takes no words of another program"
        found.problems.add("arguments", " ".join(behind), rule, "leave it out")
    if found.given.get("help") is True:
        from shardwise.answers._help import help_of

        return help_of(command, _columns())
    inputs = _inputs(found, command)
    width = inputs.get("width") or _columns()
    handler = import_module(f"shardwise.answers._{name}")
    result: Answer = handler.answer(inputs, width)
    if "save" in inputs.values:
        write_case(inputs.values["save"], case_of(name, inputs))
    return result


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line or its case file asks for JSON, however it says so and whatever else is wrong.

    >>> asks_for_json(["train", "gpt2", "--json=1"]), asks_for_json(["train", "gpt2", "--", "--json"])
    (True, False)
    """
    words, _ = split(words)
    given: object = False
    try:
        name, rest = _command_of(words)
        given = scan(rest, _commands.command(name, _kind_of(rest) if name == "plan" else "")).given.get("json")
        if given is None and (path := _config_of(words)) is not None:
            given = read_case(path).get("json", False)
        return SWITCH.read(given or False, "json") is True
    except InputError:
        return given is True or any(word.startswith("--json") for word in words)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of ours, and those behind --, which are another program's.

    >>> split(["train", "--on", "h100", "--", "torchrun", "x.py"])
    (['train', '--on', 'h100'], ['torchrun', 'x.py'])
    """
    at = list(words).index("--") if "--" in words else len(words)
    return list(words[:at]), list(words[at + 1 :])


def case_of(name: str, inputs: Inputs) -> dict[str, Any]:
    """Return the case that a file keeps: the command and every value that was given."""
    return {"command": name, **{key: value for key, value in inputs.values.items() if key not in _NOT_SAVED}}


def _command_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the command and the other words; without one, a case file names it."""
    for i, word in enumerate(words):
        if word in _commands.NAMES:
            return word, [*words[:i], *words[i + 1 :]]
    plain = [word for word in words if not word.startswith("-")]
    path = _config_of(words)
    if path is not None:
        name = read_case(path).get("command")
        if name in _commands.NAMES:
            return name, list(words)
        plain = [str(name)]
    remedy = f"did you mean {nearest(plain[0], _commands.NAMES)}? " if plain else ""
    raise fail(
        "command",
        plain[0] if plain else None,
        "is not a command" if plain else "is missing",
        remedy + "use one of " + ", ".join(_commands.NAMES),
    )


def _kind_of(words: Sequence[str]) -> str:
    """Return the kind of case that a search is of, by its word or by the case file."""
    path = _config_of(words)
    return "infer" if "infer" in words or (path is not None and read_case(path).get("what") == "infer") else "train"


def _config_of(words: Sequence[str]) -> str | None:
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            return words[i + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def _inputs(found: ScannedWords, command: Command) -> Inputs:
    inputs = Inputs(problems=found.problems)
    raw: dict[str, Any] = {}
    if isinstance(path := found.given.get("config"), str):
        try:
            raw = known_keys(_commands.every(), read_case(path), command, inputs)
        except InputError as error:
            inputs.merge(error)
            inputs.bad.add("config")
    raw |= _placed(found.words, command)
    raw |= found.given
    _use_catalogue(raw.get("catalogue"), inputs)
    read_values(raw, command, inputs)
    if inputs.values.keys() & FROM.keys():
        from shardwise.answers._from import take

        take(inputs)
    return inputs


def _placed(words: Sequence[str], command: Command) -> dict[str, Any]:
    """Return the words by the names of their places; where a command takes many, the last place holds the rest."""
    if command.many and words:
        last = len(command.positionals) - 1
        words = [*words[:last], words[last:]]  # type: ignore[list-item]
    return dict(zip(command.positionals, words, strict=False))


def _use_catalogue(folder: object, inputs: Inputs) -> None:
    """Look in the folder of one's own that was named before anything is read, and in none of another run."""
    from shardwise.own import use_catalogue

    try:
        use_catalogue(*([folder] if isinstance(folder, str) and folder else []))
    except InputError as error:
        inputs.merge(error)
        inputs.bad.add("catalogue")


def _columns() -> int:
    """Return the width of the page: the terminal's, at most 100; 80 elsewhere."""
    try:
        return max(60, min(100, os.get_terminal_size(sys.stdout.fileno()).columns or 80))
    except (OSError, ValueError, AttributeError):
        return 80
