"""What a flag takes: each kind reads the text of a flag or the value of a file, and says what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any

from shardwise.errors import InputError, Problem, near, plain
from shardwise.records import dataclass
from shardwise.units import (
    in_digits,
    parse_bandwidth,
    parse_bytes,
    parse_count,
    parse_flops,
    parse_seconds,
    parse_share,
    parsed_as,
)

if TYPE_CHECKING:
    from shardwise.plans.fields import Field


MOST_WHOLE = 10**9  # beyond it no model, cluster or job is meant, and products stay finite
MOST_ITEMS = 10_000
MOST = 1e24
LEAST = 1e-12
_DIGITS = re.compile(r"[+-]?\d[\d_]*", re.ASCII)
_NUMBER: Mapping[str, Any] = {"type": ["number", "string"]}
_LIST: Mapping[str, Any] = {"type": ["array", "string"]}
TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Converter:
    """How the value of a flag is read, and its word in the help.

    A greedy one takes words with dashes; one that is `repeated` may be given several times, each a value of a list.
    `schema` is what a case file may hold, in the words of JSON Schema.
    """

    read: Callable[[Any, str], Any]
    word: str
    switch: bool = False
    greedy: bool = False
    repeated: bool = False
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


def fail(field: str, value: object, rule: str, remedy: str) -> InputError:
    """Return the error of one problem."""
    return InputError([Problem(field, plain(value), rule, remedy)])


def whole(least: int = 1, most: int = MOST_WHOLE) -> Converter:
    """Return the kind of whole numbers in a range.

    >>> whole().read("8", "tp")
    8
    """

    def read(value: object, field: str) -> int:
        remedy = f"write a number such as {max(least, 8) if most >= 8 else most}"
        if isinstance(value, str) and _DIGITS.fullmatch(value.strip()) and len(value) <= 40:
            value = int(value.strip())
        size, digits = (value, "") if isinstance(value, int) and not isinstance(value, bool) else in_digits(str(value))
        if size < least:
            raise fail(field, value, f"must be a whole number of at least {least}", remedy)
        if size > most:
            raise fail(field, value, f"must be at most {most:,}", remedy)
        if digits:
            raise fail(field, value, "must be in digits alone", f"write {digits}")
        return size

    return Converter(read, "N", schema={"type": ["integer", "string"], "minimum": least, "maximum": most})


@dataclass(frozen=True, slots=True)
class Range:
    """The values a number may take, and an example of one."""

    least: float = 0.0
    most: float = MOST
    above: bool = False
    example: str = "1"


def number(parse: Callable[[str, str], float], word: str, allowed: Range) -> Converter:
    """Return the kind of numbers in a range, read with their unit; a file may give the plain number in SI units.

    >>> number(parse_seconds, "TIME", Range()).read("50ms", "restart")
    0.05
    """
    least, most, remedy = allowed.least, allowed.most, f"write for example {allowed.example}"

    def read(value: object, field: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise fail(field, value, "must be a number", remedy)
        try:
            parsed = parsed_as(parse, value, field, remedy) if isinstance(value, str) else float(value)
        except OverflowError:
            parsed = math.inf
        if not math.isfinite(parsed):
            raise fail(field, str(value)[:60], "must be finite", remedy)
        if parsed < least or (allowed.above and parsed <= least) or parsed > most:
            low = f"above {_shown(least)}" if allowed.above else f"at least {_shown(least)}"
            high = f" and at most {_shown(most)}" if parsed > most or most <= 1 else ""
            raise fail(field, value, f"must be {low}{high}", remedy)
        if 0 < parsed < LEAST:
            raise fail(field, value, f"must not be below {LEAST:g}", remedy)
        return parsed

    return Converter(read, word, schema=_NUMBER)


def _shown(bound: float) -> str:
    """Return a bound as people write it.

    >>> _shown(1e6), _shown(0.05), _shown(1e24)
    ('1,000,000', '0.05', '1e+24')
    """
    return f"{bound:,.0f}" if 1e4 <= bound < 1e15 else f"{bound:g}"


def choice(*allowed: str) -> Converter:
    """Return the kind of one word out of several.

    >>> choice("ring", "all-gather").read("ring", "cp_kind")
    'ring'
    """

    def read(value: object, field: str) -> str:
        if isinstance(value, str) and value.strip().lower() in allowed:
            return value.strip().lower()
        raise fail(field, value, "is not a known choice", _near(value, allowed))

    return Converter(read, "{" + ",".join(allowed) + "}", schema={"enum": list(allowed)})


def precision() -> Converter:
    """Return the kind of recipes of precision: those that are known when it reads, the user's too."""
    from shardwise.plans import DTYPES, precision_names

    def read(value: object, field: str) -> str:
        return choice(*precision_names()).read(value, field)  # type: ignore[no-any-return]

    shown = ",".join(name for name in precision_names() if name not in DTYPES)
    return Converter(read, "{" + shown + "}")


