"""`shardwise compare`: two cases side by side, from two case files or from one case and two sets of flags."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shardwise.answers import _figures, _infer, _train
from shardwise.answers._answer import Answer
from shardwise.answers._case import Inputs, known_keys, read_values
from shardwise.answers._files import read_case
from shardwise.answers._from import take
from shardwise.answers._kinds import fail
from shardwise.answers._scan import ScannedWords, scan
from shardwise.errors import InputError, Problem

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardwise.answers._compare_page import Report
    from shardwise.answers._page import Page

_OWN = ("first", "second", "a", "b", "plot", "json", "width", "help")


def _is_file(word: object) -> bool:
    return isinstance(word, str) and word.endswith((".toml", ".json")) and not word.endswith("config.json")


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two: its letter, its case file, the command its flags begin with, and what they say."""

    name: str
    file: str | None
    kind: str
    own: ScannedWords


def _sides(inputs: Inputs) -> list[_Side]:
    """Return the two sides as they were asked for."""
    from shardwise.answers._commands import command

    values, flags = inputs.values, replace(command("compare"), positionals=())
    files = (values.get("first"), values.get("second")) if _is_file(values.get("first")) else (None, None)
    found = []
    for file, name in zip(files, "ab", strict=True):
        try:
            words = shlex.split(values.get(name, ""))
        except ValueError as error:
            raise fail(name, values[name], f"is not a list of flags ({error})", "close the quotation") from None
        kind = words.pop(0) if words and words[0] in ("train", "infer") else ""
        found.append(_Side(name, file, kind, scan(words, flags)))
    return found


def _kind_of(side: _Side, case: dict[str, Any]) -> str:
    """Return the command of a side: as said, as its file says, or told by a flag that only `infer` has."""
    from shardwise.answers._flags import infer_flags, train_flags

    if side.kind:
        return side.kind
    if case.get("command") in ("train", "infer"):
        return str(case["command"])
    only = infer_flags().keys() - train_flags().keys()
    return "infer" if only & case.keys() else "train"


def _inputs(shared: dict[str, Any], side: _Side) -> tuple[str, Inputs]:
    from shardwise.answers._commands import command, every

    inputs = Inputs(problems=side.own.problems)
    case = read_case(side.file) if side.file else {}
    typed = shared | side.own.given
    kind = _kind_of(side, case | typed)
    for key in typed:
        if key not in command(kind).flags:
            inputs.fail(key, typed[key], f"is not a flag of {kind}", f"`shardwise {kind} --help` lists them")
    raw = known_keys(every(), case | typed, command(kind), inputs)
    inputs.notes.clear()
    read_values(raw, command(kind), inputs)
    take(inputs)
    return kind, inputs


def _reports(inputs: Inputs) -> tuple[Report, Report]:
    shared = {key: value for key, value in inputs.values.items() if key not in _OWN}
    first = inputs.get("first")
    if inputs.get("second") is None and isinstance(first, str):
        shared["model"] = first
    found: list[tuple[str, Report]] = []
    problems: list[Problem] = []
    for side in _sides(inputs):
        try:
            kind, own = _inputs(shared, side)
            found.append((kind, _infer.ask(own) if kind == "infer" else _train.ask(own)))
        except InputError as error:
            problems += [_told(side.name, p, shared) for p in error.problems]
    if len(found) == 2 and found[0][0] != found[1][0]:
        rule = f"is {found[1][0]}, and a is {found[0][0]}"
        problems.append(Problem("b", found[1][0], rule, "compare two of a kind"))
    if problems:
        raise InputError(dict.fromkeys(problems))
    return found[0][1], found[1][1]


def _told(side: str, problem: Problem, shared: dict[str, Any]) -> Problem:
    """Return a problem under the name of its side, where the field is not of both."""
    if problem.field in shared or problem.field in ("config", "on", "model", "a", "b"):
        return problem
    return Problem(f"{side}.{problem.field}", problem.value, problem.rule, problem.remedy)


def answer(inputs: Inputs, width: int) -> Answer:
    """Return the answer of `shardwise compare`."""
    _check_words(inputs)
    _figures.check(inputs)
    inputs.problems.raise_if_any()
    a, b = _reports(inputs)

    def tree() -> dict[str, Any]:
        from shardwise.answers._compare_page import compare_tree

        return compare_tree(a, b)

    def page() -> Page:
        from shardwise.answers._compare_page import compare_page

        return compare_page(a, b, width)

    def draw() -> Figure:
        from shardwise.answers._plots_bars import compare_figure

        return compare_figure(a, b)

    return _figures.plotted(inputs, Answer(0 if a.fits and b.fits else 1, tree, page), draw)


def _check_words(inputs: Inputs) -> None:
    first, second = inputs.get("first"), inputs.get("second")
    if _is_file(first) and second is None:
        inputs.fail("second", None, "is missing", "name two case files, or a model with --a and --b")
    elif first is not None and second is not None and not (_is_file(first) and _is_file(second)):
        inputs.fail(
            "second", second, "is not a case file beside a case file", "name two files, or a model with --a and --b"
        )
    elif first is not None and second is None and not {"a", "b"} & inputs.values.keys():
        inputs.fail("b", None, "is missing", 'say what differs: --a "--tp 8" --b "--tp 4 --pp 2"')
