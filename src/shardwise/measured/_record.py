"""One row of a file, its cells as numbers and words.

A blank cell means that the source does not say; what is taken for it is recorded as an assumption of the row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardwise.errors import InputError, Problem
from shardwise.files import own_table
from shardwise.records import dataclass

MOST = 1e24
"""What a cell may say at most, of whatever unit."""
_SCALE = {"": 1, "k": 2**10, "m": 2**20}


def _tokens(word: str) -> float:
    """Return the number of tokens that a word like "4M" means, 0 where it is none; K and M are 2^10 and 2^20."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([km]?)", word.lower())
    return float(match[1]) * _SCALE[match[2]] if match else 0.0


def refuse(field: str, value: object, rule: str) -> InputError:
    """Return the error that refuses a row; a blank cell is no wrong word, it is not stated.

    >>> str(refuse("dtype", "", "is not a type of products"))
    "dtype = '': is not stated; the row is not predicted"
    """
    reason = "is not stated" if value == "" and rule.startswith(("is not a ", "is not an ", "of ")) else rule
    return InputError([Problem(field, value, reason, "the row is not predicted")])


class Record:
    """One row of a file, read cell by cell, with a list of what was assumed for blank ones.

    >>> record = Record({"tp": "8", "pp": ""})
    >>> record.whole("tp"), record.whole("pp", 1), record.text("dtype")
    (8, 1, '')
    """

    def __init__(self, row: Mapping[str, str]) -> None:
        self.row = row
        self.assumed: list[str] = []
        self._notes: dict[str, str] | None = None

    def completed(self) -> Record:
        """Return the row with its global batch in sequences where the notes state it in tokens.

        >>> row = {"global_batch": "", "seq_len": "2048", "notes": "batch_tokens=0.5M"}
        >>> Record(row).completed().whole("global_batch")
        256
        """
        tokens = _tokens(self.notes.get("batch_tokens", ""))
        if not tokens or self.says("global_batch"):
            return self.with_cells({})
        return self.with_cells({"global_batch": str(max(round(tokens / self.positive("seq_len")), 1))})

    def with_cells(self, cells: Mapping[str, str]) -> Record:
        """Return the row with other cells and the same assumptions.

        >>> Record({"tp": ""}).with_cells({"tp": "8"}).whole("tp")
        8
        """
        record = Record({**self.row, **cells})
        record.assumed = list(self.assumed)
        return record

    def text(self, name: str) -> str:
        """Return a cell without spaces around it, empty where it is blank."""
        return (self.row.get(name) or "").strip()

    def says(self, name: str) -> bool:
        """Return whether the source states a field."""
        return self.text(name) not in ("", "unknown")

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a cell as a finite number of at least 0; raises `InputError` where it is something else."""
        text = self.text(name)
        if not self.says(name):
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < MOST:
            raise InputError([Problem(name, text[:40], "is not a finite number of at least 0", "correct the cell")])
        return value

    def whole(self, name: str, default: int = 0) -> int:
        """Return a cell as a whole number of at least 0."""
        value = self.number(name, default)
        if value != int(value):
            raise InputError([Problem(name, value, "is not a whole number", "correct the cell")])
        return int(value)

    def count(self, name: str) -> int:
        """Return a cell as a whole number above 0, 1 where the row does not state it."""
        if not self.says(name):
            return 1
        self.positive(name)
        return self.whole(name)

    def positive(self, name: str) -> float:
        """Return a number above 0 that the row must state."""
        value = self.number(name)
        if not value:
            rule = "must be above 0" if self.says(name) else "is not stated"
            raise InputError([Problem(name, self.text(name), rule, "give it in the file")])
        return value

    def assume(self, text: str) -> None:
        """Record an assumption."""
        if text not in self.assumed:
            self.assumed.append(text)

    def rule_value(self, field: str) -> str:
        """Return what the published rule takes for a blank field, and record it."""
        assumed = rule(field)
        self.assume(f"{field}: {assumed.says}")
        return assumed.value

    @property
    def notes(self) -> dict[str, str]:
        """The parts key=value of the notes."""
        if self._notes is None:
            pairs = (piece.partition("=") for piece in self.text("notes").replace(",", ";").split(";") if "=" in piece)
            self._notes = {key.strip(): value.strip() for key, _, value in pairs}
        return self._notes

    def noted(self, key: str) -> float:
        """Return a number from the notes, 0 where they do not say it."""
        words = self.notes.get(key, "").split()
        try:
            value = float(words[0]) if words else 0.0
        except ValueError:
            return 0.0
        return value if 0 <= value < MOST else 0.0


@cache
def read(file: str) -> dict[str, Any]:
    """Return what a TOML file of this package holds.

    >>> read("engines.toml")["serving"]["step_tokens"]
    8192
    """
    return own_table(__file__, file)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlankRule:
    """The rule for one blank field: what is taken, in words, and why."""

    field: str
    value: str
    says: str
    because: str


@cache
def rules() -> tuple[BlankRule, ...]:
    """Return the rules for blank fields, in the order of the table.

    >>> rules()[0].field
    'framework'
    """
    return tuple(BlankRule(**row) for row in read("rules.toml")["rule"])


@cache
def rule(field: str) -> BlankRule:
    """Return the rule of one field."""
    return next(one for one in rules() if one.field == field)


@cache
def words(table: str) -> dict[str, str]:
    """Return a table that maps words of files to words of the package."""
    table_words: dict[str, str] = read("rules.toml")[table]
    return table_words


@cache
def network_words() -> dict[str, float]:
    """Return bytes a second of a node over networks that files name without a rate.

    >>> network_words()["omnipath"]
    19850000000.0
    """
    networks: dict[str, float] = read("rules.toml")["networks"]
    return networks
