"""Megatron-LM's arguments by their name in the parsed namespace, from words, a mapping or the namespace itself.

The table of arguments says which there are, how many values each takes, and what each means here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib import resources
from typing import Any

from shardwise.errors import Problems, near, plain
from shardwise.files import own_table
from shardwise.formats._imported import SIZES, ReadArgument
from shardwise.models import MoE
from shardwise.records import dataclass

MOST_STRANGE = 500
UNSET = "$"
"""Marks a word that a variable outside the script would have given: "${NAME}"."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One spelling of an argument: its name in the namespace, its values, its default and what it means here."""

    option: str
    name: str
    values: str
    default: object
    meaning: str

    @property
    def read(self) -> bool:
        """Whether it is used."""
        return self.meaning.startswith("read:")


def _typed(text: str) -> object:
    """Return a default as the value it stands for."""
    if text in ("-", "None"):
        return None
    if text in ("on", "off", "True", "False"):
        return text in ("on", "True")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@cache
def arguments() -> dict[str, Argument]:
    """Return every argument by its spelling.

    >>> arguments()["--disable-bias-linear"].name
    'add_bias_linear'
    """
    text = resources.files("shardwise.formats.megatron").joinpath("arguments.txt").read_text(encoding="ascii")
    rows = (line.split() for line in text.splitlines() if line and not line.startswith("#"))
    return {
        option: Argument(option, name, values, _typed(default), meaning)
        for name, values, default, meaning, *options in rows
        for option in options
    }


@cache
def by_name() -> dict[str, Argument]:
    """Return one spelling of each argument by its name in the namespace."""
    table_rows: dict[str, Argument] = {}
    for argument in arguments().values():
        table_rows.setdefault(argument.name, argument)
    return table_rows


@cache
def facts() -> dict[str, dict[str, Any]]:
    """Return what the arguments were read from, the reasons for leaving some out, and vocabularies of tokenizers."""
    return own_table(__file__, "arguments.toml")


@dataclass(slots=True)
class GivenArguments:
    """What was given, by name in the namespace: the spelling used and the value; problems and unknown arguments."""

    values: dict[str, object] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    unknown: list[ReadArgument] = field(default_factory=list)
    problems: Problems = field(default_factory=Problems)
    skipped: frozenset[str] = frozenset()

    def put(self, argument: Argument, value: object) -> None:
        """Record one argument; as in argparse the last one wins, but two that differ are a problem."""
        old = self.values.get(argument.name)
        if argument.name in self.values and old != value and argument.read:
            rule = f"contradicts {self.options[argument.name]} = {plain(old)} before it"
            self.problems.add(argument.option, plain(value), rule, "give one of them")
        self.values[argument.name], self.options[argument.name] = value, argument.option


def from_words(words: Sequence[str], skipped: frozenset[str] = frozenset()) -> GivenArguments:
    """Return what a command line's words give; numbers stay text until they are used.

    Unknown arguments that are `skipped` are kept whatever they are called.

    >>> from_words("--num-layers 24 --swiglu --lr=1e-4".split()).values
    {'num_layers': '24', 'swiglu': True, 'lr': '1e-4'}
    """
    given = GivenArguments(skipped=skipped)
    rest = deque(words)
    stray: list[str] = []
    strange: dict[str, None] = {}
    while rest:
        word = rest.popleft()
        option, equals, value = word.partition("=")
        argument = arguments().get(option)
        if not word.startswith("--"):
            stray.append(word)
        elif argument is None:
            strange.setdefault(option)
            if len(strange) > MOST_STRANGE:
                rule = f"is one of more than {MOST_STRANGE} arguments that Megatron-LM does not have"
                given.problems.add(option, None, rule, "give a script that starts Megatron-LM")
                break
            _unknown(given, option, [value] if equals else _values_of(rest, len(rest)))
        elif argument.values in ("on", "off"):
            given.put(argument, argument.values == "on")
        else:
            most = {"1": 1, "3": 3}.get(argument.values, len(rest))
            _take(given, argument, [value] if equals else _values_of(rest, most))
    if stray:
        rule = "follows no argument that takes it (the shell cuts words that are not quoted)"
        given.problems.add("arguments", " ".join(stray), rule, "write --argument value, or leave it out")
    return given


def _values_of(rest: deque[str], most: int) -> list[str]:
    """Take the values that follow an argument: words that are not arguments; negative numbers are values."""
    values: list[str] = []
    while rest and len(values) < most and (not rest[0].startswith("-") or _is_number(rest[0])):
        values.append(rest.popleft())
    return values


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _take(given: GivenArguments, argument: Argument, values: list[str]) -> None:
    if not values:
        if argument.meaning not in ("none", "read:checkpoint"):
            given.problems.add(argument.option, None, "has no value", f"write {argument.option} VALUE")
    elif argument.values == "3" and len(values) != 3:
        given.problems.add(argument.option, " ".join(values), "takes three values", "give three")
    else:
        given.put(argument, values[0] if argument.values == "1" else tuple(values))


