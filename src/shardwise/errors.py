"""Bad input as data: every problem names the field, the value, the rule it broke and the remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field as member
from functools import lru_cache
from typing import Generic, TypeVar

from shardwise.records import dataclass

V = TypeVar("V")

MOST_SHOWN = 200
"""Characters of a value that are echoed."""
_MOST_SAID = 2000


def plain(value: object) -> object:
    """Return a value as JSON has it: text and numbers as they are, anything else and other numbers as their text.

    >>> plain(8), plain([1, 2]), plain(math.nan)
    (8, '[1, 2]', 'nan')
    """
    odd = (isinstance(value, float) and not math.isfinite(value)) or (type(value) is int and abs(value) >= 2**63)
    return value if not odd and (value is None or isinstance(value, (str, int, float, bool))) else _text(value)


def cut(text: str, most: int = MOST_SHOWN) -> str:
    """Return a text, or its beginning with the number of characters that are left out.

    >>> cut("abcdef", 3), cut("abc", 3)
    ('abc... (6 characters)', 'abc')
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def _text(value: object, form: Callable[[object], str] = str) -> str:
    """Return the text of any value; Python refuses that of whole numbers of thousands of digits."""
    try:
        return form(value)
    except (ValueError, RecursionError, MemoryError):
        return f"a {type(value).__name__} too large to print"


def _printed(text: str) -> str:
    r"""Return a text whose control characters are escaped: what a file holds moves no cursor of a terminal.

    >>> print(_printed("the column \x1b[2J of nothing"))
    the column \x1b[2J of nothing
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with the input, as a person can act on it; what is long is cut where it is said.

    >>> print(Problem("tp", 6, "must divide the 32 query heads", "use one of 1, 2, 4, 8, 16, 32"))
    tp = 6: must divide the 32 query heads; use one of 1, 2, 4, 8, 16, 32
    """

    field: str
    value: object = member(hash=False)  # whatever a file has there, lists too
    rule: str
    remedy: str

    def __str__(self) -> str:
        shown = cut(repr(cut(self.value)) if isinstance(self.value, str) else _text(self.value, repr), MOST_SHOWN + 40)
        what = cut(self.field) if self.value is None else f"{cut(self.field)} = {shown}"
        return _printed(f"{what}: {cut(self.rule, _MOST_SAID)}; {cut(self.remedy, _MOST_SAID)}")

    def as_dict(self) -> dict[str, object]:
        """Return the problem as the record that `--json` prints; numbers that JSON lacks are text."""
        value = plain(self.value)
        return {
            "field": cut(self.field),
            "value": cut(value) if isinstance(value, str) else value,
            "rule": cut(self.rule, _MOST_SAID),
            "remedy": cut(self.remedy, _MOST_SAID),
        }


class InputError(ValueError):
    """Input that cannot be used; holds every problem that was found, not the first.

    >>> try:
    ...     raise InputError([Problem("tp", 0, "must be at least 1", "use 1")])
    ... except InputError as error:
    ...     print(error)
    tp = 0: must be at least 1; use 1
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[InputError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def check_finite(headlines: Mapping[str, float]) -> None:
    """Raise `InputError` where a headline is beyond what numbers can hold.

    >>> check_finite({"step_seconds": math.inf})
    Traceback (most recent call last):
    shardwise.errors.InputError: step_seconds = 'inf': is beyond what can be computed; use rates and sizes that exist
    """
    problems = [
        Problem(name, str(value), "is beyond what can be computed", "use rates and sizes that exist")
        for name, value in headlines.items()
        if not math.isfinite(value)
    ]
    if problems:
        raise InputError(problems)


@contextmanager
def bounded(field: str, source: object) -> Iterator[None]:
    """Run a block whose input may nest too deep or want more memory than there is; both raise `InputError`.

    >>> with bounded("file", "deep.json"):
    ...     raise RecursionError
    Traceback (most recent call last):
    shardwise.errors.InputError: file = 'deep.json': nests too deep to be read; give one that is flatter
    """
    try:
        yield
    except RecursionError:
        raise InputError(
            [Problem(field, plain(source), "nests too deep to be read", "give one that is flatter")]
        ) from None
    except MemoryError:
        rule = "needs more memory than there is"
        raise InputError([Problem(field, plain(source), rule, "give one that is smaller")]) from None


class Problems:
    """Collects problems so that all of them are reported at once.

    >>> problems = Problems()
    >>> problems.add("pp", 3, "must divide 32 layers", "use 1, 2 or 4")
    >>> with problems.collect():
    ...     raise InputError([Problem("dp", -1, "must be at least 1", "use 1")])
    >>> len(problems.items)
    2
    """

    def __init__(self) -> None:
        self.items: list[Problem] = []

    def add(self, field: str, value: object, rule: str, remedy: str) -> None:
        """Record one problem."""
        self.items.append(Problem(field, value, rule, remedy))

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Run a block that may raise `InputError`, and keep its problems instead of raising."""
        try:
            yield
        except InputError as error:
            self.items.extend(error.problems)

    def raise_if_any(self) -> None:
        """Raise `InputError` with everything recorded, or do nothing."""
        if self.items:
            raise InputError({str(problem): problem for problem in self.items}.values())


