"""From the words of a command line to its answer: find the command, read its flags and case file, and ask."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import field
from importlib import import_module
from typing import Any

from shardwise.answers import _commands, _flags
from shardwise.answers._answer import Answer
from shardwise.answers._converters import FALSE, SWITCH, TRUE, fail, meant_by
from shardwise.answers._files import read_case, write_case
from shardwise.answers._flags import ALIASES, FROM, Command, Flag
from shardwise.answers._inputs import WRITTEN, CaseFile, Inputs, known_keys, read_values
from shardwise.answers._meant_values import meant_value
from shardwise.answers._typed import joined
from shardwise.answers._value_lists import SHAPE
from shardwise.errors import InputError, Problems, near
from shardwise.plans.fields import meant
from shardwise.records import dataclass

# Commands that are answered by a module of another name.
_HOMES = {
    "models": "_listing",
    "devices": "_listing",
    "dtypes": "_listing",
    "schema": "_reference",
    "completion": "_reference",
}
_NOT_SAVED = (*WRITTEN, "json", "width", "config", "help", "follow")


def answer(words: Sequence[str]) -> Answer:
    """Return the answer to the words of a command line; raises `InputError` with everything that is wrong."""
    if not words or words[0] in ("-h", "--help", "help"):
        from shardwise.answers._help import overview

        return overview(2 if not words else 0, _columns())
    words, behind = split(words)
    name, rest = _command_of(words)
    if name == "export":
        from shardwise.answers._export import with_target

        rest = with_target(rest)
    command = _commands.command(name, _kind_of(rest, name))
    scanned = scan(rest, command)
    _name_the_kind(scanned, rest, command)
    if behind and "from_args" in command.flags:
        scanned.put(command.flags["from_args"], behind)
    elif behind:
        rule = f"stands behind --, and {name} takes no words of another program"
        scanned.problems.add("arguments", " ".join(behind), rule, "leave it out")
    if scanned.given.get("help") is True:
        from shardwise.answers._help import help_of

        asked = str(scanned.given.get("width", ""))
        return help_of(command, min(max(int(asked[:4]), 60), 1000) if asked.isdecimal() else _columns())
    inputs = _inputs(scanned, command)
    width = inputs.get("width") or _columns()
    home = "_vary" if _asks_many(inputs) else _HOMES.get(name, f"_{name}")
    handler = import_module(f"shardwise.answers.{home}")
    result: Answer = handler.answer(inputs, width)
    if "save" in inputs.values:
        write_case(inputs.values["save"], case_of(name, inputs))
    return result


def _asks_many(inputs: Inputs) -> bool:
    """Return whether one question is asked of many values: of a field, of devices, or of constants."""
    given = inputs.values.keys() | inputs.bad
    kind = inputs.get("what") if inputs.command == "plan" else inputs.command
    several = "," in str(inputs.values.get("on", ""))
    if inputs.command == "plan":
        from shardwise.answers._plan_tuning import tunes

        # A search of training plans ranks those of several devices together; ways to fine-tune are of one.
        return bool(given & {"vary", "solve"}) or (several and (kind != "train" or tunes(inputs)))
    return kind in _commands.MANY and bool(given & _flags.MANY.keys() or several)


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether a command line or its case file asks for JSON, however it says so and whatever else is wrong.

    >>> asks_for_json(["train", "gpt2", "--json=1"]), asks_for_json(["train", "gpt2", "--", "--json"])
    (True, False)
    """
    words, _ = split(words)
    given: object = False
    try:
        name, rest = _command_of(words)
        given = scan(rest, _commands.command(name, _kind_of(rest, name))).given.get("json")
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
    if plain and _is_model(plain[0]):
        line = joined(["shardwise", "train" if len(words) > 1 else "count", *words])
        raise fail("command", plain[0], "is a model, and no command stands before it", f"write for example `{line}`")
    path = _config_of(words)
    if path is not None:
        name = read_case(path).get("command")
        if isinstance(name, str) and name in _commands.NAMES:
            return name, list(words)
        plain = [] if name is None else [str(name)]
        first, _, what = str(name).partition(" ")
        if what in _commands.KINDS.get(first, ("", ()))[1]:
            raise fail("command", name, "is a command and its kind", f'write command = "{first}" and what = "{what}"')
    remedy = meant_by(plain[0], _commands.NAMES) if plain else ""
    raise fail(
        "command",
        plain[0] if plain else None,
        "is not a command" if plain else "is missing",
        remedy + "use one of " + ", ".join(_commands.NAMES),
    )


def _kind_of(words: Sequence[str], name: str) -> str:
    """Return the kind of case that a search or an export is of, by its word or by the case file."""
    key, kinds = _commands.KINDS.get(name, ("", ()))
    if not key:
        return ""
    path = _config_of(words)
    kind = read_case(path).get(key) if path is not None else None
    return next((word for word in words if word in kinds), kind if kind in kinds else "")