def _unknown(given: GivenArguments, option: str, values: list[str]) -> None:
    """Keep an argument that Megatron-LM does not have.

    One that is nearly the name of another is a mistake, and one that speaks of sizes may change the model.
    """
    value = " ".join(values) if values else True
    plainly = option.replace("_", "-")
    close = [plainly] if plainly in arguments() else near(option, arguments(), 1, 0.9)
    if close and (close[0] == plainly or not _extends(option[2:], close[0][2:])):
        given.problems.add(option, value, "is not an argument of Megatron-LM", f"did you mean {close[0]}?")
    elif SIZES.search(option) and option not in given.skipped:
        rule = "is not an argument of Megatron-LM, and its name speaks of sizes"
        given.problems.add(option, value, rule, f"say it in Megatron-LM's words, or skip it: --skip {option[2:]}")
    else:
        given.unknown.append(ReadArgument(argument=option, value=value, meaning="not an argument of Megatron-LM"))


def _extends(name: str, other: str) -> bool:
    """Return whether one name is the other with a word added, so that it may well be meant.

    >>> _extends("data-path2", "data-path"), _extends("sft-data-path", "data-path")
    (False, True)
    """
    return (name in other or other in name) and abs(len(name) - len(other)) > 2


def from_mapping(table: Mapping[str, object]) -> GivenArguments:
    """Return what a mapping gives, whose keys are spellings ("--num-layers") or names in the namespace.

    >>> from_mapping({"--num-layers": 24, "add_bias_linear": False}).values
    {'num_layers': 24, 'add_bias_linear': False}
    """
    given = GivenArguments()
    for key, value in table.items():
        if key.startswith("--"):
            _from_option(given, key, value)
        elif key in by_name():
            _from_name(given, by_name()[key], value)
        elif (
            key not in facts()["derived"]["names"]
            and not key.startswith("_")
            and value not in (None, False, (), [], "")
        ):
            given.unknown.append(
                ReadArgument(argument=key, value=plain(value), meaning="not an argument of Megatron-LM")
            )
    return given


def routing(moe: MoE) -> dict[str, str | int | None]:
    """Return the arguments of a router: a correction is of sigmoid scores, and one expert a token needs no softmax.

    megatron/core/transformer/transformer_config.py refuses a bias beside softmax, and a softmax of one chosen logit.

    >>> routing(MoE(experts=8, top_k=2, ffn=64, correction_bias=True))["--moe-router-score-function"]
    'sigmoid'
    """
    return {
        "--moe-router-topk": moe.top_k,
        "--moe-router-score-function": "sigmoid" if moe.correction_bias else None,
        "--moe-router-enable-expert-bias": moe.correction_bias,
        "--moe-router-pre-softmax": moe.top_k == 1 and not moe.correction_bias,
    }


def _from_option(given: GivenArguments, option: str, value: object) -> None:
    argument = arguments().get(option)
    if value is None:
        return
    if argument is None:
        _unknown(given, option, [] if value is True else [str(value)])
    elif argument.values in ("on", "off"):
        if not isinstance(value, bool):
            given.problems.add(option, plain(value), "is a switch", "give true, or leave it out")
        elif value:
            given.put(argument, argument.values == "on")
    else:
        given.put(argument, _listed(value) if argument.values in ("3", "many") else value)


def _from_name(given: GivenArguments, argument: Argument, value: object) -> None:
    """Keep a value of a parsed namespace; defaults are not given."""
    number = getattr(value, "name", None) if not isinstance(value, (str, int, float, bool)) else None
    value = number if isinstance(number, str) else value
    if value is None or value == argument.default or value in ((), []):
        return
    given.put(argument, _listed(value) if argument.values in ("3", "many") else value)


def _listed(value: object) -> object:
    """Return the values of an argument that takes several, which files also write as "[a b]"."""
    if isinstance(value, str):
        return tuple(value.removeprefix("[").removesuffix("]").replace(",", " ").split())
    return tuple(value) if isinstance(value, Iterable) else (value,)


def split_states(precision: str) -> tuple[str, str]:
    """Return the recipe of GEMMs and gradients in the name of one, and what the name says of an optimizer's states.

    >>> split_states("bf16-grads16-masters16-moments16"), split_states("fp8")
    (('bf16-grads16', '-masters16-moments16'), ('fp8', ''))
    """
    gemms = precision.removesuffix("-moments16").removesuffix("-masters16")
    return gemms, precision[len(gemms) :]