class Known(Generic[V]):
    """Answers by key, each asked for once; one that was refused is refused again.

    >>> known = Known[int]()
    >>> known.of("a", lambda: 1), known.of("a", lambda: 2)
    (1, 1)
    """

    def __init__(self) -> None:
        self._values: dict[object, V | InputError] = {}

    def of(self, key: object, ask: Callable[[], V]) -> V:
        """Return the answer of a key."""
        if key not in self._values:
            try:
                self._values[key] = ask()
            except InputError as error:
                self._values[key] = error
        value = self._values[key]
        if isinstance(value, InputError):
            raise value
        return value


def near(word: str, names: Iterable[str], most: int = 1, alike: float = 0.6) -> list[str]:
    """Return the names that a mistaken word may stand for, the likest first, at most so many and each so alike.

    >>> near("micro-bach", ["tp", "micro-batch"]), near("x", ["tp"])
    (['micro-batch'], [])
    """
    return list(_near(word[:MOST_SHOWN], tuple(names), most, alike))


@lru_cache(maxsize=1024)
def _near(word: str, names: tuple[str, ...], most: int, alike: float) -> tuple[str, ...]:
    from difflib import get_close_matches  # only a mistake needs it

    return tuple(get_close_matches(word, names, most, alike))


def close_to(word: str, words: Iterable[str]) -> list[str]:
    """Return up to three known words that are closest to a wrong one, none where none is close.

    Signs between letters and digits do not count, and a word that others contain, or a short one that others begin
    with, is close to them; so are the longest of those that it begins or ends with.

    >>> close_to("h00", ["h100", "h200", "a100"]), close_to("m3max", ["apple-m3-max-40core", "a100", "h100"])
    (['h200', 'h100'], ['apple-m3-max-40core'])
    >>> close_to("p5", ["a10", "p5.48xlarge", "tpu-v5p"]), close_to("DGX H100", ["gh200", "h100", "a10"])
    (['p5.48xlarge'], ['h100'])
    """
    known = {re.sub(r"[^a-z0-9]", "", one.lower()): one for one in sorted(words, reverse=True)}
    plain = re.sub(r"[^a-z0-9]", "", word.lower())
    short = len(plain) < 3
    matches = [key for key in known if plain and (key.startswith(plain) if short else plain in key)]
    matches = [known[key] for key in sorted(matches, key=lambda key: (not key.startswith(plain), len(key), key))[:3]]
    within = [key for key in known if len(key) > 2 and (plain.startswith(key) or plain.endswith(key))]
    matches = matches or [known[key] for key in sorted(within, key=len)[-1:]]
    cutoffs = () if matches else (0.6, 0.3)
    tries = (near(plain, sorted(known), 3, cutoff) for cutoff in cutoffs)
    return matches or [known[one] for one in next(filter(None, tries), [])]


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "a, b or c", the known words closest to a wrong one, or a few of them where none is close.

    >>> nearest("h00", ["h100", "h200", "a100"]), nearest("", ["one", "two"])
    ('h200 or h100', 'one or two')
    """
    known = sorted(words)
    close = close_to(word, known) or known[:5]
    return " or ".join(filter(None, (", ".join(close[:-1]), *close[-1:])))


def known_name(field: str, word: str, kind: str, names: Mapping[str, Iterable[str]], listed: Sequence[str] = ()) -> str:
    """Return the name that a word is or is another word for; raises `InputError` with near names, then all.

    Case and signs do not count in other words; the name as it stands goes first. Where there are many, those `listed`
    stand for all.

    >>> known_name("stack", "Torch_Titan", "framework", {"fsdp2": ["torchtitan"], "deepspeed": []})
    'fsdp2'
    """
    if not isinstance(word, str):
        rule, remedy = f"must be the name of a {kind}", "use one of " + ", ".join(listed or names)
        raise InputError([Problem(field, plain(word), rule, remedy)])
    if word in names:
        return word
    meant = {_letters(one): name for name, others in reversed(list(names.items())) for one in (*others, name)}
    if _letters(word) in meant:
        return meant[_letters(word)]
    close = dict.fromkeys(meant[one] for one in near(_letters(word), meant, 3, 0.65))
    hint = f"use {' or '.join(close)}; known are " if close else "use one of "
    raise InputError([Problem(field, word, f"is not a known {kind}", hint + ", ".join(listed or names))])


def _letters(word: str) -> str:
    return "".join(filter(str.isalnum, word.lower()))