def _is_model(word: str) -> bool:
    """Return whether a word names a model that is known, or a file of one."""
    from shardwise.models import load_model

    try:
        load_model(word)
    except InputError:
        return False
    return True


def _name_the_kind(scanned: ScannedWords, words: Sequence[str], command: Command) -> None:
    """Take a lone word for the model where a search or an export is not told of what: only that is then missing."""
    key, kinds = _commands.KINDS.get(command.name, ("", ()))
    if not key or len(scanned.words) != 1 or key in scanned.given or _config_of(words) is not None:
        return
    (word,) = scanned.words
    if word not in kinds and (not near(word, kinds, 1, 0.5) or _is_model(word)):
        line = joined(["shardwise", command.name, kinds[0], *words])
        rest = f"; in place of {kinds[0]} also {', '.join(kinds[1:])}"
        scanned.problems.add(key, None, f"is missing before {word}", f"write `{line}`{rest}")
        scanned.words.insert(0, kinds[0])


def _config_of(words: Sequence[str]) -> str | None:
    for i, word in enumerate(words):
        if word == "--config" and i + 1 < len(words):
            return words[i + 1]
        if word.startswith("--config="):
            return word.removeprefix("--config=")
    return None


def _inputs(scanned: ScannedWords, command: Command) -> Inputs:
    inputs = Inputs(problems=scanned.problems, command=command.name)
    raw: dict[str, Any] = {}
    if isinstance(path := scanned.given.get("config"), str):
        try:
            follow = SWITCH.read(scanned.given.get("follow", False), "follow") is True
            raw = known_keys(_commands.every(), read_case(path), command, inputs, CaseFile(path, follow))
        except InputError as error:
            inputs.merge(error)
            inputs.bad.add("config")
    placed = _placed(scanned.words, command)
    for key in placed.keys() & scanned.given.keys():
        if placed[key] != scanned.given[key]:
            inputs.fail(key, scanned.given[key], f"is given twice, first as {placed[key]}", "give one value")
    raw |= placed | scanned.given
    inputs.raw = raw
    _use_catalogue(raw.get("catalogue"), inputs)
    read_values(raw, command, inputs)
    if inputs.values.keys() & {*FROM, "engine"}:
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
    """Look in the catalogue folder that was named before anything is read, and in none of another run."""
    from shardwise.user_catalogue import use_catalogue

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


MOST_NAMED = 50
"""Flags that are not known, and words too many, that are named one by one."""


@dataclass(slots=True)
class ScannedWords:
    """What was typed: words by position, raw values by key, and problems."""

    words: list[str] = field(default_factory=list)
    given: dict[str, object] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)

    def put(self, flag: Flag, value: object) -> None:
        """Record the value of a flag; a second one that differs is a problem, but where a flag may be repeated."""
        if flag.kind.repeated and isinstance(value, str):
            value = [*self.given.get(flag.key, []), value]  # type: ignore[misc]
        elif flag.key in self.given and self.given[flag.key] != value:
            self.problems.add(
                flag.key, str(value), f"is given twice, first as {self.given[flag.key]}", "give one value"
            )
        self.given[flag.key] = value


def _takes(flag: Flag, word: str | None) -> bool:
    """Return whether the next word is the value of a flag."""
    if word is None:
        return False
    if flag.kind.switch:
        return word.lower() in (*TRUE[:3], *FALSE[:3]) or (bool(flag.kind.word) and word.isdecimal())
    return flag.kind.greedy or word == "-" or not word.startswith("-") or (word[1:2] != "-" and word != "-h")


def scan(words: Sequence[str], command: Command) -> ScannedWords:
    """Return what the words of one command say; never raises."""
    scanned = ScannedWords()
    rest = deque(words)
    unknown: list[tuple[str, str | None]] = []
    implied: dict[str, str] = {}
    while rest:
        word = rest.popleft()
        if word == "-h":
            word = "--help"
        if not word.startswith("-") or word == "-":
            scanned.words.append(word)
            continue
        name, equals, value = word.partition("=")
        if _expand_alias(name, command, implied):
            continue
        flag, negated = _find(name, command)
        if flag is None:
            after = rest[0] if rest and not rest[0].startswith("-") and not equals else None
            unknown.append((name, value if equals else after))
            if after is not None:
                scanned.words.append(rest.popleft())
        elif negated:
            if equals:
                scanned.problems.add(flag.key, value, f"{name} takes no value", f"write {name}")
            scanned.put(flag, False)
        elif equals:
            scanned.put(flag, value)
        elif _takes(flag, rest[0] if rest else None):
            scanned.put(flag, rest.popleft())
        elif flag.kind.switch:
            scanned.put(flag, True)
        else:
            scanned.problems.add(flag.key, None, "has no value", f"write {flag.option} {flag.kind.word}")
    scanned.given = {**_with_format(implied, str(scanned.given.get("stack", ""))), **scanned.given}
    _report_unknown(scanned, unknown, command)
    return scanned


