"""What is assumed for fields that a row leaves blank: one rule for each field, the same for all rows (rules.toml)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from shardwise.records import dataclass


@cache
def read(file: str) -> dict[str, Any]:
    """Return what a TOML file of this package holds.

    >>> read("engines.toml")["serving"]["step_tokens"]
    8192
    """
    return tomllib.loads(resources.files("shardwise.measured").joinpath(file).read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule for one blank field: what is taken, in words, and why."""

    field: str
    taken: str
    says: str
    because: str


@cache
def rules() -> tuple[Rule, ...]:
    """Return the rules for blank fields, in the order of the table.

    >>> rules()[0].field
    'framework'
    """
    return tuple(Rule(**row) for row in read("rules.toml")["rule"])


@cache
def rule(field: str) -> Rule:
    """Return the rule of one field."""
    return next(one for one in rules() if one.field == field)


@cache
def words(table: str) -> dict[str, str]:
    """Return a table that maps words of files to words of the package."""
    found: dict[str, str] = read("rules.toml")[table]
    return found


@cache
def network_words() -> dict[str, float]:
    """Return bytes a second of a node over networks that files name without a rate.

    >>> network_words()["omnipath"]
    19850000000.0
    """
    found: dict[str, float] = read("rules.toml")["networks"]
    return found