_MEANT = {
    "liger": ("fused-linear",), "lora+": ("lora-plus",), "int4": ("gptq4", "awq4", "nf4"), "4bit": ("nf4", "nf4-dq"),
    "8bit": ("int8", "adam8bit"), "fp4": ("nvfp4",), "gptq": ("gptq4",), "awq": ("awq4",),
    **dict.fromkeys(("orpo", "simpo", "cpo"), ("dpo --reference none",)), "ipo": ("dpo",),
    **dict.fromkeys(("rloo", "gdpo"), ("grpo",)), "qlora": ("lora --base nf4",),
}  # fmt: skip
"""Words of other tools that are spelt like none of ours, and which of ours they mean, with flags beside them."""


def _near(value: object, allowed: tuple[str, ...]) -> str:
    meant = [word for word in _MEANT.get(str(value).strip().lower(), ()) if word.split()[0] in allowed]
    if meant:
        return f"use {' or '.join(meant)}"
    close = near(str(value), allowed, 3, 0.55) if len(allowed) > 16 else []
    return f"use {' or '.join(close)}" if close else "use one of " + ", ".join(allowed)


def meant_by(word: str, allowed: tuple[str, ...]) -> str:
    """Return a question for the word that a wrong one is close to, empty where none is.

    >>> meant_by("trian", ("train", "infer")), meant_by("bake", ("train", "infer"))
    ('did you mean train? ', '')
    """
    return "".join(f"did you mean {close}? " for close in near(word, allowed, 1, 0.6))