def _expand_alias(name: str, command: Command, implied: dict[str, str]) -> bool:
    """Record what a flag of another program says of others; return whether that is all that it says."""
    key = name[2:].replace("-", "_") if name.startswith("--") else ""
    takes, more = ALIASES.get(key, ("", {}))
    if not more.keys() <= command.flags.keys():
        return False
    implied |= more
    return bool(more) and not takes


def _with_format(implied: dict[str, str], stack: str) -> dict[str, str]:
    """Return what flags imply, with the format that a framework has for 4 bits where nobody names one."""
    if implied.get("base") != _flags.FOUR_BITS:
        return implied
    from shardwise.plans import find_stack

    try:
        return implied | {"base": find_stack(stack or "transformers").four_bits}
    except InputError:
        # The framework is refused where it is read.
        return implied


def _find(name: str, command: Command) -> tuple[Flag | None, bool]:
    """Return the flag of a typed name, and whether it was negated."""
    if not name.startswith("--"):
        return next((f for f in command.flags.values() if f.short == name), None), False
    key = name[2:].replace("-", "_")
    if key in command.flags and "_" not in name:
        return command.flags[key], False
    if (alias := ALIASES.get(key, ("",))[0]) in command.flags:
        return command.flags[alias], False
    plain = key.removeprefix("no_")
    if plain != key and plain in command.flags and command.flags[plain].kind.switch and "_" not in name:
        return command.flags[plain], True
    return None, False


def _remedy(key: str, value: object, command: Command) -> str:
    """Return which flag may be meant: the one that other systems call so, else one that is spelt alike."""
    options = {field: flag.option for field, flag in command.flags.items()}
    lists = f"`shardwise {command.words} --help` lists them"
    long = next((field for field, short in _flags.SHORT.items() if short == f"-{key}"), key)
    known = meant(key, options) or ((long,) if long in options else ())
    from shardwise.formats import changes_nothing

    if not known and "adapter" in options and changes_nothing(key):
        return "leave it out: it changes neither bytes nor seconds"
    elsewhere = [] if known else [name for name, other in _commands.every().items() if long in other.flags]
    if elsewhere:
        named = ["plan train" if name == "plan" else name for name in elsewhere]
        names = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        # A limit of one command may stand in another under other statistics: max_ttft, p99_ttft.
        kin = [f.option for k, f in command.flags.items() if f.group == "limits" and k.endswith(f"_{key[4:]}")]
        here = f"here there are {', '.join(kin)}; " if kin and key.startswith("max_") else ""
        it = "it" if long == key else "--" + long.replace("_", "-")
        return f"{it} is a flag of {names}; {here}{lists}"
    # Flags of fine-tuning programs are taken too, and may be misspelt as well.
    tuned = {word: "--" + word.replace("_", "-") for word in (ALIASES if "adapter" in options else ())}
    close = [options[field] + meant_value(key, value, command.flags[field]) for field in known]
    close = close or [(tuned | options)[field] for field in near(key, tuned | options)]
    return f"did you mean {' or '.join(close)}? {lists}" if close else lists


def _valued(key: str) -> bool:
    """Return whether a flag of some command takes a value."""
    flags = (other.flags.get(key) for other in _commands.every().values())
    return any(flag is not None and not flag.kind.switch for flag in flags)


def _report_unknown(scanned: ScannedWords, unknown: list[tuple[str, str | None]], command: Command) -> None:
    """Add a problem for each unknown flag; a word after it is its value where another command's flag takes one.

    It is so too where there are words enough without, and where a file names what words would.
    """
    for name, value in unknown[:MOST_NAMED]:
        key = name.lstrip("-").replace("-", "_")
        spare = len(scanned.words) > len(command.positionals) or "from" in scanned.given or _valued(key)
        if value is not None and value in scanned.words and spare:
            scanned.words.remove(value)
        scanned.problems.add(key, value, f"is not a flag of {command.words}", _remedy(key, value, command))
    if len(unknown) > MOST_NAMED:
        rule = f"is one of {len(unknown)} flags that {command.words} does not have"
        scanned.problems.add("arguments", unknown[MOST_NAMED][0], rule, "correct those above first")
        return
    for word in () if command.many else scanned.words[len(command.positionals) :][:MOST_NAMED]:
        devices = "on" in command.flags and "on" not in scanned.given and SHAPE.fullmatch(word)
        remedy = f"write devices as --on {word}" if devices else "write flags as --flag value"
        scanned.problems.add("arguments", word, f"is one word too many for {command.name}", remedy)