def _read_switch(value: object, field: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in (*TRUE, *FALSE):
        return value.lower() in TRUE
    raise fail(
        field, value, "must be true or false", f"write --{field.replace('_', '-')} or --no-{field.replace('_', '-')}"
    )


def _read_text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise fail(field, value, "must be text that is not empty", f"write a word behind --{field.replace('_', '-')}")
    if "\0" in value:
        raise fail(field, value.replace("\0", "\\0"), "must not hold a null character", f"give the {field}")
    return value.strip()


def _read_flags(value: object, field: str) -> str:
    """Return flags as they were typed; none at all are the case as it is."""
    return "" if isinstance(value, str) and not value.strip() else _read_text(value, field)


def _items(value: object, field: str) -> list[Any]:
    items: list[Any] | None = list(value) if isinstance(value, (list, tuple)) else None
    if isinstance(value, str):
        items = [piece.strip() for piece in value.split(",", MOST_ITEMS)]
    if items is None:
        raise fail(field, value, "must be a list", "write values with commas between them")
    if len(items) > MOST_ITEMS:
        raise fail(field, value, f"has more than {MOST_ITEMS:,} values", "write fewer")
    return items


def _read_words(value: object, field: str) -> tuple[str, ...]:
    items = _items(value, field)
    if not items or not all(isinstance(word, str) and word for word in items):
        raise fail(field, value, "must be words with commas between them", "for example a,b")
    return tuple(items)


def word_list(empty: bool) -> Converter:
    """Return the kind of lists of words, joined by + as searches have them or by commas; `empty` ones are none.

    >>> word_list(True).read("gradients+optimizer", "offload"), word_list(True).read("none", "offload")
    (('gradients', 'optimizer'), ())
    """

    def read(value: object, field: str) -> tuple[str, ...]:
        if empty and (value == "none" or value in ([], ["none"])):
            return ()
        words = tuple(word.strip() for item in _read_words(value, field) for word in item.split("+"))
        if not all(words):
            raise fail(field, value, "must be words with + or commas between them", "for example a+b")
        return words

    return Converter(read, "A+B+...", schema=_LIST)


def _read_varied(value: object, field: str) -> tuple[str, ...]:
    """Return what is varied: FIELD=VALUES, several of them in a list.

    >>> _read_varied("seq_len=4096..16384", "vary")
    ('seq_len=4096..16384',)
    """
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if wrong := [one for one in items or ("",) if not isinstance(one, str) or "=" not in one]:
        raise fail(field, wrong[0], "must be a field and its values", "for example --vary seq_len=4096..65536")
    return tuple(str(one) for one in items)


def _read_order(value: object, field: str) -> tuple[str, ...]:
    """Read an order of axes as Megatron-LM spells it, tp-cp-ep-dp-pp; experts lie within tp, cp and dp already."""
    order = _read_words(value.replace("-", ",") if isinstance(value, str) else value, field)
    if "ep" in order:
        if "tp" not in order or "dp" not in order or not order.index("tp") < order.index("ep") < order.index("dp"):
            rule = "must have ep between tp and dp, as Megatron-LM's two orders do"
            raise fail(field, value, rule, "for example tp-cp-ep-dp-pp or tp-cp-ep-pp-dp")
        order = tuple(axis for axis in order if axis != "ep")
    return order


def _read_arguments(value: object, field: str) -> tuple[str, ...]:
    """Words of another program's command line, as they are."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(word, str) for word in value):
        raise fail(field, value, "must be words behind --", "write -- and the training command at the end of the line")
    return tuple(value)


def _read_wholes(value: object, field: str) -> tuple[int, ...]:
    one = whole(0)
    try:
        return tuple(one.read(item, field) for item in _items(value, field))
    except InputError:
        raise fail(field, value, "must be whole numbers with commas between them", "for example 10,11,11") from None


def _read_raw(value: object, field: str) -> str | int | float:
    """Values that the cluster reads itself, with their units."""
    if isinstance(value, str):
        return _read_text(value, field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise fail(field, value, "must be a finite number, or text with a unit", "write the number with its unit")
    return value


def _read_places(value: object, field: str) -> tuple[int, ...]:
    """Return ranks of each axis in order of `AXES`, from text such as tp=4,dp=2; axes left out have one.

    >>> _read_places("tp=4,dp=2", "fast")
    (4, 1, 1, 2, 1)
    """
    from shardwise.plans import AXES

    if isinstance(value, (list, tuple)) or re.fullmatch(r"\d+(,\d+)+", str(value)):
        return _read_wholes(value, field)
    pairs = [str(item).partition("=")[::2] for item in _items(value, field)]
    ranks_of = {axis.strip(): ranks for axis, ranks in pairs}
    one = whole(0)
    try:
        if len(ranks_of) == len(pairs) and set(ranks_of) <= set(AXES):
            return tuple(one.read(ranks_of.get(axis, "1"), field) for axis in AXES)
    except InputError:
        pass
    raise fail(field, value, "must be axes with their ranks, each once", "for example tp=4,dp=2")


def file_of(*endings: str) -> Converter:
    """Return the kind of files to be written, told by how their names end.

    >>> file_of(".svg", ".png").read("front.svg", "plot")
    'front.svg'
    """

    def read(value: object, field: str) -> str:
        path = _read_text(value, field)
        if not path.lower().endswith(endings):
            raise fail(field, path, "does not say what to write", "end the name in " + " or ".join(endings))
        return path

    return Converter(read, "FILE")


SWITCH = Converter(_read_switch, "", switch=True, schema={"type": "boolean"})
TEXT = Converter(_read_text, "NAME")
FILE = Converter(_read_text, "FILE")
FLAGS = Converter(_read_flags, "FLAGS", greedy=True)
FIGURES = (".svg", ".png", ".pdf", ".html")
WORDS = Converter(_read_words, "A,B,...", schema=_LIST)
VARIED = Converter(_read_varied, "FIELD=A..B", repeated=True, schema=_LIST)
ORDER = Converter(_read_order, "A-B-...", schema=_LIST)
ARGUMENTS = Converter(_read_arguments, "WORDS", schema=_LIST)
WHOLES = Converter(_read_wholes, "N,N,...", schema=_LIST)
RAW = Converter(_read_raw, "VALUE", schema=_NUMBER)
PLACES = Converter(_read_places, "AXIS=N,...", schema=_LIST)


def read_chance(value: object, field: str) -> float:
    """Return a chance between 0 and 1, written as a share or in percent.

    >>> read_chance("90%", "risk"), read_chance(0.5, "risk")
    (0.9, 0.5)
    """
    try:
        chance = parse_share(str(value), field)
    except InputError:
        chance = -1.0
    if isinstance(value, bool) or not 0 < chance < 1:
        raise fail(field, value, "must be a chance between 0 and 1", "write for example 90%")
    return chance


CHANCE = Converter(read_chance, "CHANCE", schema=_NUMBER)
WHOLE = whole()
COUNT = number(parse_count, "N", Range(above=True, example='"15T"'))
RATIO = number(parse_count, "X", Range(least=1, most=1e6, example="1.2"))
SHARE_OF = number(parse_count, "X", Range(above=True, most=1e6, example="4"))
GRAMS = number(parse_count, "GRAMS", Range(most=1e4, example="400"))
RATE_OF_FAILURE = number(parse_count, "RATE", Range(most=1e3, example="1e-5"))
FACTOR = number(parse_count, "X", Range(most=1e6, above=True, example="1.25"))
FRACTION = number(parse_share, "SHARE", Range(most=1, above=True, example="0.8"))
PART = number(parse_share, "SHARE", Range(most=1, example="0.05"))
SECONDS = number(parse_seconds, "TIME", Range(most=1e10, example='"5min"'))
BANDWIDTH = number(parse_bandwidth, "RATE", Range(above=True, example='"400GB/s"'))
FLOPS = number(parse_flops, "RATE", Range(above=True, example='"700T"'))
BYTES = number(parse_bytes, "SIZE", Range(least=1e6, example='"20GiB"'))  # no memory has 20 bytes: a unit is missing


def converter_of(field: Field) -> Converter:
    """Return the kind of the values of a field of a plan, a job or a framework.

    >>> from shardwise.plans.fields import PLAN
    >>> converter_of(PLAN[0]).read("8", "tp")
    8
    """
    if field.type == "whole":
        return whole(field.least, field.most)
    if field.type == "choice":
        return choice(*field.choices, *field.only_asked)
    if field.type == "words":
        return word_list(field.searched == "values")
    return precision() if field.type == "precision" else _KINDS[field.type]


_KINDS = {
    "wholes": WHOLES,
    "count": COUNT,
    "ratio": RATIO,
    "factor": FACTOR,
    "share": FRACTION,
    "part": PART,
    "failures": RATE_OF_FAILURE,
    "seconds": SECONDS,
    "bytes": BYTES,
    "switch": SWITCH,
    "text": TEXT,
    "order": ORDER,
    "places": PLACES,
}
